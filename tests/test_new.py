"""`artel new`: four answers become a run file that passes `config check` and `plan`."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
import typer
import yaml
from pyarrow import parquet

from artel.cli.main import app
from artel.config import RunConfig, load_run
from artel.errors import InputError
from artel.planning import check_run
from artel.planning.budget.choose import choose_model_for_plan
from artel.planning.hardware import find_hardware
from artel.planning.new import PresetAnswers, answer_questions, format_run_file
from artel.planning.new.text_summary import summarize_text
from artel.planning.plan import make_plan
from artel.registry import OBJECTIVES
from support.chat_models import saved, trained_tokenizer
from support.messages import logged
from support.runs import ENVIRONMENT, refused, succeed
from support.saved_models import gpt2
from support.waiting import Screen

VERBS = {name: OBJECTIVES[name].presentation.verb for name in OBJECTIVES.names}
CONVERSATION = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A small model."}]
ANSWERS = [{"text": "the forest", "answer_start": 11}]
QUESTION = {"id": "1", "question": "Where is Anna?", "answers": ANSWERS}
PARAGRAPH = {"context": "Anna is in the forest.", "qas": [QUESTION]}
LARGE = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}
LARGE |= {"architectures": ["GPT2LMHeadModel"]}
GPT2_HEADS = ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModel")
KINDS = {"write": "text", "fill-in": "text", "chat": "conversations", "prefer": "preferences", "answer": "questions",
         "rewrite": "pairs", "label": "labels", "score": "preferences", "rank": "matches", "tag": "entities",
         "embed": "matches"}  # fmt: skip


@pytest.fixture(autouse=True)
def texts() -> dict[str, str]:
    """A small text of each kind of records."""
    words = random.Random(0)
    Path("novel.txt").write_text(" ".join("".join(words.choices("aeiknorst", k=4)) for _ in range(8000)))
    Path("squad.json").write_text(json.dumps({"version": "1.1", "data": [{"title": "a", "paragraphs": [PARAGRAPH]}]}))
    better = {"prompt": "Who are you?", "chosen": "A small model.", "rejected": "A tree."}
    row_of = {
        "labels": lambda n: {"text": f"a film about {n}", "label": "abc"[n % 3]},
        "entities": lambda n: {"text": f"Anna saw film {n} .", "label": [[0, 4, "PER"]]},
        "matches": lambda n: {"query": f"where is {n}?", "positive": f"{n} is there"},
        "pairs": lambda n: {"input": f"{n} is there", "output": f"there is {n}"},
        "conversations": lambda n: {"messages": CONVERSATION, "n": n},
        "preferences": lambda n: {**better, "n": n},
    }
    for kind, row in row_of.items():
        Path(f"{kind}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(40)))
    return {kind: f"{kind}.jsonl" for kind in row_of} | {"text": "novel.txt", "questions": "squad.json"}


@pytest.fixture
def pretrained(tmp_path: Path) -> str:
    """A folder with a small GPT-2 and its tokenizer."""
    tokenizer = trained_tokenizer([])
    return str(saved(tmp_path / "small", gpt2(vocabulary=tokenizer.vocabulary), tokenizer))


def written(given: PresetAnswers) -> RunConfig:
    """The run of the file that `artel new` writes with those flags."""
    answers = answer_questions(given, None)
    Path("run.yaml").write_text(format_run_file(answers, "run.yaml"))
    return load_run("run.yaml")


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("causal", "masked", "chat") else pytest.mark.long)
        for name in OBJECTIVES.names
        if OBJECTIVES[name].presentation.is_offered
    ],
)
@pytest.mark.parametrize("start", ["scratch", "pretrained"])
def test_the_file_of_every_answer_passes_check_and_plan(texts, pretrained, objective, start):
    verb = VERBS[objective]
    model = pretrained if start == "pretrained" else "scratch"
    text = [texts[KINDS[verb]]]
    # GPT-2 has few heads, and its tokenizer puts nothing between a query and a document.
    is_refused = OBJECTIVES[objective].auto_class not in GPT2_HEADS or objective == "rerank"
    if start == "pretrained" and is_refused:
        with pytest.raises(InputError):
            check_run(written(PresetAnswers(text, verb, model, "10min")))
        return
    run = written(PresetAnswers(text, verb, model, "10min"))
    assert (run.objective, run.train.budget) == (objective, 600)
    assert run.model.auto == (start == "scratch" and verb == "write")
    check_run(run)
    if run.model.auto:
        run = choose_model_for_plan(run, find_hardware(), None).config
    assert make_plan(run, find_hardware()).verdict == "fits"


def test_hardware_decides_between_all_weights_and_adapters(texts, pretrained):
    run = written(PresetAnswers([texts["text"]], "write", pretrained, "2h", "h100-80gb:8"))
    assert run.model.lora is None
    assert "--hardware h100-80gb:8" in Path("run.yaml").read_text()
    assert "--nproc 8" in Path("run.yaml").read_text()


def test_a_model_that_only_all_gpus_together_hold_is_shared_out(texts, tmp_path):
    """Of 1.6 billion parameters and no weights: they are not read."""
    trained_tokenizer([]).save(tmp_path / "large")
    (tmp_path / "large/config.json").write_text(json.dumps(LARGE))
    (tmp_path / "large/model.safetensors").touch()
    decided = {"h100-80gb:8": (False, False), "rtx-4090:2": (True, False), "rtx-4090": (False, True)}
    for hardware, shares_and_adapts in decided.items():
        run = written(PresetAnswers([texts["text"]], "write", str(tmp_path / "large"), "2h", hardware))
        assert (run.parallel.data == "fsdp", run.model.lora is not None) == shares_and_adapts


def test_a_folder_at_home_is_found(texts, pretrained, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(pretrained).parent))
    assert written(PresetAnswers([texts["text"]], "write", "~/small", "10min")).model.from_ == pretrained
    with pytest.raises(InputError, match="is not a folder"):
        written(PresetAnswers([texts["text"]], "write", "~/gone", "10min"))


@pytest.mark.parametrize("count", [1, 4])
def test_without_a_terminal_each_missing_flag_is_named(count):
    flags = {"--text": "novel.txt", "--learn": "write", "--from": "scratch", "--time": "10min"}
    for missing in itertools.combinations(flags, count):
        given = [word for flag, value in flags.items() if flag not in missing for word in (flag, value)]
        result = refused("new", "run.yaml", *given)
        assert all((flag in result.stderr.partition("use all")[0]) == (flag in missing) for flag in flags)
        assert not Path("run.yaml").exists()


def test_a_file_that_is_there_is_not_written_over_without_being_told():
    Path("run.yaml").write_text("mine")
    flags = ["--text", "novel.txt", "--learn", "write", "--from", "scratch", "--time", "10min"]
    result = refused("new", "run.yaml", *flags)
    assert "exists already" in result.stderr
    assert Path("run.yaml").read_text() == "mine"
    result = succeed("new", "run.yaml", *flags, "--force", "--json")
    assert json.loads(result.stdout)["run"] == yaml.safe_load(Path("run.yaml").read_text())


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (PresetAnswers(["gone.txt"], "write", "scratch", "1h"), "--text"),
        (PresetAnswers([""], "write", "scratch", "1h"), "--text"),  # not the working folder
        (PresetAnswers(["novel.txt", " "], "write", "scratch", "1h"), "--text"),
        (PresetAnswers(["novel.txt"], "chat", "scratch", "1h"), "--learn"),
        (PresetAnswers(["novel.txt"], "sing", "scratch", "1h"), "--learn"),
        (PresetAnswers(["novel.txt"], "write", "./gone", "1h"), "--from"),
        (PresetAnswers(["novel.txt"], "write", "scratch", "soon"), "--time"),
        (PresetAnswers(["novel.txt"], "write", "scratch", "1h", "h101"), "--hardware"),
    ],
)
def test_a_wrong_flag_is_named(given, flag):
    with pytest.raises(InputError) as error:
        answer_questions(given, None)
    assert error.value.problems[0].where == flag


def test_the_tasks_are_listed_only_when_one_is_asked_for(texts):
    for learn in (None, "write"):
        told = logged()
        asked: list[str] = []

        def ask(question: str, default: str, asked: list[str] = asked) -> str:
            asked.append(question)
            return default

        answer_questions(PresetAnswers([texts["text"]], learn), ask)
        assert any("continues a text" in line for line in told) == (learn is None)
        assert asked[-1] == "How long? Such as 30min, or for another machine 2h on h100-80gb:8"


def test_what_a_text_holds_is_found_by_its_records(texts):
    for kind, file in texts.items():
        text = summarize_text([file])
        assert kind in text.record_kinds
        assert (
            text.record_kinds == {"text"} or "text" not in text.record_kinds or kind in ("labels", "entities")
        )  # texts as well
    Path("chapters.txt").write_text("\n\n".join("one line\nand another" for _ in range(40)))
    assert summarize_text(["chapters.txt"]).record_kinds == {"text", "matches"}  # and never groups of texts alone
    Path("chapters.txt").write_text("\n\n".join(f"{part}\n\none line\nand {part}" for part in range(40)))
    assert summarize_text(["chapters.txt"]).record_kinds == {"text"}  # headings match nothing
    for label in ("good", "bad"):
        Path("films", label).mkdir(parents=True)
        Path("films", label, "1.txt").write_text(label)
    assert summarize_text(["films"]).record_kinds == {"text", "labels"}
    assert summarize_text(["novel.txt"]).describe().startswith("1 file, 40 kB")


@pytest.mark.parametrize(
    ("columns", "kinds"),
    [("input,output", {"pairs"}), ("text,label", {"text", "labels"}), ("query,positive", {"matches"})],
)
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_what_a_table_holds_is_found_by_its_columns(columns, kinds, suffix):
    names = columns.split(",")
    rows = [{name: f"{name} {n}" for name in names} for n in range(3)]
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet")
    else:
        lines = [names, *(row.values() for row in rows)]
        Path(f"a{suffix}").write_text("".join(("," if suffix == ".csv" else "\t").join(line) + "\n" for line in lines))
    assert summarize_text([f"a{suffix}"]).record_kinds == kinds


def test_a_table_of_other_columns_is_refused_with_those_it_may_have():
    Path("a.csv").write_text("question,reply\na,b\n")
    parquet.write_table(pyarrow.table({"question": ["a"]}), "a.parquet")
    for file in ("a.csv", "a.parquet"):
        with pytest.raises(InputError, match=r"no column 'text' \(it has: question.*\n.*input and output"):
            summarize_text([file])
    Path("b.parquet").write_text("no parquet")
    with pytest.raises(InputError, match=r"cannot be read as parquet.*\n.*download"):
        summarize_text(["b.parquet"])


def test_a_table_beside_a_text_is_refused():
    Path("a.csv").write_text("text,label\na,good\nb,bad\n")
    with pytest.raises(InputError, match=r"a\.csv is a table, not text"):
        summarize_text(["novel.txt", "a.csv"])


def test_the_help_names_all_that_can_be_learned():
    (option,) = (each for each in typer.main.get_command(app).commands["new"].params if each.name == "learn")
    named = option.help.partition(": ")[2].rstrip(".").split(", ")
    assert sorted(named) == sorted(verb for verb in VERBS.values() if verb)


def test_a_wrong_answer_is_asked_for_again():
    typed = iter(["gone.txt", "novel.txt", "chat", "write", "scratch", "soon", "2h on h100-80gb:8"])
    said = logged()
    answers = answer_questions(PresetAnswers(), lambda question, default: next(typed))
    assert next(typed, None) is None
    assert (answers.objective, answers.model, answers.time, answers.hardware) == ("causal", "", "2h", "h100-80gb:8")
    assert any("gone.txt" in line for line in said)


@pytest.mark.ci
@pytest.mark.processes
def test_at_a_terminal_it_asks():
    master, slave = os.openpty()
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "artel", "new"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    screen = Screen(master)
    answers = {"Which text?": "novel.txt", "learned?": "", "which model": "", "How long": "20min"}
    for question, answer in answers.items():
        screen.read_until(lambda seen, question=question: question in seen)
        screen.text = ""
        os.write(master, f"{answer}\n".encode())
    screen.read_until(lambda seen: "artel train run.yaml" in seen)
    assert process.wait() == 0
    os.close(master)
    assert load_run("run.yaml").train.budget == 1200


def test_an_empty_text_is_said_to_be_empty(tmp_path):
    Path("empty.txt").write_text("")
    with pytest.raises(InputError, match="has 0 bytes"):
        summarize_text(["empty.txt"])


def test_a_chat_model_from_scratch_with_a_few_rows_is_called_hopeless(tmp_path):
    file = tmp_path / "talks.jsonl"
    row = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Anna."}]}
    file.write_text("".join(f"{json.dumps(row)}\n" for _ in range(30)))
    said = {}
    for model in ("scratch", "OWNER/base"):
        said[model] = logged()
        answer_questions(PresetAnswers([str(file)], "chat", model, "30min", ""), None)
    offered: list[str] = []

    def ask(question, default):
        offered.append(f"{question} {default}")
        return default

    assert answer_questions(PresetAnswers([str(file)], "chat", None, "30min", ""), ask).model == "Qwen/Qwen3-0.6B"
    assert "pretrained model" in offered[0]
    assert any("the answers will be noise" in line for line in said["scratch"])
    assert not any("noise" in line for line in said["OWNER/base"])
