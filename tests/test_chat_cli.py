"""`artel chat`: the conversation kept, streaming, the command, and the terminal it happens in."""

import fcntl
import inspect
import io
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from transformers import RobertaConfig
from transformers import RobertaForMaskedLM as Encoder

from artel.cli.main import main
from artel.config import TokenizerTraining
from artel.errors import InputError
from artel.tokens import train_tokenizer
from artel.tokens.chat_template import (
    CHATML,
    render,
    template_of,
)
from artel.using import Talk, TalkSettings, open_model
from chat_models import (
    CONVERSATIONS,
    MARKS,
    ONE_THREAD,
    llama,
    one_thread,  # noqa: F401  # every test here runs with it
    said,
    saved,
    told,
    trained_tokenizer,
)
from helpers import ENVIRONMENT, artel


def learned_by_heart(folder: Path, special: list[str], own_template: str | None) -> Path:
    tokenizer = trained_tokenizer(special)
    tokenizer.hf.chat_template = own_template
    template = template_of(tokenizer, "auto")
    model = llama(tokenizer).train()
    texts = [render(tokenizer, template, told(conversation), False) for conversation in CONVERSATIONS]
    rows = [torch.tensor(encoded.ids) for encoded in tokenizer.encode_with_places(texts, control=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(80):
        loss = model(input_ids=ids.clamp(min=0), labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return saved(folder, model, tokenizer)


@pytest.fixture(scope="session")
def with_marks(tmp_path_factory) -> Path:
    """A model whose tokenizer has ChatML's marks as tokens, but no template of its own: chatml it is."""
    return learned_by_heart(tmp_path_factory.mktemp("chat") / "marks", MARKS, None)


@pytest.fixture(scope="session")
def in_letters(tmp_path_factory) -> Path:
    """A model whose tokenizer has the template but no such tokens: it spells <|im_end|>."""
    return learned_by_heart(tmp_path_factory.mktemp("chat") / "letters", [], CHATML)


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Path:
    """A model whose tokenizer has neither: its answers follow on `Assistant:` and a space of its own."""
    return learned_by_heart(tmp_path_factory.mktemp("chat") / "plain", [], None)


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> Path:
    """Random weights that never end a text: its end tokens have the logit 0, and others are likelier."""
    tokenizer = trained_tokenizer(MARKS)
    model = llama(tokenizer, max_position_embeddings=1_000_000)
    with torch.no_grad():
        for token in [*tokenizer.special_ids, *tokenizer.hf.convert_tokens_to_ids(MARKS)]:
            model.lm_head.weight[token] = 0
    return saved(tmp_path_factory.mktemp("chat") / "endless", model, tokenizer)


def talk_with(folder: Path, notes: list[str] | None = None, system: str = "", **settings) -> Talk:
    return Talk(open_model(str(folder)), TalkSettings(**settings), system, (notes if notes is not None else []).append)


# The conversation


@pytest.mark.parametrize(
    ("model", "note"), [("with_marks", "written as chatml"), ("in_letters", ""), ("plain", "written as plain")]
)
def test_a_model_that_learned_to_answer_answers_and_stops(model, note, request):
    notes: list[str] = []
    talk = talk_with(request.getfixturevalue(model), notes, temperature=0.0, repetition_penalty=1.0)
    assert note in "".join(notes)
    assert len(notes) == bool(note)
    assert said(talk.answer("Who are you?")) == "I am a tiny model."
    talk.reset()
    talk.system = "Speak Russian."
    assert said(talk.answer("Who are you?")) == "Я маленькая модель."
    talk.reset()
    talk.system = ""
    assert [said(talk.answer(text)) for text in ("My name is Ann.", "What is my name?")] == ["Hello, Ann!", "Ann."]
    assert all(exchange.finished for exchange in talk.exchanges)
    assert len(notes) == bool(note)


def test_history_is_what_the_prompt_holds(with_marks):
    answers = {}
    for history in (0, 1):
        talk = talk_with(with_marks, temperature=0.0, repetition_penalty=1.0, history=history)
        answers[history] = [said(talk.answer(text)) for text in ("My name is Ann.", "What is my name?")]
        assert len(talk.messages) == 4  # all of it is kept, whatever goes into the prompt
    assert answers == {0: ["Hello, Ann!", "I do not know."], 1: ["Hello, Ann!", "Ann."]}


def test_equal_seeds_repeat_and_retry_replaces(endless):
    talks = [talk_with(endless, new_tokens=12, seed=seed) for seed in (7, 7, 8)]
    texts = [[said(talk.answer(text)) for text in ("Hi", "Hi again")] for talk in talks]
    assert texts[0] == texts[1] != texts[2]
    talk = talks[0]
    assert said(talk.retry()) == talk.exchanges[-1].answer != texts[0][1]
    assert [exchange.message for exchange in talk.exchanges] == ["Hi", "Hi again"]
    assert not talk.exchanges[-1].finished
    talk.reset()
    assert said(talk.answer("Hi")) == texts[0][0]


def test_a_stopped_answer_keeps_what_was_written(endless):
    talk = talk_with(endless)
    pieces = talk.answer("Hi")
    taken = [next(pieces) for _ in range(3)]
    pieces.close()
    assert talk.messages == told([("user", "Hi"), ("assistant", said(taken))])


def test_the_oldest_exchanges_leave_a_full_window(tmp_path):
    tokenizer = trained_tokenizer(MARKS)
    notes: list[str] = []
    folder = saved(tmp_path / "small", llama(tokenizer, max_position_embeddings=120), tokenizer)
    talk = talk_with(folder, notes, system="Speak Russian.", new_tokens=40, top_k=0, temperature=1.0)
    for number in range(5):
        said(talk.answer(f"Message {number}"))
    left = [note for note in notes if "without the oldest" in note]
    assert left, notes
    assert left[0].startswith("the model takes 120 tokens: without the oldest 1 of")
    assert not any("an answer is left" in note for note in notes)  # exchanges leave before the answer loses room
    said(talk.answer("a " * 80))  # over the half, under the whole: the answer has less room
    assert any("an answer is left" in note for note in notes)
    before = talk.messages
    with pytest.raises(InputError, match="the model takes 120"):
        talk.answer("a " * 200)
    assert talk.messages == before


def test_save_writes_a_conversation_that_a_chat_source_reads(endless, tmp_path):
    talk = talk_with(endless, system="Be brief.", new_tokens=5)
    with pytest.raises(InputError, match="nothing has been said"):
        talk.save(str(tmp_path / "no.jsonl"))
    answer = said(talk.answer("Привет"))
    for _ in range(2):  # again over the first
        talk.save(str(tmp_path / "talk.jsonl"))
    expected = {"messages": told([("system", "Be brief."), ("user", "Привет"), ("assistant", answer)])}
    assert [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()] == [expected]
    assert [file.name for file in tmp_path.iterdir()] == ["talk.jsonl"]
    with pytest.raises(InputError, match="cannot be written"):
        talk.save(str(tmp_path))


def test_settings():
    settings = TalkSettings()
    assert settings.changed("new_tokens", "1_000").new_tokens == 1000
    assert settings.changed("temperature", "0.25").temperature == 0.25
    wrong = {
        ("temprature", "1"): "did you mean temperature?", ("new-tokens", "5"): "did you mean new_tokens?",
        ("colour", "1"): "settings are: history", ("top_k", "many"): "'many' is not a number",
        ("history", "1.5"): "not a whole number", ("top_p", "1.5"): "it goes from 0 to 1",
        ("temperature", "1e999"): "too large", ("new_tokens", "0"): "it goes from 1 up",
    }  # fmt: skip
    for (name, value), message in wrong.items():
        with pytest.raises(InputError) as error:
            settings.changed(name, value)
        assert message in str(error.value)
    with pytest.raises(InputError) as error:
        TalkSettings(top_p=float("nan"), seed=-1)
    assert len(error.value.problems) == 2


def test_options_have_the_defaults_of_the_settings():
    from artel.cli.chat import chat as verb

    defaults = {name: parameter.default for name, parameter in inspect.signature(verb).parameters.items()}
    assert {name: defaults[name] for name in asdict(TalkSettings())} == asdict(TalkSettings())


# The command


@pytest.fixture
def chat_here(monkeypatch, capsys):
    """The command in this process, which has torch already; standard input is bytes, not a terminal."""

    def run(*arguments: str, typed: bytes = b"") -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        monkeypatch.setattr(sys, "argv", ["artel", "chat", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        seen = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code, seen.out, seen.err)

    return run


def test_a_script_of_messages_and_commands(with_marks, tmp_path):
    script = tmp_path / "script.txt"
    saved_to = tmp_path / "with space.jsonl"
    lines = ["/set temperature 0", "/set repetition_penalty 1", "My name is Ann.", "", "What is my name?", "/reset",
             "What is my name?", "/system Speak Russian.", "/reset", "Who are you?", "/retry", f"/save {saved_to}",
             "/exit", "never said"]  # fmt: skip
    script.write_text("\n".join(lines))
    done = artel("chat", with_marks, "--script", script, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
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


def test_json_and_mistakes_of_a_script(with_marks, chat_here):
    text = b"/sett temperature 0\n/set temperature\n/set heat 1\nWho are you?\n/help me\n /etc/hosts\n/retry\n"
    options = ("--temperature", 0, "--repetition-penalty", 1, "--new-tokens", 30, "--json")
    done = chat_here(with_marks, *options, typed=text)
    assert done.returncode == 2
    result = json.loads(done.stdout)
    assert [answer["message"] for answer in result["answers"]] == ["Who are you?", "/etc/hosts", "/etc/hosts"]
    assert result["answers"][0] == {"message": "Who are you?", "answer": "I am a tiny model.", "finished": True}
    assert len(result["messages"]) == 4
    assert result["settings"]["new_tokens"] == 30
    for mistake in (
        "standard input:1: /sett: there is no such command", "commands are: /reset, /system TEXT, /set NAME VALUE",
        "standard input:2: /set: it is written otherwise", "standard input:3: heat: there is no such setting",
        "standard input:5: /help: it is written otherwise",
    ):  # fmt: skip
        assert mistake in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--script", "none.txt"], "--script: none.txt cannot be read"),
        (["--top-p", "2", "--seed", "-1"], "top_p: 2 is out of range"),
    ],
)
def test_wrong_options_are_told_before_a_model_is_loaded(options, message, chat_here):
    done = chat_here("no-such-model", *options)
    assert (done.returncode, message in done.stderr) == (2, True)
    assert "no-such-model" not in done.stderr


def test_an_encoder_is_refused(tmp_path, chat_here):
    tokenizer = train_tokenizer(iter(["the model"] * 9), TokenizerTraining(vocab=262), encoder=True)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = Encoder(RobertaConfig(vocab_size=tokenizer.vocabulary, **sizes))
    done = chat_here(saved(tmp_path / "encoder", model, tokenizer), typed=b"Hi\n")
    assert done.returncode == 2
    assert "it is a model for masked" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refused_conversation_and_bytes_that_are_no_text(endless, tmp_path, chat_here):
    tokenizer = trained_tokenizer(MARKS)
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.hf.chat_template = refuses + CHATML
    folder = saved(tmp_path / "gemma", open_model(str(endless)).model, tokenizer)
    options = ("--system", "Be brief.", "--new-tokens", "4")
    done = chat_here(folder, *options, typed=b"Hi\nbad \xff\n/system\nHi\n")
    errors = done.stderr
    assert done.returncode == 2
    assert "standard input:1: chat.template: it refuses the conversation: System role not supported" in errors
    assert "standard input:2: character 5 of the line is not UTF-8" in errors
    assert [line for line in done.stdout.splitlines() if line.startswith(">")] == ["> Hi", "> /system", "> Hi"]


def test_help_has_an_example(chat_here):
    assert "Example: artel chat" in " ".join(chat_here("--help").stdout.split())


# The terminal

# The child makes the pseudo-terminal the one that it is controlled by, so that Ctrl-C typed into it is a signal.
_IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "artel", *sys.argv[1:]])
"""


class Terminal:
    """`artel` at a pseudo-terminal: what is typed, and what is seen."""

    def __init__(self, *arguments: str, stdout=None) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x28\x00\xa0\x00\x00\x00\x00\x00")  # 40 lines of 160 columns
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_TERMINAL, *map(str, arguments)],
            stdin=slave, stdout=stdout or slave, stderr=slave, start_new_session=True,
            env={**ENVIRONMENT, **ONE_THREAD, "TERM": "dumb"},
        )  # fmt: skip
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str, limit: float = 90) -> None:
        """Read on until `text` is seen; what comes after it is left to the next call."""
        self._read_until(lambda: text in self._seen, limit, text)
        self._seen = self._seen.partition(text)[2]

    def until_more(self, characters: int, limit: float = 90) -> None:
        self._read_until(lambda: len(self._seen) >= characters, limit, f"{characters} characters")

    def _read_until(self, done, limit: float, wanted: str) -> None:
        end = time.monotonic() + limit
        while not done():
            assert time.monotonic() < end, f"{wanted!r} was not seen in: {self._seen[-2000:]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self._seen += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    raise AssertionError(f"ended before {wanted!r}: {self._seen[-2000:]!r}") from None

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal():
    opened: list[Terminal] = []

    def open_terminal(*arguments: str, **more) -> Terminal:
        opened.append(Terminal(*arguments, **more))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(endless, tmp_path, terminal):
    file = tmp_path / "talk.jsonl"
    seen = terminal("chat", endless, "--new-tokens", "500000", "--temperature", "0")
    seen.until("> ")
    for stop in ("typed", "sent"):
        seen.type(f"Message {stop}\n")
        seen.until(f"Message {stop}\r\n")
        seen.until_more(50)
        if stop == "typed":
            seen.type("\x03")
        else:
            seen.process.send_signal(signal.SIGINT)
        seen.until("(stopped; Ctrl-D ends)")
        seen.until("> ")
    for _ in range(5):  # at the prompt: nothing to stop, and the program stays
        # readline may miss a signal between showing the prompt and waiting for the line; people press again.
        time.sleep(0.3)
        seen.type("\x03")
        with suppress(AssertionError):
            seen.until("(stopped; Ctrl-D ends)", limit=5)
            break
    else:
        pytest.fail("Ctrl-C at the prompt is not answered")
    seen.until("> ")
    seen.type(f"/save {file}\n")
    seen.until("saved: ")
    seen.until("> ")
    seen.type("/nonsense\n")
    seen.until("commands are:")
    seen.until("> ")
    seen.type("\x04")
    assert seen.process.wait(timeout=30) == 0
    messages = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in messages[::2]] == ["Message typed", "Message sent"]
    assert all(len(message["content"]) > 10 for message in messages[1::2])


def test_the_prompt_is_not_written_into_a_file(with_marks, tmp_path, terminal):
    with (tmp_path / "out.txt").open("wb") as out:
        seen = terminal("chat", with_marks, "--temperature", "0", "--repetition-penalty", "1", stdout=out)
        seen.until("> ")
        seen.type("Who are you?\n")
        seen.until("> ")
        seen.type("/exit\n")
        assert seen.process.wait(timeout=30) == 0
    assert (tmp_path / "out.txt").read_text() == "I am a tiny model.\n"


def test_answers_are_streamed(endless):
    talk = talk_with(endless, new_tokens=30)
    pieces = list(talk.answer("Hi"))
    assert len(pieces) > 10
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(accumulate(pieces)))
    assert said(pieces) == talk.exchanges[-1].answer
