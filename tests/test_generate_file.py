"""`artel generate --prompts FILE --out FILE`: the texts of each prompt alone, resumed after any end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

import artel
from artel.generation.generate import Sampling
from artel.inference import open_model
from artel.inference.batch import generate_answers, read_prompts
from support.chat_models import ONE_THREAD, llama, never_ending, saved, trained_tokenizer
from support.objectives import objective_run
from support.runs import ENVIRONMENT, LIMIT
from support.waiting import wait_until

WINDOW = 96
WORDS = "the of and to in a is that Who are you My name Ann I do not know".split()


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    tokenizer = trained_tokenizer([])
    model = llama(tokenizer, max_position_embeddings=WINDOW)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # logits far enough apart that sums in another order choose the same tokens
    return saved(tmp_path_factory.mktemp("models") / "plain", model, tokenizer)


@pytest.fixture(scope="module")
def lora(plain, tmp_path_factory) -> Path:
    torch.manual_seed(1)
    opened = open_model(str(plain))
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return saved(tmp_path_factory.mktemp("models") / "lora", get_peft_model(opened.model, adapter), opened.tokenizer)


@pytest.fixture
def generate(artel_here):
    """The command in this process: exit status, standard output and error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        done = artel_here("generate", *arguments)
        return done.returncode, done.stdout, done.stderr

    return run


def of_mixed_lengths(count: int) -> list[str]:
    """Prompts of one word to more than the model's window."""
    return [" ".join(WORDS[(number + word) % len(WORDS)] for word in range(1 + number * 2)) for number in range(count)]


