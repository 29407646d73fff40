"""The whole way from real files to the token store: nothing lost, nothing changed, nothing done twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import artel as artel_api
from artel.config import Overrides, load_run
from artel.errors import InputError
from artel.preparing import prepare
from artel.storage import lock
from artel.text import Ledger, read_documents
from support.messages import logged
from support.runs import artel, kill, start, succeed, write_run
from support.stores import run_of
from support.waiting import LIMIT, wait_until

PARAGRAPHS = {
    "data": {"sources": [{"path": "a.txt", "document": "paragraph"}], "store": "stores", "block": 8},
    "tokenizer": {"train": {"vocab": 270}},
}


@pytest.fixture
def novels(shared_data):
    file = Path("run.yaml")
    # The sources are absolute: shared/ lies elsewhere.
    file.write_text(f"""
run: run
data:
  store: stores
  sources:
    - {{path: {shared_data}/literature, document: line}}
    - {{path: {shared_data}/html, profile: lib.ru}}
tokenizer: {{train: {{vocab: 1000}}}}
""")
    return file


@pytest.mark.long
def test_the_decoded_store_equals_the_cleaned_documents(novels):
    """All of literature/ and html/, in UTF-8, windows-1251 and koi8-r: character for character, in order."""
    run = load_run(str(novels))
    ledger = Ledger()
    cleaned = list(read_documents(run.data, ledger))
    prepared = prepare(run)
    store, tokenizer, record = prepared.open(), prepared.tokenizer(), prepared.ledger()
    for part in ("train", "validation"):
        expected = [(d.record.origin, d.record.text) for d in cleaned if d.split == part]
        documents = getattr(store, part).iter_samples()
        for (origin, text), (stored_origin, ids) in zip(expected, documents, strict=True):
            assert ids[-1] == tokenizer.end_id
            assert (stored_origin, tokenizer.decode(ids[:-1])) == (origin, text)
    documents = record["documents"]
    assert documents["read"] == documents["kept"] + sum(documents["dropped"].values())
    assert documents["kept"] == len(cleaned) == store.train.documents + store.validation.documents
    assert documents == ledger.to_json()["documents"]
    assert record["tokens"] == {"train": store.train.tokens, "validation": store.validation.tokens}
    store.verify()
    assert not prepare(run).is_new


@pytest.mark.slow
def test_a_changed_file_or_rule_makes_another_store():
    def made(*overrides):
        return prepare(load_run("novel-small", Overrides.parse(["data.store=stores", *base, *overrides]))).is_new

    Path("a.txt").write_text("\n".join(f"a line of words number {number}" for number in range(300)))
    base = ["data.sources=[{path: a.txt, document: line}]", "tokenizer.train.vocab=280", "data.block=8"]
    assert made()
    assert not made()
    assert not made("data.block=16", "train.batch=3")  # neither is in the store
    assert made("data.clean.minimum=5")
    with Path("a.txt").open("a") as file:
        file.write("\nanother line")
    assert made()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("*** START OF THE PROJECT GUTENBERG EBOOK A BOOK ***", "Project Gutenberg's header and licence"),
        ('<doc id="7" url="https://a?curid=7" title="A">\nA\n\n</doc>', "WikiExtractor's <doc> tags"),
        ("*** START ***\n<doc>", ""),
    ],
)
def test_what_stands_around_a_text_of_a_known_site_is_told(tmp_path, text, note):
    (tmp_path / "a.txt").write_text(f"{text}\n{'Once upon a time. ' * 40}")
    notes = prepare(run_of(tmp_path, data={"sources": [{"path": str(tmp_path / "a.txt")}]})).notes()
    assert [said.split(" holds ")[-1].split(", which are learned")[0] for said in notes] == ([note] if note else [])


@pytest.mark.ci
@pytest.mark.processes
def test_a_killed_prepare_leaves_nothing_that_is_taken_for_a_store(novels):
    stores = Path("stores")
    for _ in range(10):  # a store of this size is written in 14 ms, which a busy machine may miss
        shutil.rmtree(stores, ignore_errors=True)
        process = start("prepare", novels)
        wait_until(
            lambda process=process: list(stores.glob(".*.partial-*")) or process.poll() is not None, every=0.0005
        )
        if process.poll() is None:
            kill(process)
        assert process.returncode in (0, -signal.SIGKILL), process.communicate()
        if list(stores.glob(".*.partial-*")):
            break
    assert list(stores.glob(".*.partial-*"))
    assert not [path for path in stores.glob("*/manifest.json") if not path.parent.name.startswith(".")]
    assert prepare(load_run(str(novels))).is_new
    assert not list(stores.glob(".*.partial-*"))  # what the dead process left was cleared away


def test_a_store_is_verified_and_a_damaged_one_named():
    store = prepare(load_run(str(write_run(Path("run.yaml"))))).folder
    succeed("data", "verify", store)
    tokens = next((store / "train").glob("*.tokens"))
    content = bytearray(tokens.read_bytes())
    content[7] ^= 1
    tokens.write_bytes(content)
    done = artel("data", "verify", store)
    assert (done.returncode, str(tokens) in done.stderr) == (2, True)


def test_forgotten_work_is_removed_and_work_in_use_is_not():
    stores = Path("stores")
    forgotten, used = stores / "one.parts", stores / "two.parts"
    for folder in (forgotten, used):
        (folder / "text").mkdir(parents=True)
        os.utime(folder, (0, 0))
    run = run_of(Path(), data={"sources": [{"format": "dummy", "documents": 5}]})
    with lock(stores / "two.lock"):
        prepare(run)
    assert (forgotten.exists(), used.exists()) == (False, True)


@pytest.mark.ci
@pytest.mark.processes
def test_the_command_imports_no_torch_and_is_refused_beside_its_text():
    """It takes seconds to import, and with it half of transformers: a process of its own checks the model."""
    Path("a.txt").write_text("\n\n".join(f"Document {number} of a text." for number in range(50)))
    for name, sizes in (("wrong", {"n_embd": 100, "n_head": 3}), ("right", {"n_embd": 32, "n_head": 2})):
        model = {"config": {"model_type": "gpt2", **sizes}}
        Path(f"{name}.yaml").write_text(json.dumps(PARAGRAPHS | {"model": model}))
    script = (
        "import sys\n"
        "from artel.cli.main import app\n"
        "app(['prepare', sys.argv[1]], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    wrong = subprocess.run([sys.executable, "-m", "artel", "prepare", "wrong.yaml"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.count("must be divisible by num_heads") == 1
    right = subprocess.run([sys.executable, "-c", script, "right.yaml"], capture_output=True, text=True)
    assert right.returncode == 0, right.stderr
    assert [folder.suffix for folder in Path("stores").iterdir() if folder.is_dir()] == [""]


PLAIN = {
    "data": {"sources": [{"path": "a.txt", "document": "line"}], "store": "stores"},
    "tokenizer": {"train": {"vocab": 262}},
}


@pytest.mark.slow
def test_a_run_that_says_nothing_of_training_needs_no_process_beside():
    Path("a.txt").write_text("".join(f"line {number} of the text\n" for number in range(50)))
    Path("run.yaml").write_text(json.dumps(PLAIN))
    script = (
        "import sys\n"
        "import artel.launching.background_check\n"
        "from artel.cli.main import app\n"
        "artel.launching.background_check.subprocess = None\n"
        "app(['prepare', 'run.yaml', *sys.argv[1:]], standalone_mode=False)\n"
    )
    for more, started in (([], False), (["train.batch=4"], True)):
        done = subprocess.run([sys.executable, "-c", script, *more], capture_output=True, text=True)
        assert ("'NoneType' object has no attribute 'Popen'" in done.stderr) == started, done.stderr
        shutil.rmtree("stores")


@pytest.mark.processes
def test_what_prepare_leaves_is_shown_by_folder_file_and_store():
    Path("a.txt").write_text("".join(f"line {number} of the text\n" for number in range(50)))
    Path("run.yaml").write_text(json.dumps({**PLAIN, "run": "run"}))
    for block in (16, 12):  # prepared again with another value, the folder follows
        done = succeed("prepare", "run.yaml", f"data.block={block}", "--json")
        store = json.loads(done.stdout)["store"]
        of_file = artel("data", "show", "run.yaml", f"data.block={block}", "--json")
        for name in ("run", "run/config.yaml"):
            shown = artel("data", "show", name, "--json")
            assert (shown.returncode, shown.stdout) == (0, of_file.stdout), shown.stderr
        assert json.loads(artel("data", "show", store, "--json").stdout)["store"] == store
    Path("run/starts.jsonl").touch()  # a run that has started keeps the config.yaml of its start
    succeed("prepare", "run.yaml", "data.block=16")
    assert load_run("run").data.block == 12


def test_a_process_that_has_torch_checks_the_run_itself_before_it_reads_text(monkeypatch):
    Path("a.txt").write_text("".join(f"line {number} of the text\n" for number in range(50)))
    monkeypatch.setattr("artel.launching.background_check.subprocess", None)
    model = {"config": {"model_type": "gpt2", "n_embd": 100, "n_head": 3}}
    with pytest.raises(InputError, match="must be divisible by num_heads"):
        artel_api.prepare({**PLAIN, "model": model})
    assert not list(Path("stores").glob("*/manifest.json"))
    assert artel_api.prepare({**PLAIN, "train": {"batch": 4}}).is_new


@pytest.mark.processes
def test_what_is_wrong_with_text_and_model_is_said_together():
    lines = [json.dumps({"text": f"words {number}"} if number % 2 else {"other": number}) for number in range(60)]
    Path("a.jsonl").write_text("\n".join(lines))
    run = {
        "data": {"sources": [{"path": "a.jsonl"}], "store": "stores", "block": 8},
        "tokenizer": PLAIN["tokenizer"],
        "model": {"config": {"model_type": "gpt2", "n_embd": 100, "n_head": 3}},
    }
    Path("run.yaml").write_text(json.dumps(run))
    script = (  # nothing is found before the text is read
        "import sys\n"
        "from contextlib import nullcontext\n"
        "import artel.launching.background_check\n"
        "from artel.cli.main import main\n"
        "artel.launching.background_check.check_in_background = lambda *_: nullcontext(lambda **_: None)\n"
        "sys.argv = ['artel', 'prepare', 'run.yaml']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert "more than data.max_bad" in done.stderr
    assert "must be divisible by num_heads" in done.stderr


@pytest.mark.processes
def test_nothing_in_the_working_folder_is_imported():
    """Not by the command, and not by the processes that it starts."""
    Path("a.txt").write_text("".join(f"line {number} of the text\n" for number in range(50)))
    Path("run.yaml").write_text(json.dumps({**PLAIN, "train": {"batch": 4}}))
    Path("yaml.py").write_text("open('executed', 'w').close()\n")
    done = subprocess.run([sys.executable, "-P", "-m", "artel", "prepare", "run.yaml"], capture_output=True, text=True)
    assert (done.returncode, Path("executed").exists()) == (0, False), done.stderr


@pytest.mark.ci
@pytest.mark.processes
def test_the_process_beside_ends_with_the_one_that_started_it():
    """It waits for ever here: the run file is a pipe that nobody writes to."""
    os.mkfifo("run.yaml")
    script = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from artel.launching.background_check import check_in_background\n"
        "from artel.config import Overrides, parse_run\n"
        "run = parse_run({'data': {'sources': [{'path': 'a.txt'}]}, 'train': {'batch': 4}}, {}, {})\n"
        "with check_in_background(run, 'run.yaml', Overrides()):\n"
        "    print(Path(f'/proc/self/task/{os.getpid()}/children').read_text(), flush=True)\n"
        "    signal.pause()\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    beside = Path(f"/proc/{int(starter.stdout.readline())}/stat")
    starter.kill()
    starter.wait()
    wait_until(lambda: not beside.exists() or beside.read_text().rpartition(")")[2].split()[0] == "Z")


def test_ctrl_c_says_what_a_preparation_keeps():
    Path("a.txt").write_text("".join(f"paragraph {number} of the text\n\n" for number in range(100)))
    Path("run.yaml").write_text(json.dumps(PARAGRAPHS))
    run, interrupted_at = load_run("run.yaml"), ""

    def interrupt(line: str) -> None:
        if interrupted_at and line.startswith(interrupted_at):
            raise KeyboardInterrupt

    told = logged(interrupt)

    def prepare_until(line: str) -> str:
        nonlocal interrupted_at
        interrupted_at = line
        with pytest.raises(KeyboardInterrupt) as stopped:
            prepare(run)
        interrupted_at = ""
        (note,) = stopped.value.__notes__
        return note

    assert "the same command starts over with it" in prepare_until("training the tokenizer")
    assert "finished shards of the text are kept" in prepare_until("turning text into tokens")
    assert told.count("training the tokenizer") == 2  # it was not finished the first time
    prepare(run)
    assert told.count("training the tokenizer") == 2


@pytest.mark.ci
@pytest.mark.processes
def test_ctrl_c_while_processes_are_started_is_not_lost():
    """Python drops what is raised in a hook of a fork, and logging has hooks: the command went on to its end."""
    Path("a.txt").write_text("".join(f"paragraph {number} of the text\n\n" for number in range(100)))
    Path("run.yaml").write_text(json.dumps(PARAGRAPHS))
    script = (
        "import os, signal, sys, threading\n"
        "from artel.cli.main import main\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()  # which may get the signal as well\n"
        "once = [signal.SIGINT]\n"
        "os.register_at_fork(before=lambda: once and os.kill(os.getpid(), once.pop()))\n"
        "sys.argv = ['artel', 'prepare', 'run.yaml']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    kept = "finished shards of the text are kept; the same command resumes"
    assert done.stderr.endswith(f"artel: interrupted\n    {kept}\n")
