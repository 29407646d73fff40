"""artel chat --tools: a model that calls a function, is given what it returned, and answers."""

import io
import json
import subprocess
import sys
from contextlib import closing

import pytest

from artel.cli.main import main
from artel.errors import InputError
from artel.inference import ChatSession, ChatSettings, open_model
from artel.inference.chat_functions import read_functions
from artel.text import ToolCall
from artel.tokens.tokenizer.chat_template import CHATML
from printed.inputs import written
from support.chat_models import MARKS, learned_by_heart

FUNCTION = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city."}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Omsk"}}}
TALK = [
    {"role": "user", "content": "Is it cold?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "-3"},
    {"role": "assistant", "content": "Yes: -3."},
]
MODULE = '''
from pathlib import Path


def weather(city: str):
    """
    The weather.

    Args:
        city: A city.
    """
    return -3 if city == "Omsk" else {"nothing": "known"}


def _hidden(): ...
'''
OPTIONS = ("--temperature", "0", "--repetition-penalty", "1", "--new-tokens", "80")


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    """A model that knows TALK by heart, with the functions before it."""
    folder = tmp_path_factory.mktemp("models") / "calls"
    return learned_by_heart(folder, MARKS, CHATML, [TALK], TOOLS, steps=200, max_position_embeddings=1024)


@pytest.fixture
def chat_here(monkeypatch, capsys, tmp_path):
    """The command in this process and in an empty folder, with lines from standard input."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, typed: str = "") -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode()), encoding="utf-8"))
        monkeypatch.setattr(sys, "argv", ["artel", "chat", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        seen = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code, seen.out, seen.err)

    (tmp_path / "functions.json").write_text(json.dumps([FUNCTION]))
    (tmp_path / "functions.py").write_text(MODULE)
    return run


@pytest.mark.slow
def test_results_are_typed_in_and_the_conversation_is_saved_and_loaded(calling, chat_here, tmp_path):
    lines = ["Is it cold?", "-3", "/save talk.jsonl", "/reset", "/load talk.jsonl", "/retry"]
    done = chat_here(calling, "--tools", "functions.json", *OPTIONS, typed="\n".join(lines))
    assert done.returncode == 0, done.stderr
    answered = ["> Is it cold?", "I look.", '→ weather({"city": "Omsk"})', "← -3", "Yes: -3."]
    assert done.stdout.splitlines()[:5] == answered
    assert done.stdout.splitlines()[-2:] == ["> /retry", "Yes: -3."]
    saved = json.loads((tmp_path / "talk.jsonl").read_text())
    assert saved["tools"] == TOOLS
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert saved["messages"][1]["tool_calls"][0]["function"] == CALL["function"]


def test_functions_of_a_python_file_run(calling, chat_here):
    done = chat_here(calling, "--tools", "functions.py", "--json", *OPTIONS, typed="Is it cold?")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [message["content"] for message in result["messages"]] == ["Is it cold?", "I look.", "-3", "Yes: -3."]
    assert result["answers"][0]["calls"][0]["arguments"] == {"city": "Omsk"}


def test_a_script_that_ends_before_a_result_says_so(calling, chat_here):
    done = chat_here(calling, "--tools", "functions.json", *OPTIONS, typed="Is it cold?")
    assert (done.returncode, "the lines end before weather has a result" in done.stderr) == (2, True)


def test_a_message_is_not_taken_while_a_call_is_open(calling):
    with open_session(calling) as talk:
        assert "".join(talk.answer("Is it cold?")) == "I look."
        assert talk.open_calls == (ToolCall("weather", {"city": "Omsk"}),)
        with pytest.raises(InputError, match="waits for what it called: weather"):
            talk.answer("Well?")
        assert "".join(talk.answer_results(["-3"])) == "Yes: -3."
        assert not talk.open_calls


def open_session(folder):
    settings = ChatSettings(temperature=0, repetition_penalty=1, new_tokens=80)
    return closing(ChatSession(open_model(str(folder)), settings, "", print, tuple(TOOLS)))


def test_a_file_of_functions_is_a_module_like_others(tmp_path):
    (tmp_path / "helper.py").write_text("DEGREES = -3\n")
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom helper import DEGREES\n"
    (tmp_path / "tools.py").write_text(
        f"{head}@dataclass\nclass Place:\n    name: str\n{MODULE.replace('-3', 'DEGREES')}"
    )
    functions = read_functions(str(tmp_path / "tools.py"))
    assert functions.result(ToolCall("weather", {"city": "Omsk"})) == "-3"
    assert str(tmp_path) not in sys.path


def test_what_a_function_raises_is_told_to_the_model(tmp_path):
    (tmp_path / "functions.py").write_text(MODULE)
    functions = read_functions(str(tmp_path / "functions.py"))
    assert [tool["function"]["name"] for tool in functions.tools] == ["weather"]
    assert functions.result(ToolCall("weather", {"city": "Tomsk"})) == '{"nothing": "known"}'
    assert functions.result(ToolCall("weather", {"town": "Omsk"})).startswith("error: TypeError: ")
    assert functions.result(ToolCall("rain", {})) == "error: there is no function rain; there are weather"


@pytest.mark.parametrize("page", ["docs/chat.md", "docs/ru/chat.md"])
def test_the_file_of_the_page_can_be_called(tmp_path, page):
    written(page, "functions.py")(tmp_path)
    functions = read_functions(str(tmp_path / "functions.py"))
    assert functions.tools[0]["function"]["parameters"]["required"] == ["city"]
    assert functions.result(ToolCall("get_weather", {"city": "Omsk"})) == '{"degrees": -3}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[", "is no JSON"),
        ("a.json", "{}", "is no list of functions"),
        ("a.json", '[{"description": "?"}]', "entry 1 has no name"),
        ("a.py", "x = 1", "has no function"),
        ("a.py", "1 / 0", "cannot be run: ZeroDivisionError"),
        ("a.py", "\n\ndef f(a): ...", "a.py:3: f cannot be described"),
        ("b.json", None, "there is no file"),
    ],
)
def test_files_that_are_no_functions_are_refused(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_functions(name)