def results(file: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_texts_of_fifty_prompts_are_those_of_each_alone(kind, temperature, request):
    folder = request.getfixturevalue(kind)
    texts = of_mixed_lengths(50)
    Path("prompts.txt").write_text("\n".join(texts))
    sampling = Sampling(24, temperature, top_k=50, seed=7)
    opened = open_model(str(folder))
    together = list(generate_answers(opened, read_prompts("prompts.txt"), 0, sampling))
    alone = open_model(str(folder))
    assert len(next(alone.tokenizer.encode([texts[-1]]))) > WINDOW  # whose older half is dropped
    for number, (text, result) in enumerate(zip(texts, together, strict=True)):
        one = Sampling(24, temperature, top_k=50, seed=7 + number)
        expected = "".join(alone.decoding.reply(alone.model, text, "", one).pieces)
        assert (result["prompt"], result["text"]) == (text, expected)
    assert len({result["text"] for result in together}) > 25
    assert {result["tokens"] for result in together if result["finish_reason"] == "length"} == {24}


def test_a_torn_file_is_gone_on_with(plain, generate):
    Path("prompts.txt").write_text("\n".join(of_mixed_lengths(12)) + "\n\n")
    options = (plain, "--prompts", "prompts.txt", "--max-new-tokens", 8, "--seed", 3, "--out")
    assert generate(*options, "whole.jsonl")[0] == 0
    whole = Path("whole.jsonl").read_bytes()
    assert [row["prompt"] for row in results("whole.jsonl")] == of_mixed_lengths(12)
    for size in (0, len(whole) // 2, len(whole) - 1, len(whole)):
        Path("out.jsonl").write_bytes(whole[:size])
        Path("out.jsonl.settings.json").write_bytes(Path("whole.jsonl.settings.json").read_bytes())
        status, out, _ = generate(*options, "out.jsonl", "--json")
        assert status == 0
        counted = json.loads(out)
        assert counted["answered_before"] == whole[:size].count(b"\n")
        assert counted["answered"] == 12 - whole[:size].count(b"\n")
        assert Path("out.jsonl").read_bytes() == whole
    # More prompts behind those that are answered are taken up; the texts before them stay.
    with Path("prompts.txt").open("a") as file:
        file.write("one more\n")
    assert generate(*options, "out.jsonl")[0] == 0
    assert Path("out.jsonl").read_bytes().startswith(whole)
    assert results("out.jsonl")[12]["prompt"] == "one more"
    # A line that is no result is torn only at the end: what follows one is not thrown away.
    lines = Path("out.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join([lines[0], b"\n", *lines[1:]]))
    status, _, said = generate(*options, "out.jsonl")
    assert (status, "out.jsonl:2: is not a result" in said) == (2, True)
    assert Path("out.jsonl").read_bytes().count(b"\n") == 14


def test_other_prompts_settings_and_files_are_refused(plain, generate):
    Path("prompts.txt").write_text("the of\nand to\n")
    options = (plain, "--prompts", "prompts.txt", "--max-new-tokens", 4, "--out", "out.jsonl")
    assert generate(*options)[0] == 0
    status, _, said = generate(*options, "--temperature", 0)
    assert (status, "temperature was 0.8, now 0.0" in said) == (2, True)
    beside = Path("out.jsonl.settings.json")
    begun = json.loads(beside.read_text())
    beside.write_text(json.dumps(begun | {"best_of": 4}))
    status, _, said = generate(*options)
    assert (status, "best_of was 4, now None" in said) == (2, True)
    beside.write_text(json.dumps(begun))
    Path("prompts.txt").write_text("the of\nand so\n")
    status, _, said = generate(*options)
    assert (status, "prompts.txt:2: is another prompt than the one that out.jsonl:2 answers" in said) == (2, True)
    weights = plain / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + b"\0\0\0\0")
    status, _, said = generate(*options)
    weights.write_bytes(content)
    assert (status, "started with other settings: weights " in said) == (2, True)
    Path("prompts.txt").write_text("the of\n")
    assert "more results than the 1 prompts" in generate(*options)[2]
    Path("other.jsonl").write_text("mine")
    status, _, said = generate(*options[:-1], "other.jsonl")
    assert (status, "exists already" in said) == (2, True)
    assert Path("other.jsonl").read_text() == "mine"
    for wrong in (("--prompts", "prompts.txt"), ("--out", "x"), (*options[1:], "--prompt", "x")):
        assert generate(plain, *wrong)[0] == 2
    assert "no-file cannot be read" in generate("no-model", "--prompts", "no-file", "--out", "x")[2]
    assert not Path("x").exists()
    assert generate("no-model", *options[1:-1], "y")[0] == 2
    assert not any(Path().glob("*y*"))


def test_all_bad_lines_are_told_before_the_model_is_looked_for(generate):
    lines = [
        b'{"prompt": "good", "id": 1}',
        b'{"prompt": "torn',
        b"[1]",
        b"{}",
        b'{"prompt": 3}',
        b"",
        b'{"prompt": "x", "text": "y"}',
        b'{"prompt": "x", "messages": []}',
        b'{"messages": []}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "assistant", "content": "I am"}]}',
        b'{"question": "who?"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
    ]
    Path("p.jsonl").write_bytes(b"\n".join(lines))
    status, _, said = generate("no-model", "--prompts", "p.jsonl", "--out", "out.jsonl")
    assert status == 2
    places = [line.split()[1] for line in said.splitlines() if line.startswith("artel: ")]
    assert places == [f"p.jsonl:{number}:" for number in range(2, len(lines) + 1) if number != 6]
    assert not Path("out.jsonl").exists()
    Path("empty.txt").write_text("\n \n")
    assert "has no prompts" in generate("no-model", "--prompts", "empty.txt", "--out", "out.jsonl")[2]


def test_conversations_and_fields_of_their_own(with_marks, generate):
    rows = [
        {"id": 10**30, "messages": [{"role": "user", "content": "Who are you?"}]},
        {"messages": [{"role": "system", "content": "Speak Russian."}, {"role": "user", "content": "Who are you?"}],
         "tags": ["ё"]},
        {"prompt": "Who are"},
    ]  # fmt: skip
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--prompts", "p.jsonl", "--out", "out.jsonl", "--temperature", 0, "--max-new-tokens", 30)
    assert generate(with_marks, *options)[0] == 0
    found = results("out.jsonl")
    assert [{name: result[name] for name in row} for row, result in zip(rows, found, strict=True)] == rows
    assert [result["text"] for result in found[:2]] == ["I am a tiny model.", "Я маленькая модель."]
    assert {result["finish_reason"] for result in found[:2]} == {"stop"}


@pytest.mark.slow
def test_encoders_answer_one_row_after_another(generate):
    folder = artel.train(objective_run(Path("run.yaml").absolute(), "masked", train={"steps": 1, "batch": 8})).folder
    mask = open_model(str(folder)).tokenizer.hf.mask_token
    Path("p.txt").write_text(f"The ship {mask} here.\nHe said {mask} the whale {mask}.\n")
    assert generate(folder, "--prompts", "p.txt", "--out", "out.jsonl")[0] == 0
    opened = artel.open(folder)
    assert [row["text"] for row in results("out.jsonl")] == [opened.fill(row["prompt"]).text
                                                            for row in results("out.jsonl")]  # fmt: skip
    assert [len(row["masks"]) for row in results("out.jsonl")] == [1, 2]
    Path("p.txt").write_text(f"The ship {mask} here.\nno mask\n")
    status, _, said = generate(folder, "--prompts", "p.txt", "--out", "other.jsonl")
    assert (status, "p.txt:2: holds no" in said) == (2, True)
    assert len(results("other.jsonl")) == 1  # what comes before it is kept
    Path("q.jsonl").write_text('{"question": "Who?", "context": "Ann."}\n')
    assert "q.jsonl:1: " in generate(folder, "--prompts", "q.jsonl", "--out", "q.out")[2]


@pytest.mark.slow
def test_questions_are_answered_from_their_contexts(generate):
    folder = artel.train(objective_run(Path("run.yaml").absolute(), "span_qa", train={"steps": 1, "batch": 4})).folder
    row = {"id": "a", "question": "Who is here?", "context": "Ann is here, and Bob is there."}
    Path("q.jsonl").write_text(json.dumps(row) + "\n")
    assert generate(folder, "--prompts", "q.jsonl", "--out", "out.jsonl")[0] == 0
    (found,) = results("out.jsonl")
    assert found | row == found
    assert found["answer"] == artel.open(folder).answer(row["question"], row["context"]).text
    Path("p.txt").write_text("a text\n")
    assert "p.txt:1: " in generate(folder, "--prompts", "p.txt", "--out", "p.out")[2]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_and_started_again_the_file_is_the_same(number, tmp_path):
    folder = never_ending(tmp_path / "endless")
    Path("prompts.txt").write_text("\n".join(of_mixed_lengths(60)))
    command = [sys.executable, "-m", "artel", "generate", folder, "--prompts", "prompts.txt", "--max-new-tokens", "60"]
    environment = {**ENVIRONMENT, **ONE_THREAD}
    process = subprocess.Popen([*command, "--out", "out.jsonl"], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: Path("out.jsonl").exists() and b"\n" in Path("out.jsonl").read_bytes())
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else -number), said
    assert "Traceback" not in said
    before = len(Path("out.jsonl").read_bytes().splitlines())
    assert 0 < before < 60
    for out in ("out.jsonl", "at-once.jsonl"):
        subprocess.run([*command, "--out", out], env=environment, check=True, timeout=LIMIT, capture_output=True)
    assert Path("out.jsonl").read_bytes() == Path("at-once.jsonl").read_bytes()


@pytest.mark.processes
def test_neither_generate_nor_chat_needs_the_server():
    code = "import sys; sys.modules |= dict.fromkeys(['fastapi', 'uvicorn', 'starlette', 'llguidance'])\n"
    code += "import artel.inference.batch, artel.inference.chat"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT, timeout=LIMIT)
