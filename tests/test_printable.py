"""What others wrote acts on no terminal and forges no line: names, keys, answers of servers, a model's tokens."""

import json
import re
import socket

import pytest
import yaml

from artel.cli.streams import print_result, print_status
from artel.errors import InputError, Problem
from artel.printable import escape_line, escape_lines, json_text
from support.runs import write_run
from support.servers import raw_server

FORGED = "a\nartel: done\x1b[31m\r\x9b2J\u2028\u202eb"
SHOWN = r"a\nartel: done\x1b[31m\r\x9b2J\u2028\u202eb"
# All that may not reach a terminal; line breaks and tabs apart.
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def run_here(command):
    """The command in this process, whose output acts on no terminal."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status, out, err = command(*arguments)
        assert not ACTING.search(out + err)
        return status, out, err

    return run


def lines_of_ours(said: str) -> list[str]:
    return [line for line in said.split("\n") if line.startswith("artel: done") or line == "artel: done"]


def test_the_same_text_in_a_line_in_lines_and_in_json():
    assert escape_line(FORGED) == SHOWN
    assert escape_lines("a\tb\nc" + FORGED) == "a\tb\nc" + SHOWN.replace(r"\n", "\n")
    assert escape_line("\ud800 \udcff и 漢字 👩‍🚀 é") == r"\ud800 \udcff и 漢字 👩‍🚀 é"
    assert json.loads(json_text({FORGED: [FORGED]})) == {FORGED: [FORGED]}
    assert not ACTING.search(json_text({FORGED: FORGED}))


def test_messages_have_only_the_lines_of_their_own(capfd):
    problem = Problem(FORGED, FORGED, FORGED, quoted=(FORGED, FORGED))
    assert problem.lines == [f"{SHOWN}: {SHOWN}", f"    | {SHOWN}", f"    | {SHOWN}", f"    {SHOWN}"]
    error = InputError([problem, problem])
    assert (str(error).count("\n"), error.one_line.count("\n")) == (7, 0)
    print_status(f"reading {FORGED}", "the second line")
    print_result(f"{FORGED}\n")
    out, err = capfd.readouterr()
    assert err == f"reading {SHOWN}\nthe second line\n"
    assert out == SHOWN.replace(r"\n", "\n") + "\n\n"


def test_a_name_of_a_file_and_a_json_key_forge_no_line(tmp_path, run_here):
    name = FORGED + ".jsonl"
    (tmp_path / name).write_text(json.dumps({FORGED: "x"}) + "\n")
    write_run(tmp_path / "run.yaml", data={"sources": [{"path": name}]})
    status, _, err = run_here("prepare", "run.yaml")
    assert status == 2
    assert lines_of_ours(err) == []
    assert f"{SHOWN}.jsonl:1" in err
    assert f"it has: {SHOWN}" in err
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({FORGED: 1}))
    commands = [["config", "check", "wrong.yaml"], ["config", "check", FORGED], ["report", FORGED], [FORGED]]
    for command in [*commands, ["recipes", "cat", "demo", FORGED], ["report", f"--{FORGED}"]]:
        status, _, err = run_here(*command)
        shown = SHOWN in err or SHOWN.replace(r"\n", r"\x0a").replace(r"\r", r"\x0d") in err  # typer's own way
        assert (status, lines_of_ours(err), shown) == (2, [], True), err


def test_the_status_line_of_a_server_forges_no_line(tmp_path, monkeypatch, run_here):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 404 gone\x1b[2J\x9b2J\x0bartel: done\r\nContent-Length: 0\r\n\r\n")

    with raw_server(answer) as address:
        file = write_run(tmp_path / "run.yaml", data={"sources": [{"path": f"{address}/a.txt"}]})
        status, _, err = run_here("prepare", file)
    assert status == 2
    assert lines_of_ours(err) == []
    assert r"answers 404 gone\x1b[2J\x9b2J\x0bartel: done" in err


@pytest.mark.long
def test_the_tokens_of_a_model_act_on_no_terminal(endless, tmp_path, run_here):
    """At a high temperature a vocabulary of bytes writes every control character; JSON has the text as it is."""
    options = ["--temperature", "90", "--top-k", "0", "--seed", "7"]
    writes = ["generate", endless, "--prompt", "artel: \x1b[1mhe\nsaid", "--max-new-tokens", "300", *options]
    status, out, _ = run_here(*writes)
    assert status == 0
    assert r"artel: \x1b[1mhe" in out
    assert re.search(r"\\x[01]", out.partition("said")[2])
    status, out, _ = run_here(*writes, "--json")
    assert status == 0
    assert ACTING.search(json.loads(out)["text"])
    assert "\x1b[1mhe\nsaid" in json.loads(out)["prompt"]

    (tmp_path / "script").write_text("Who are you?\n")
    talks = ["chat", endless, "--script", tmp_path / "script", "--new-tokens", "300", "--top-p", "1", *options]
    status, out, _ = run_here(*talks)
    assert status == 0
    assert re.search(r"\\x[01]", out)
    status, out, err = run_here(*talks, "--json")
    assert status == 0
    assert re.search(r"\\x[01]", err)
    assert ACTING.search(json.loads(out)["answers"][0]["answer"])


def test_documents_are_shown_without_acting(tmp_path, monkeypatch, run_here):
    text = tmp_path / "a.txt"
    text.write_text("\n\n".join(f"paragraph {number} red\u202e, {number * 7}" for number in range(200)))
    file = write_run(
        tmp_path / "run.yaml",
        data={"sources": [{"path": str(text), "document": "paragraph"}], "validation": 0},
        tokenizer={"train": {"vocab": 300}},
    )
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    status, out, _ = run_here("data", "show", file)
    assert status == 0
    assert r"\u202e, 7" in out
