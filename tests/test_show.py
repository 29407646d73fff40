"""`artel data show`: every objective's samples as the model reads them, and what of them is learned."""

import json
import subprocess
import sys

import pytest

from artel.config.load import parse_run
from artel.preparing import prepare
from artel.preparing.sample_text import SampleViews, stored_sample_text
from support.reading import message, rows_of, written
from support.runs import artel, succeed
from support.stores import run_of

BERT = {"config": {"model_type": "bert", "num_hidden_layers": 1}}
GPT2 = {"config": {"model_type": "gpt2"}}
TEXTS = ["one two three", "four five", "six seven eight nine"]
TALK = {"messages": [message("user", "who?"), message("assistant", "me"), message("user", "who else?"),
                     message("assistant", "you")]}  # fmt: skip
BEST = {"prompt": "who?", "chosen": "me", "rejected": "no"}
QUESTION = {"data": [{"title": "t", "paragraphs": [{"context": "Anna is in the forest.", "qas": [
    {"id": "1", "question": "Where is Anna?", "answers": [{"text": "forest", "answer_start": 15}]}]}]}]}  # fmt: skip


def shown(folder, number=0, **sections):
    """Readings of a sample, each as it is printed: [read] where it is learned, [read>hidden] where another is."""
    run = run_of(folder, **sections)
    prepared = prepare(run)
    store = prepared.open()
    samples = SampleViews(prepared.config, store, store.train, prepared.tokenizer())
    readings = list(samples.views(number))
    texts = ["".join(_written(piece) for piece in reading.spans) for reading in readings]
    return texts, readings, len(samples)


def _written(piece):
    if not piece.is_learned:
        return piece.text
    return f"[{piece.text}>{piece.target}]" if piece.target else f"[{piece.text}]"


def lines(folder, **data):
    source = {"path": str(written(folder, "a.txt", "\n".join(TEXTS))), "document": "line"}
    return {"sources": [source], **data}


def test_blocks_of_text_with_their_end_tokens(tmp_path):
    end = "<|endoftext|>"
    sections = {"model": GPT2, "data": lines(tmp_path, block=20)}
    (text,), (reading,), count = shown(tmp_path, **sections)
    assert text == f"o[ne two three{end}four fi]"  # tokens are bytes: 20 that are read, and the one after them
    assert (reading.num_tokens, reading.num_learned, count) == (21, 20, 2)
    assert reading.origin == f"{tmp_path}/a.txt:1 and 1 more"
    packed = {"model": GPT2, "data": lines(tmp_path, block=24, packing="best_fit")}
    (text,), (reading,), count = shown(tmp_path, 1, **packed)
    assert text == f"o[ne two three{end}four five{end}]"
    assert count == 2


def test_hidden_tokens_stand_beside_what_they_hide(tmp_path):
    sections = {"objective": "masked", "model": BERT, "tokenizer": {"train": {"vocab": 261}},
                "masked": {"rate": 0.3, "mask": 1.0, "random": 0.0}}  # fmt: skip
    (text,), (reading,), _ = shown(tmp_path, data=lines(tmp_path, block=24), **sections)
    assert text.startswith("<s>")
    assert reading.num_learned == round(0.3 * 21) == sum(piece.text.count("<mask>") for piece in reading.spans)
    hidden = "".join(piece.target or piece.text for piece in reading.spans)
    assert hidden == "<s>one two three</s>four fiv</s>"


@pytest.mark.slow
def test_conversations_preferences_pairs_and_questions(tmp_path):
    chat = {"objective": "chat", "model": GPT2, "data": {"block": 300, "sources": [
        {"path": str(rows_of(tmp_path, [TALK], "talk.jsonl")), "format": "chat"}]}}  # fmt: skip
    (text,), (reading,), _ = shown(tmp_path, **chat)
    assert "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n[me<|im_end|>]" in text
    assert text.count("[") == 2
    dpo = {"objective": "preference", "model": GPT2, "data": {"block": 300, "sources": [
        {"path": str(rows_of(tmp_path, [BEST], "best.jsonl")), "format": "preference"}]}}  # fmt: skip
    texts, readings, _ = shown(tmp_path, **dpo)
    assert [reading.name for reading in readings] == ["chosen", "rejected"]
    assert ["[me<|im_end|>]" in texts[0], "[no<|im_end|>]" in texts[1]] == [True, True]
    trained = {"tokenizer": {"train": {"vocab": 261}}, "model": BERT}
    pairs = {"objective": "masked", **trained, "data": {"block": 64, "sources": [
        {"path": str(rows_of(tmp_path, [{"input": "no I am", "output": "no, I am"}], "pairs.jsonl")),
         "format": "pairs"}]}}  # fmt: skip
    (text,), _, _ = shown(tmp_path, **pairs)
    assert text == "<s>[n][o>,][ I am]</s>"
    squad = written(tmp_path, "squad.json", json.dumps(QUESTION))
    asked = {"objective": "span_qa", **trained, "span_qa": {"question": 16, "stride": 8}, "data": {
        "block": 64, "sources": [{"path": str(squad), "format": "squad"}]}}  # fmt: skip
    (text,), (reading,), _ = shown(tmp_path, **asked)
    assert text == "<s>Where is Anna?</s></s>Anna is in the [forest].</s>"
    assert reading.name == "short"


