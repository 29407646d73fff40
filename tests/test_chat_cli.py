"""The command `artel chat`: options, scripts of messages and commands, what it refuses."""

import inspect
import json
from dataclasses import asdict

import pytest
from transformers import RobertaConfig
from transformers import RobertaForMaskedLM as Encoder

from artel.cli.chat_session import completions
from artel.config import TokenizerTraining
from artel.inference import ChatSettings, open_model
from artel.tokens import train_tokenizer
from artel.tokens.tokenizer.chat_template import CHATML
from support.chat_models import MARKS, ONE_THREAD, saved, trained_tokenizer
from support.runs import succeed


def test_options_have_the_defaults_of_the_settings():
    from artel.cli.chat import chat as verb

    defaults = {name: parameter.default for name, parameter in inspect.signature(verb).parameters.items()}
    assert {name: defaults[name] for name in asdict(ChatSettings())} == asdict(ChatSettings())


@pytest.mark.processes
def test_a_script_of_messages_and_commands(with_marks, tmp_path):
    script = tmp_path / "script.txt"
    saved_to = tmp_path / "with space.jsonl"
    lines = ["/set temperature 0", "/set repetition_penalty 1", "My name is Ann.", "", "What is my name?", "/reset",
             "What is my name?", "/system Speak Russian.", "/reset", "Who are you?", "/retry", f"/save {saved_to}",
             "/exit", "never said"]  # fmt: skip
    script.write_text("\n".join(lines))
    done = succeed("chat", with_marks, "--script", script, env=ONE_THREAD)
    answers = {
        "My name is Ann.": ["Hello, Ann!"],
        "Who are you?": ["Я маленькая модель."],
        "/retry": ["Я маленькая модель."],
    }
    names = iter(["Ann.", "I do not know."])
    expected = []
    for line in lines[:-1]:
        if line:
            expected += [f"> {line}", *([next(names)] if line.startswith("What") else answers.get(line, []))]
    assert done.stdout.splitlines() == expected
    assert json.loads(saved_to.read_text())["messages"][-1]["content"] == "Я маленькая модель."
    assert "temperature = 0.0" in done.stderr


def test_messages_of_several_lines_and_a_file_that_is_loaded(with_marks, artel_here):
    lines = ['"""', "/help", ' me"""', "Who \\", "are you?", "/save talk.jsonl", "/reset", "/load talk.jsonl",
             '"""My name is Ann."""', '"""never', "closed"]  # fmt: skip
    options = ("--temperature", 0, "--repetition-penalty", 1, "--new-tokens", 30, "--json")
    done = artel_here("chat", with_marks, *options, typed="\n".join(lines).encode())
    said = [message["content"] for message in json.loads(done.stdout)["messages"][::2]]
    assert said == ["/help\n me", "Who \nare you?", "My name is Ann."]
    assert "loaded: 2 messages with their answers" in done.stderr
    assert (done.returncode, "standard input:10: ends within a message" in done.stderr) == (2, True)


def test_tab_completes_commands_settings_and_files(tmp_path):
    (tmp_path / "my talk.jsonl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other.jsonl").touch()
    (tmp_path / ".hidden").touch()
    expected = {
        ("", "/s"): ["/save ", "/set "],
        ("", "/"): ["/save ", "/set ", "/load "],
        ("", "s"): [],
        ("/set ", "t"): ["temperature ", "top_p "],
        ("/set top_p ", ""): [],
        ("/load ", ""): ["folder/", "my talk.jsonl"],
        ("/save ", "fo"): ["folder/"],
        ("/load ", "folder/o"): ["folder/other.jsonl"],
        ("/load my ", "ta"): ["talk.jsonl"],
        ("/load ", f"{tmp_path}/fo"): [f"{tmp_path}/folder/"],
        ("/load ", "none/x"): [],
        ("words /load ", "fo"): [],
    }
    commands, settings = ["/save", "/set", "/load"], ["temperature", "top_p", "seed"]
    assert {key: completions(*key, commands, settings) for key in expected} == expected


def test_json_and_mistakes_of_a_script(with_marks, artel_here):
    text = b"/sett temperature 0\n/set temperature\n/set heat 1\nWho are you?\n/help me\n /etc/hosts\n/retry\n"
    options = ("--temperature", 0, "--repetition-penalty", 1, "--new-tokens", 30, "--json")
    done = artel_here("chat", with_marks, *options, typed=text)
    assert done.returncode == 2
    result = json.loads(done.stdout)
    assert [answer["message"] for answer in result["answers"]] == ["Who are you?", "/etc/hosts", "/etc/hosts"]
    assert result["answers"][0] == {"message": "Who are you?", "answer": "I am a tiny model.", "finished": True}
    assert len(result["messages"]) == 4
    assert result["settings"]["new_tokens"] == 30
    for mistake in (
        "standard input:1: /sett: unknown command", "commands are: /reset, /system TEXT, /set NAME VALUE",
        "standard input:2: /set: wrong arguments", "standard input:3: heat: unknown setting",
        "standard input:5: /help: wrong arguments",
    ):  # fmt: skip
        assert mistake in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--script", "none.txt"], "--script: none.txt cannot be read"),
        (["--script", "/dev/zero"], "/dev/zero: is a device, not a regular file"),
        (["--top-p", "2", "--seed", "-1"], "top_p: 2 is out of range"),
    ],
)
def test_wrong_options_are_told_before_a_model_is_loaded(options, message, artel_here):
    done = artel_here("chat", "no-such-model", *options)
    assert (done.returncode, message in done.stderr) == (2, True)
    assert "no-such-model" not in done.stderr


def test_an_encoder_is_refused(tmp_path, artel_here):
    tokenizer = train_tokenizer(iter(["the model"] * 9), TokenizerTraining(vocab=262), encoder=True)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = Encoder(RobertaConfig(vocab_size=tokenizer.vocabulary, **sizes))
    done = artel_here("chat", saved(tmp_path / "encoder", model, tokenizer), typed=b"Hi\n")
    assert done.returncode == 2
    assert "it is a model for masked" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refused_conversation_and_bytes_that_are_no_text(endless, tmp_path, artel_here):
    tokenizer = trained_tokenizer(MARKS)
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.hf.chat_template = refuses + CHATML
    folder = saved(tmp_path / "gemma", open_model(str(endless)).model, tokenizer)
    options = ("--system", "Be brief.", "--new-tokens", "4")
    done = artel_here("chat", folder, *options, typed=b"Hi\nbad \xff\n/system\nHi\n")
    errors = done.stderr
    assert done.returncode == 2
    assert "standard input:1: chat.template: it raises an error: System role not supported" in errors
    assert "standard input:2: character 5 of the line is not UTF-8" in errors
    assert [line for line in done.stdout.splitlines() if line.startswith(">")] == ["> Hi", "> /system", "> Hi"]
