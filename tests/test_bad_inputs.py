"""Sixty and more wrong inputs: each ends with 2 or 1 and one clear message, no traceback, nothing half-written."""

import pickle
import subprocess
from pathlib import Path

import pytest
import yaml

from support.runs import TEXT_ALONE, TINY, artel, merged, refused, small_disk, write_run


class Case:
    """A wrong run: what is changed, what the message must say, the exit status, and files to make first."""

    def __init__(self, name, says, changes=None, *, arguments=(), files=None, status=2, verb="train"):
        self.name, self.says, self.changes, self.arguments = name, says, changes or {}, arguments
        self.files, self.status, self.verb = files or {}, status, verb


def sources(path, **more):
    return {"data": {"sources": [{"path": path, **more}]}}


def model(**config):
    return {"model": {"config": {"model_type": "gpt2", **config}}}


def pretrained(folder):
    return {"model": {"config": None, "from": folder}, "tokenizer": {"replace": True}}


def encoder(objective):
    """A small ModernBERT; for span_qa with made-up questions."""
    config = {"model_type": "modernbert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 32}  # fmt: skip
    run = {"objective": objective, "model": {"config": config}}
    if objective == "span_qa":
        run["data"] = {"sources": [{"format": "dummy", "kind": "questions", "documents": 200}], "block": 64}
        run["span_qa"] = {"question": 16, "stride": 16}
    return run


def chat(**more):
    return merged({"objective": "chat", **sources("a.jsonl", format="chat")}, more)


TURNS = '{"messages": [%s]}\n'
USER, ASSISTANT = '{"role": "user", "content": "word"}', '{"role": "assistant", "content": "word and word"}'
SYSTEM = '{"role": "system", "content": "word"}'


def rows(*turns):
    return {"a.jsonl": (TURNS % ", ".join(turns)).encode()}


LETTERS = {"tokenizer": {"train": {"vocab": 260}}}
SMALL_VOCABULARY = {"tokenizer": {"train": {"vocab": 262}}}
TEXT = b"word and word again. " * 500
SQUAD = b"""{"data": [{"paragraphs": [{"context": "Anna came home.", "qas": [
    {"id": "q1", "question": "who?", "answers": [{"text": "Nobody", "answer_start": 0}]}]}]}]}"""

CASES = [
    # keys and types
    Case("key-of-another-section", ["did you mean data.block?"], {"block": 3}),
    Case("unknown-key", ["train.zzz", "its section has"], {"train": {"zzz": 1}}),
    Case("fraction-of-a-batch", ["train.batch", "whole number"], {"train": {"batch": 1.5}}),
    Case("unknown-schedule", ["did you mean cosine?"], {"train": {"schedule": "cosin"}}),
    Case("empty-sources", ["the run has no text"], {"data": {"sources": []}}),
    Case("source-without-path", ["needs a path"], {"data": {"sources": [{"format": "text"}]}}),
    Case("validation-of-one", ["data.validation"], {"data": {"validation": 1.0}}),
    Case("tokenizer-twice", ["keep one"], {"tokenizer": {"from": "x"}}),
    Case("model-twice", ["keep one"], {"model": {"from": "x"}}),
    Case("unknown-tracker", ["track"], {"track": ["consol"]}),
    # overrides and the command line
    Case("override-into-a-value", ["override seed.x=1: seed"], arguments=["seed.x=1"]),
    Case("override-bad-yaml", ["not valid YAML"], arguments=["train.steps=[1"]),
    Case("node-rank", ["--node-rank"], arguments=["--nnodes", "2", "--node-rank", "5"]),
    Case("no-address", ["--master-addr"], arguments=["--nnodes", "2"]),
    # sources
    Case("missing-file", ["data.sources.0.path", "there is no file"], sources("nowhere.txt")),
    Case("empty-glob", ["no file matches"], sources("nowhere/*.txt")),
    Case("empty-folder", ["holds no file"], sources("empty"), files={"empty/.keep": b""}),
    Case("empty-file", ["no document is left", "1 empty"], sources("a.txt"), files={"a.txt": b""}),
    Case("blank-file", ["no document is left"], sources("a.txt"), files={"a.txt": b" \n\t\n"}),
    Case("longer-than-a-block", ["1 longer than block", "write a larger data.block than 2"],
         chat(data={"block": 2, "validation": 0.0}, **LETTERS), files=rows(USER, ASSISTANT)),
    Case("binary-file", ["a.txt", "binary"], sources("a.txt"), files={"a.txt": bytes(range(256))}),
    Case("pdf", ["pdftotext"], sources("a.pdf"), files={"a.pdf": b"%PDF"}),
    Case("zip", ["unpack"], sources("a.zip"), files={"a.zip": b"PK"}),
    Case("unknown-encoding", ["data.sources.0.encoding"], sources("a.txt", encoding="utf-9"),
         files={"a.txt": TEXT}),
    Case("wrong-encoding", ["a.txt", "is not utf-8"], sources("a.txt", encoding="utf-8"),
         files={"a.txt": "слово".encode("cp1251")}),
    Case("truncated-jsonl", ["a.jsonl:2", "not JSON", "data.max_bad"], sources("a.jsonl"),
         files={"a.jsonl": b'{"text": "one"}\n{"text": "tw'}),
    Case("jsonl-without-field", ["a.jsonl:1", "it has: body"], sources("a.jsonl"),
         files={"a.jsonl": b'{"body": "x"}'}),
    Case("jsonl-field-not-text", ["a.jsonl:1", "not text"], sources("a.jsonl"),
         files={"a.jsonl": b'{"text": 1}'}),
    Case("damaged-gzip", ["a.jsonl.gz"], sources("a.jsonl.gz"), files={"a.jsonl.gz": b"\x1f\x8bnot gzip"}),
    Case("page-too-large", ["a.html", "data.max_document"],
         merged(sources("a.html"), {"data": {"max_document": "2k"}}), files={"a.html": b"<p>x" * 1000}),
    Case("unknown-scheme", ["ftp://"], sources("ftp://host/x")),
    Case("not-an-address", ["http://"], sources("http://")),
    Case("refused-connection", ["127.0.0.1:9"], sources("http://127.0.0.1:9/x"), status=1),
    Case("missing-validation", ["data.validation", "there is no file"], {"data": {"validation": "nowhere.txt"}}),
    Case("one-document", ["data.validation", "the only document"],
         merged(sources("a.txt"), {"tokenizer": {"train": {"vocab": 262}}}), files={"a.txt": TEXT}),
    Case("text-shorter-than-a-block", ["data.block"], {"data": {"block": 100_000}}),
    Case("validation-shorter-than-a-block", ["data.validation"], {"data": {"block": 2500, "validation": 0.03}}),
    # tokenizer
    Case("vocabulary-too-small", ["tokenizer.train.vocab"], {"tokenizer": {"train": {"vocab": 100}}}),
    Case("no-tokenizer-there", ["holds no tokenizer"], {"tokenizer": {"train": None, "from": "t"}},
         files={"t/x": b""}),
    Case("gguf-alone", ["t holds no tokenizer, but a.gguf, which artel does not open", "llama-cli -m t/a.gguf"],
         {"tokenizer": {"train": None, "from": "t"}}, files={"t/a.gguf": b"GGUF"}),
    Case("broken-tokenizer", ["tokenizer.from", "cannot be opened"], {"tokenizer": {"train": None, "from": "t"}},
         files={"t/tokenizer.json": b"{"}),
    Case("tokenizer-hub-offline", ["no/such", "needs network"], {"tokenizer": {"train": None, "from": "no/such"}}),
    # model
    Case("unknown-model", ["did you mean gptj or gpt2 or gpt-sw3?"], {"model": {"config": {"model_type": "gpt3"}}}),
    Case("model-typo", ["n_layr", "did you mean n_layer?"], model(n_layr=2)),
    Case("heads-do-not-divide", ["model.config"], model(n_embd=30, n_head=4)),
    Case("vocabulary-below-tokenizer", ["model.config.vocab_size"], model(vocab_size=10)),
    Case("positions-below-block", ["data.block", "16 positions"], model(n_positions=16)),
    Case("no-such-folder", ["model.from"], pretrained("./nowhere")),
    Case("folder-without-config", ["config.json"], pretrained("m"), files={"m/x": b""}),
    Case("folder-without-weights", ["has no weights"], pretrained("m"),
         files={"m/config.json": b'{"model_type": "gpt2"}'}),
    Case("model-hub-offline", ["no/such", "needs network"], pretrained("no/such")),
    Case("pickle-with-code", ["not a file of tensors only", "no code in it was run"],
         pretrained("m"),
         files={"m/config.json": b'{"model_type": "gpt2"}', "m/pytorch_model.bin": "EVIL"}),
    Case("broken-safetensors", ["model.from"], pretrained("m"),
         files={"m/config.json": b'{"model_type": "gpt2"}', "m/model.safetensors": b"nonsense"}),
    # masked models, pairs and questions
    Case("masked-by-a-decoder", ["model.config", "gpt2"], {"objective": "masked"}),
    Case("questions-by-a-model-without-the-head", ["model.config", "mamba", "AutoModelForQuestionAnswering"],
         merged(encoder("span_qa"), {"model": {"config": {"model_type": "mamba"}}})),
    Case("questions-of-plain-text", ["data.sources.0", "span_qa"], {"objective": "span_qa"}),
    Case("pairs-for-causal", ["data.sources.0", "causal"], sources("a.csv", format="pairs"),
         files={"a.csv": b"input,output\na,a\n"}),
    Case("a-best-figure-nobody-makes", ["checkpoint.best", "exact_match"], {"checkpoint": {"best": "exact_match"}}),
    Case("mask-rate-of-all", ["masked.rate"], merged(encoder("masked"), {"masked": {"rate": 1.0}})),
    Case("csv-without-header", ["a.csv", "input", "output"],
         merged(encoder("masked"), sources("a.csv", format="pairs")), files={"a.csv": b"vhod,vyhod\nx,x\n"}),
    Case("pair-that-differs", ["a.csv:2", "data.max_bad"],
         merged(merged(encoder("masked"), sources("a.csv", format="pairs")), SMALL_VOCABULARY),
         files={"a.csv": b"input,output\none two three,quite another thing\n"}),
    Case("nq-without-answer", ["a.jsonl:1", "document_text"],
         merged(encoder("span_qa"), sources("a.jsonl", format="nq")),
         files={"a.jsonl": b'{"question_text": "who", "example_id": 1}\n'}),
    Case("answer-not-in-the-context", ["a.json", "q1", "data.max_bad"],
         merged(encoder("span_qa"), sources("a.json", format="squad")), files={"a.json": SQUAD}),
    Case("question-longer-than-its-place", ["span_qa.question", "data.max_bad"],
         merged(merged(encoder("span_qa"), sources("a.json", format="squad")), SMALL_VOCABULARY),
         files={"a.json": SQUAD.replace(b"who?", b"who " * 50).replace(b'"Nobody"', b'"Anna"')}),
    Case("question-as-long-as-the-block", ["span_qa.question", "data.block"],
         merged(encoder("span_qa"), {"span_qa": {"question": 60}})),
    # conversations and preferences
    Case("conversation-without-turns", ["a.jsonl:1", "data.max_bad"], chat(), files=rows()),
    Case("unknown-role", ["a.jsonl:1", "wizard", "assistant"], chat(),
         files=rows(USER.replace("user", "wizard"), ASSISTANT)),
    Case("two-system-messages", ["a.jsonl:1", "system"], chat(), files=rows(SYSTEM, SYSTEM, USER, ASSISTANT)),
    Case("conversation-without-answer", ["a.jsonl:1", "assistant"], chat(), files=rows(USER)),
    Case("row-of-another-form", ["a.jsonl:1", "title", "mapping"], chat(), files={"a.jsonl": b'{"title": "x"}\n'}),
    Case("template-that-raises", ["chat.template", "not today"],
         merged(chat(chat={"template": "t.jinja"}, data={"validation": 0}), LETTERS),
         files=rows(USER, ASSISTANT) | {"t.jinja": b"{{ raise_exception('not today') }}"}),
    Case("template-that-is-not-there", ["chat.template", "nowhere.jinja"], chat(chat={"template": "nowhere.jinja"}),
         files=rows(USER, ASSISTANT)),
    Case("no-such-converter", ["data.sources.0.converter", "nowhere"],
         chat(data={"sources": [{"path": "a.jsonl", "format": "chat", "converter": "nowhere:at_all"}]}),
         files=rows(USER, ASSISTANT)),
    Case("wrong-slice", ["data.sources.0.rows"],
         chat(data={"sources": [{"path": "a.jsonl", "format": "chat", "rows": "[a:b]"}]}),
         files=rows(USER, ASSISTANT)),
    Case("conversations-for-causal", ["data.sources.0", "chat"], sources("a.jsonl", format="chat"),
         files=rows(USER, ASSISTANT)),
    Case("unknown-language", ["data.clean.languages", "klingon"], {"data": {"clean": {"languages": ["klingon"]}}}),
    Case("equal-answers", ["a.jsonl:1", "data.max_bad"],
         {"objective": "preference", **sources("a.jsonl", format="preference")},
         files={"a.jsonl": b'{"prompt": "word", "chosen": "a", "rejected": "a"}\n'}),
    Case("one-answer-for-dpo", ["a.jsonl:1", "kto"],
         merged(merged({"objective": "preference", **sources("a.jsonl", format="preference")},
                       LETTERS), {"data": {"validation": 0}}),
         files={"a.jsonl": b'{"prompt": "word", "completion": "a", "label": true}\n'}),
    Case("lora-from-scratch", ["model", "lora"], {"model": {"lora": {"rank": 4}}}),
    Case("a-causal-folder-for-masks", ["model.from", "gpt2"],
         merged(encoder("masked"), pretrained("m")),
         files={"m/config.json": b'{"model_type": "gpt2"}', "m/model.safetensors": b"x"}),
]  # fmt: skip


class _Evil:
    """Unpickling this would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_there_are_sixty():
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_clear_message(case, artel_here, monkeypatch):
    monkeypatch.setenv("ARTEL_CACHE", "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, content in case.files.items():
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(_Evil("executed")) if content == "EVIL" else content)
    run = merged(TINY, {"run": "run", "data": {"store": "stores"}})
    run = merged(run, case.changes) if case.changes.get("train") != 3 else {**run, "train": 3}
    Path("run.yaml").write_text(yaml.safe_dump(run))
    done = artel_here(case.verb, "run.yaml", *case.arguments)
    assert (done.returncode, "Traceback" in done.stderr, done.stdout) == (case.status, False, ""), done
    for part in case.says:
        assert part in done.stderr
    assert not Path("executed").exists()
    assert not [*Path("run").rglob("step-*"), *Path("run").rglob("*.partial-*"), *Path("stores").glob("*.partial-*")]
    assert not Path("run/model").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"\xff\xfe\x00binary", "is not a UTF-8 text file"), (b"trainer: {}\nlora: {}\n", "artel config convert"),
     (b"a: &x [*x]", "not valid YAML"), (b"!!python/object/apply:os.system ['true']", "not valid YAML")],
)  # fmt: skip
def test_broken_run_files(text, says, artel_here):
    Path("run.yaml").write_bytes(text)
    done = artel_here("train", "run.yaml")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert says in done.stderr
    assert "run.yaml" in done.stderr


@pytest.mark.processes
def test_several_problems_are_reported_together():
    model = {"n_layers": 2, "config": {"model_type": "gpt2", "n_layr": 2}}
    data = {"blok": 1, "sources": [{"path": "nowhere.txt", "format": "txet"}]}  # the objective's checks are left out
    run = write_run(Path("run.yaml"), trian={"x": 1}, train={"batch": "x", "clip": -1}, data=data, model=model)
    done = refused("train", run)
    for part in ("trian", "train.batch", "train.clip", "data.blok", "model.n_layers", "sources.0.format"):
        assert done.stderr.count(part) == 1, done.stderr
    assert done.stderr.count("model.config.n_layr: gpt2 has no such key") == 1


@pytest.mark.slow
def test_a_wrong_model_is_told_with_the_wrong_text_before_any_is_read():
    config = {"model_type": "gpt2", "n_layr": 2}
    run = write_run(Path("run.yaml"), data={"sources": [{"path": "nowhere.txt"}]}, model={"config": config})
    done = artel("train", run)
    assert (done.returncode, "nowhere.txt" in done.stderr, "n_layr" in done.stderr) == (2, True, True)
    assert "tokenizer" not in done.stderr


@pytest.fixture
def disk():
    with small_disk(Path("disk"), "300k") as folder:
        yield folder


@pytest.mark.slow
def test_a_full_disk_while_preparing(disk):
    (disk / "fill").write_bytes(bytes(280_000))
    run = write_run(Path("run.yaml"), TEXT_ALONE, data={"store": str(disk / "stores")})
    done = artel("prepare", run)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "the disk is full" in done.stderr
    assert not list((disk / "stores").glob("*/manifest.json"))
    assert not list((disk / "stores").glob(".*.partial-*"))


def test_a_disk_without_room_for_a_checkpoint(disk):
    """Told before the first step; one that fills up later is met in test_saver.py."""
    run = write_run(Path("run.yaml"), run=str(disk / "run"))
    done = artel("train", run)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "a checkpoint takes about" in done.stderr
    assert not list((disk / "run").rglob("step-*"))
    assert not (disk / "run" / "model").exists()


def test_a_read_only_folder(disk):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for keys in ({"run": str(disk / "run")}, {"data": {"store": str(disk / "stores")}}):
        done = artel("train", write_run(Path("run.yaml"), **keys))
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert "cannot be written" in done.stderr


@pytest.mark.long
def test_the_page_of_200_megabytes():
    with Path("a.html").open("wb") as file:
        file.truncate(200_000_000)
    run = write_run(Path("run.yaml"), data={"sources": [{"path": "a.html"}]})
    done = refused("prepare", run, "--json")
    assert "200,000,000 bytes" in done.stderr
    assert "data.max_document" in done.stderr
    assert done.stdout == ""