LABELED = [{"text": "Anna sings", "label": "good"}, {"text": "Boris shouts", "label": "bad"}]
SCORED = {"prompt": "who?", "completion": "me", "label": False}
MATCH = {"query": "Where is Anna?", "pos": ["in the forest"], "neg": ["at sea"]}


@pytest.mark.parametrize(
    ("section", "row", "goals"),
    [
        ({"objective": "classification"}, LABELED[0], {"": "good"}),
        ({"objective": "reward"}, BEST | {"margin": 0.5}, {"chosen": "the higher score by over 0.5",
                                                           "rejected": "the lower score by over 0.5"}),
        ({"objective": "reward"}, SCORED, {"rejected": "a bad answer, its score under 0"}),
        ({"objective": "rerank", "rerank": {"negatives": 1}}, MATCH, {"document": "the probability 1",
                                                                      "negative 1": "the probability 0"}),
        ({"objective": "embedding"}, MATCH, {"query": "a vector near those of its positives",
                                             "positive": "a vector near its query's",
                                             "negative": "a vector far from its query's"}),
        ({"objective": "embedding", "embedding": {"loss": "cosine"}},
         {"sentence1": "Anna sings", "sentence2": "a song", "score": 0.25},
         {"query": "a vector near those of its positives", "positive": "the cosine 0.25 with its query"}),
    ],
    ids=["label", "pair", "outcome", "rerank", "match", "cosine"],
)  # fmt: skip
def test_what_is_learned_of_whole_texts(tmp_path, section, row, goals):
    rows = rows_of(tmp_path, [row, *(LABELED[1:] if row in LABELED else [])])
    kinds = {"classification": "labels", "reward": "preference", "rerank": "matches", "embedding": "matches"}
    source = {"path": str(rows), "format": kinds[section["objective"]]}
    data = {"block": 300, "sources": [source], "validation": 0.0}
    vocab = 263 if section["objective"] == "reward" else 261  # and the marks of turns
    trained = {"tokenizer": {"train": {"vocab": vocab}}, "model": BERT}
    _, readings, _ = shown(tmp_path, data=data, **trained, **section)
    assert {reading.name: reading.goal for reading in readings} == goals
    assert readings[0].describe_learned().endswith(f"tokens, learned: {readings[0].goal}")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "store"])
def test_the_command(tmp_path, what):
    sections = {"model": GPT2, "data": lines(tmp_path, block=8, validation=0.4)}
    run = run_of(tmp_path, **sections)
    folder = prepare(run).folder
    file = written(tmp_path, "run.yaml", json.dumps(run.model_dump(mode="json", by_alias=True)))
    assert parse_run(json.loads(file.read_text()), {}, {}) == run
    done = succeed("data", "show", file if what == "run" else folder)
    if what == "run":
        assert done.stdout.startswith(("o⟦ne two t⟧\n", "f⟦our five⟧\n", "s⟦ix seve⟧\n"))
        assert "9 tokens, 8 of them learned" in done.stderr
    else:
        assert "<|endoftext|>\n" in done.stdout
        assert "⟦" not in done.stdout
    beyond = artel("data", "show", file if what == "run" else folder, "--document", 99)
    assert (beyond.returncode, "no sample 99" in beyond.stderr) == (2, True)
    shown = artel("data", "show", file if what == "run" else folder, "--part", "validation", "--json", "--count", 1)
    sample = json.loads(shown.stdout)["samples"]
    assert what == "run" or set(sample[0]) == {"number", "origin", "tokens", "pieces"}


def test_a_document_of_a_store(tmp_path):
    prepared = prepare(run_of(tmp_path, model=GPT2, data=lines(tmp_path)))
    assert stored_sample_text(prepared.open().train, 1, prepared.tokenizer()).spans[0].text == "four five<|endoftext|>"


@pytest.mark.processes
def test_blocks_of_text_are_shown_without_torch(tmp_path):
    """It takes 4 s to import, and 25 s on a busy machine."""
    (tmp_path / "run.yaml").write_text(json.dumps({
        "data": lines(tmp_path, store=str(tmp_path / "stores"), block=8), "tokenizer": {"train": {"vocab": 262}},
        "model": GPT2,
    }))  # fmt: skip
    script = (
        "import sys\n"
        "from artel.cli.main import app\n"
        "app(['data', 'show', sys.argv[1]], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    for _ in range(2):  # where the store is made, and where it is there
        done = subprocess.run([sys.executable, "-c", script, tmp_path / "run.yaml"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "⟦" in done.stdout
