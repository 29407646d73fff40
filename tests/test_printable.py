"""What others wrote acts on no terminal and forges no line: names, keys, answers of servers, a model's tokens."""

import json
import re
import socket
import sys
import threading

import pytest
import yaml

from artel.cli.main import main
from artel.cli.streams import echo, print_result
from artel.errors import InputError, Problem
from artel.printable import in_a_line, in_lines, json_text
from support.runs import write_run

FORGED = "a\nartel: done\x1b[31m\r\x9b2J\u2028\u202eb"
SHOWN = r"a\nartel: done\x1b[31m\r\x9b2J\u2028\u202eb"
# All that may not reach a terminal; line breaks and tabs apart.
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def run_here(monkeypatch, capfd, *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["artel", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    assert not ACTING.search(out + err)
    return int(ended.value.code or 0), out, err


def lines_of_ours(said: str) -> list[str]:
    return [line for line in said.split("\n") if line.startswith("artel: done") or line == "artel: done"]


def test_the_same_text_in_a_line_in_lines_and_in_json():
    assert in_a_line(FORGED) == SHOWN
    assert in_lines("a\tb\nc" + FORGED) == "a\tb\nc" + SHOWN.replace(r"\n", "\n")
    assert in_a_line("\ud800 \udcff и 漢字 👩‍🚀 é") == r"\ud800 \udcff и 漢字 👩‍🚀 é"
    assert json.loads(json_text({FORGED: [FORGED]})) == {FORGED: [FORGED]}
    assert not ACTING.search(json_text({FORGED: FORGED}))


def test_messages_have_only_the_lines_of_their_own(capfd):
    problem = Problem(FORGED, FORGED, FORGED, quoted=(FORGED, FORGED))
    assert problem.lines == [f"{SHOWN}: {SHOWN}", f"    | {SHOWN}", f"    | {SHOWN}", f"    {SHOWN}"]
    error = InputError([problem, problem])
    assert (str(error).count("\n"), error.in_a_line.count("\n")) == (7, 0)
    echo(f"reading {FORGED}", "the second line")
    print_result(f"{FORGED}\n")
    out, err = capfd.readouterr()
    assert err == f"reading {SHOWN}\nthe second line\n"
    assert out == SHOWN.replace(r"\n", "\n") + "\n\n"


def test_a_name_of_a_file_and_a_json_key_forge_no_line(tmp_path, monkeypatch, capfd):
    name = FORGED + ".jsonl"
    (tmp_path / name).write_text(json.dumps({FORGED: "x"}) + "\n")
    file = write_run(tmp_path / "run.yaml")
    run = yaml.safe_load(file.read_text())
    run["data"]["sources"] = [{"path": name}]
    file.write_text(yaml.safe_dump(run))
    status, _, err = run_here(monkeypatch, capfd, "prepare", "run.yaml")
    assert status == 2
    assert lines_of_ours(err) == []
    assert f"{SHOWN}.jsonl:1" in err
    assert f"it has: {SHOWN}" in err
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({FORGED: 1}))
    commands = [["config", "check", "wrong.yaml"], ["config", "check", FORGED], ["report", FORGED], [FORGED]]
    for command in [*commands, ["recipes", "cat", "demo", FORGED], ["report", f"--{FORGED}"]]:
        status, _, err = run_here(monkeypatch, capfd, *command)
        shown = SHOWN in err or SHOWN.replace(r"\n", r"\x0a").replace(r"\r", r"\x0d") in err  # typer's own way
        assert (status, lines_of_ours(err), shown) == (2, [], True), err


def test_the_status_line_of_a_server_forges_no_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 404 gone\x1b[2J\x9b2J\x0bartel: done\r\nContent-Length: 0\r\n\r\n")

        serving = threading.Thread(target=answer, daemon=True)
        serving.start()
        source = {"path": f"http://127.0.0.1:{server.getsockname()[1]}/a.txt"}
        file = write_run(tmp_path / "run.yaml")
        run = yaml.safe_load(file.read_text())
        run["data"]["sources"] = [source]
        file.write_text(yaml.safe_dump(run))
        monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
        status, _, err = run_here(monkeypatch, capfd, "prepare", file)
        serving.join(100)
        assert not serving.is_alive(), err
    assert status == 2
    assert lines_of_ours(err) == []
    assert r"answers 404 gone\x1b[2J\x9b2J\x0bartel: done" in err


@pytest.mark.long
def test_the_tokens_of_a_model_act_on_no_terminal(endless, tmp_path, monkeypatch, capfd):
    """At a high temperature a vocabulary of bytes writes every control character; JSON has the text as it is."""
    options = ["--temperature", "90", "--top-k", "0", "--seed", "7"]
    writes = ["generate", endless, "--prompt", "artel: \x1b[1mhe\nsaid", "--max-new-tokens", "300", *options]
    status, out, _ = run_here(monkeypatch, capfd, *writes)
    assert status == 0
    assert r"artel: \x1b[1mhe" in out
    assert re.search(r"\\x[01]", out.partition("said")[2])
    status, out, _ = run_here(monkeypatch, capfd, *writes, "--json")
    assert status == 0
    assert ACTING.search(json.loads(out)["text"])
    assert "\x1b[1mhe\nsaid" in json.loads(out)["prompt"]

    (tmp_path / "script").write_text("Who are you?\n")
    talks = ["chat", endless, "--script", tmp_path / "script", "--new-tokens", "300", "--top-p", "1", *options]
    status, out, _ = run_here(monkeypatch, capfd, *talks)
    assert status == 0
    assert re.search(r"\\x[01]", out)
    status, out, err = run_here(monkeypatch, capfd, *talks, "--json")
    assert status == 0
    assert re.search(r"\\x[01]", err)
    assert ACTING.search(json.loads(out)["answers"][0]["answer"])


def test_documents_are_shown_without_acting(tmp_path, monkeypatch, capfd):
    text = tmp_path / "a.txt"
    text.write_text("\n\n".join(f"paragraph {number} red\u202e, {number * 7}" for number in range(200)))
    file = write_run(
        tmp_path / "run.yaml",
        data={"sources": [{"path": str(text), "document": "paragraph"}], "validation": 0},
        tokenizer={"train": {"vocab": 300}},
    )
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    status, out, _ = run_here(monkeypatch, capfd, "data", "show", file)
    assert status == 0
    assert r"\u202e, 7" in out
