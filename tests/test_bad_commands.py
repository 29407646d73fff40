"""Command lines that are wrong: names that are no run, keys written as options, numbers that nothing takes."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import yaml

import artel as artel_package
from artel.cli.generate import _read_text_or_file
from artel.cli.main import _report_thread_error
from artel.errors import InputError
from support.runs import TINY, artel, write_run

# A command line, and what its message says: keys written as options, names that are nearly those of runs and recipes,
# numbers that nothing takes.
COMMANDS = {
    "train run.yaml --train.steps 10": ["write train.steps=10"],
    "train run.yaml --train.steps=10": ["write train.steps=10"],
    "train run.yaml --lr 3e-4 --nproc 2": ["train.learning_rate=3e-4"],
    "train run.yaml --learning-rate": ["write train.learning_rate=…"],
    "prepare run.yaml --max_seq_length=5": ["write data.block=5"],
    "config check run.yaml --data.blocks=5": ["write data.block=5"],
    "launch slurm run.yaml --batch-size 3": ["write train.batch=3"],
    "train run.yaml --nprok 2": ["No such option: --nprok"],
    "generate runs/mine --max-length 2": ["No such option: --max-length"],
    "generate runs/nothing": ["is neither a run, a model folder nor a model", "check the spelling"],
    "generate runs/nothing/": ["is neither a run, a model folder nor a model", "check the spelling"],
    "generate novel-smal": [
        "is neither a run, a model folder nor a model",
        "did you mean novel-small?",
    ],
    "generate novel-small": ["is a recipe", "artel train novel-small"],
    "generate mine": ["did you mean runs/mine?"],
    "chat runs/mime": ["did you mean runs/mine?"],
    "report mine": ["did you mean runs/mine?"],
    "evaluate runs/min --data run.yaml": ["did you mean runs/mine?"],
    "export novel-smal new": ["did you mean novel-small?"],
    "train runs/mime": ["did you mean runs/mine?"],
    f"train {'x' * 300}": ["exceeds the 255"],
    f"generate {'x' * 300}": ["exceeds the 255"],
    f"generate runs/mine --seed {2**64}": ["--seed", str(2**63 - 1)],
    f"chat runs/mine --seed {2**64}": ["seed", "out of range"],
    f"chat runs/mine --new-tokens {10**400}": ["new_tokens", "out of range"],
    f"chat runs/mine --max-new-tokens {10**400}": ["new_tokens", "out of range"],
    f"generate runs/mine --max-new-tokens {10**12}": ["--max-new-tokens", str(10**8)],
    "train nowhere.yaml": ["neither a file nor a recipe"],
    "train demoo": ["did you mean demo?"],
    "train .": ["config.yaml"],
    "generate ./none": ["is not a folder"],
    "generate no/such": ["needs network"],
    "generate run.yaml": ["is a file, not a run"],
    "report .": ["metrics.jsonl: no such file"],
    "recipes cp demo run.yaml": ["exists already"],
    "train run.yaml --nproc 1000000": ["GiB in 1,000,000 processes here", "start at most"],
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[:60])
def test_what_a_command_line_means(command, tmp_path, artel_here, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    write_run(tmp_path / "run.yaml")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text(yaml.safe_dump(TINY))
    done = artel_here(*command.split())
    assert (done.returncode, "Traceback" in done.stderr, done.stdout) == (2, False, ""), done
    for says in COMMANDS[command]:
        assert says in done.stderr


def test_the_version_is_told(artel_here):
    done = artel_here("--version")
    assert (done.returncode, done.stdout) == (0, f"artel {artel_package.__version__}\n")


@pytest.fixture
def fetched_gpt2():
    """Its folder in the hub's cache of the tests."""
    folder = Path(os.environ["HF_HOME"], "hub", "models--gpt2")
    yield folder
    shutil.rmtree(folder)


def test_a_model_that_was_fetched_may_have_the_name_of_a_run(tmp_path, fetched_gpt2):
    """And what is wrong with it is said of it."""
    folder = fetched_gpt2
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "runs" / "gpt2").mkdir(parents=True)
    (tmp_path / "runs" / "gpt2" / "config.yaml").write_text(yaml.safe_dump(TINY))
    done = artel("generate", "gpt2", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "did you mean" not in done.stderr
    assert "gpt2 makes 0 tokens" in done.stderr  # that is what is wrong with this one


def test_a_context_is_a_regular_file_or_the_text_itself(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is a named pipe, not a regular file"):
        _read_text_or_file(str(tmp_path / "pipe"))
    for text in ("Anna came home.", "x" * 5000, "a\0b"):
        assert _read_text_or_file(text) == text


def test_the_end_of_a_thread_is_no_fault(capfd):
    for end, says in ((SystemExit(1), ""), (ValueError("wrong"), "ValueError: wrong")):
        _report_thread_error(threading.ExceptHookArgs((type(end), end, None, None)))
        assert says in (output := capfd.readouterr().err)
        assert bool(output) == bool(says)
