"""The command line: quick to start, help with an example, errors as messages, JSON on standard output alone."""

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
import torch
import typer

from artel.cli.main import app
from support.runs import ENVIRONMENT, TEXT_ALONE, artel, refused, succeed, write_run
from support.waiting import Screen, wait_until

VERBS = [["prepare"], ["train"], ["generate"], ["report"], ["recipes", "ls"], ["recipes", "cat"], ["recipes", "cp"],
         ["config", "check"], ["config", "explain"], ["config", "schema"],
         ["evaluate"], ["chat"], ["export"], ["push"], ["data", "show"], ["data", "verify"], ["watch"]]  # fmt: skip


def test_the_line_of_each_verb_is_whole_in_80_columns():
    def lines(group, name):
        yield from ((f"{name} {verb}", command) for verb, command in group.commands.items())
        for verb, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from lines(command, f"{name} {verb}")

    shown = {name: command.get_short_help_str(64) for name, command in lines(typer.main.get_command(app), "artel")}
    assert len(shown) > 25
    assert [name for name, line in shown.items() if line.endswith("...") or not line] == []


def run_python(code, *arguments, **options):
    """A Python program in a process of its own."""
    options = {"capture_output": True, "text": True, "env": ENVIRONMENT} | options
    return subprocess.run([sys.executable, "-c", code, *arguments], **options)


@pytest.mark.parametrize(
    "code",
    [
        "import artel.cli.main",
        # Else checking a run file takes seconds, and transformers is imported before it is told to be quiet.
        "from artel.registry import OBJECTIVES; [OBJECTIVES[name] for name in OBJECTIVES.names]",
    ],
)
def test_starting_and_naming_an_objective_import_no_torch(code):
    done = run_python(f"import sys; {code}; print([m for m in ('torch', 'transformers') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def imports_of(*arguments):
    """Lines on standard error of a command: its own, and one for each module that it imports, in order."""
    command = [sys.executable, "-X", "importtime", "-m", "artel", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    lines = done.stderr.splitlines()
    return [line.rsplit("|", 1)[1].strip() if line.startswith("import time:") else line for line in lines]


HEAVY = {"torch", "transformers", "accelerate", "datasets", "scipy", "sklearn", "pandas", "plotly"}


@pytest.mark.processes
@pytest.mark.ci
def test_commands_import_only_what_they_need(tmp_path):
    helped = imports_of("--help")
    assert not {"pydantic", "numpy", "rich", "yaml", "artel.config", "artel.storage", *HEAVY} & set(helped)

    run = write_run(tmp_path / "run.yaml")
    succeed("train", run)
    for command in (["report", run.with_suffix("")], ["watch", run.with_suffix("")]):
        assert not HEAVY & set(imports_of(*command))

    checked = imports_of("config", "check", run)
    (verdict,) = [at for at, line in enumerate(checked) if "the keys are valid; now checking the model" in line]
    assert not HEAVY & set(checked[:verdict])


@pytest.mark.processes
@pytest.mark.ci
def test_a_terminal_shows_what_a_silent_command_does_and_for_how_long():
    script = (
        "import sys; from artel.cli.streams import print_status\n"
        "from artel.elapsed import _terminal_width, show_elapsed\n"
        "from artel.storage.panics import hide_panics\n"
        "show_elapsed(); print_status('counting'); sys.stdin.readline()\n"
        "with hide_panics(): hidden = _terminal_width()\n"  # nothing is drawn into the buffer in place of stderr
        "print_status(f'done: {hidden} of {_terminal_width()} columns'); sys.stdin.readline()"
    )
    master, slave = pty.openpty()
    pipes = {"stdin": subprocess.PIPE, "stderr": slave, "text": True, "env": ENVIRONMENT | {"TERM": "xterm"}}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        screen = Screen(master)
        screen.read_until(lambda text: "counting (2 s)" in text)
        process.stdin.write("\n")
        process.stdin.flush()
        screen.read_until(lambda text: re.search(r"counting \(\d+ s\)\r\x1b\[Kdone: 0 of 80 columns\r\n", text))
        process.stdin.close()
    assert process.returncode == 0
    os.close(master)
    os.close(slave)


def test_the_help_of_recipes_names_its_commands():
    group = typer.main.get_command(app).commands["recipes"]
    assert group.help.partition(": ")[2].rstrip(".").split(", ") == list(group.commands)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_with_an_example(verb):
    assert re.search(f"Examples?: artel {' '.join(verb)}", " ".join(succeed(*verb, "--help").stdout.split()))


def test_prepare_twice_tokenises_once(tmp_path):
    run = write_run(tmp_path / "run.yaml", TEXT_ALONE)
    result = json.loads(succeed("prepare", run, "--json").stdout)
    documents = result["documents"]
    assert documents["read"] == documents["kept"] + sum(documents["dropped"].values())
    assert result["made"]
    again = run_python(
        "import sys; from artel.cli.main import app\n"
        f"try: app(['prepare', {str(run)!r}, '--json'])\n"
        "except SystemExit: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    lines = again.stdout.splitlines()
    assert json.loads(lines[0]) == result | {"made": False}
    assert lines[1] == "False False"  # a store that is found needs neither, which is what keeps it under 2 s


@pytest.mark.slow
def test_generate_before_and_after_training(tmp_path):
    run = write_run(tmp_path / "run.yaml")
    noise = succeed("generate", run, "--untrained", "--prompt", "The", "--max-new-tokens", 5, "--json")
    assert json.loads(noise.stdout)["prompt"] == "The"
    succeed("train", run)
    folder = run.with_suffix("")
    options = ("--prompt", "The", "--max-new-tokens", 40, "--seed", 3)
    one, two = (artel("generate", folder, *options, "--json") for _ in range(2))
    assert one.stdout == two.stdout
    text = json.loads(one.stdout)["text"]
    assert artel("generate", folder, *options).stdout == f"The{text}\n"
    report = succeed("report", folder, "--compressor", "--json")
    assert json.loads(report.stdout)["compressor"]["xz"] > 0
    assert "validation" in report.stderr


def test_recipes_are_listed_shown_and_copied(tmp_path):
    assert "demo:" in artel("recipes", "ls").stdout
    text = artel("recipes", "cat", "demo").stdout
    assert "model: {auto: true}" in text
    copy = tmp_path / "mine.yaml"
    succeed("recipes", "cp", "demo", copy)
    assert copy.read_text() == text
    again = artel("recipes", "cp", "demo", copy)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    unknown = artel("recipes", "cat", "dem")
    assert (unknown.returncode, "did you mean demo?" in unknown.stderr) == (2, True)


def test_explain_and_schema():
    text = artel("config", "explain", "train").stdout
    assert "train.learning_rate = 5e-05" in text
    assert "did you mean train?" in artel("config", "explain", "trian").stderr
    assert json.loads(artel("config", "schema").stdout)["additionalProperties"] is False


def test_a_second_run_on_the_same_folder_is_refused(tmp_path):
    from artel.storage import lock

    run = write_run(tmp_path / "run.yaml")
    with lock(run.with_suffix("") / ".lock"):
        done = artel("train", run)
    assert done.returncode == 1
    assert "is in use by process" in done.stderr


def test_a_tracker_named_on_the_command_line(tmp_path):
    run = write_run(tmp_path / "run.yaml", train={"steps": 2})
    succeed("train", run, "--report-to", "tensorboard")
    assert list((run.with_suffix("") / "tensorboard").glob("events.*"))
    done = refused("train", run, "--report-to", "wandv", "--restart")
    assert "'tensorboard', 'wandb', 'mlflow' or 'trackio'" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have fp8")
def test_what_a_device_has_not_is_told_before_any_text_is_prepared(tmp_path):
    run = write_run(tmp_path / "run.yaml", train={"precision": "fp8", "weights": "bf16", "optimizer": "sgd"})
    done = refused("train", run)
    assert "fp8 needs a GPU" in done.stderr
    assert "only adamw's are rounded" in done.stderr
    assert not (tmp_path / "stores").exists()


@pytest.mark.processes
@pytest.mark.ci
def test_ctrl_c_is_answered_while_the_main_thread_is_in_c_and_a_second_one_ends_it():
    script = (
        "import hashlib, sys, threading\n"
        "from artel.interrupts import answer_interrupts\n"
        "answer_interrupts()\n"
        "begun = threading.Event()\n"
        "def say(): begun.wait(); print('ready', flush=True)\n"
        "threading.Thread(target=say, daemon=True).start()\n"
        "sys.setswitchinterval(1000)\n"  # the thread runs only when the main one is in the call below
        "begun.set()\n"
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"  # minutes in one call, in which no handler runs
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "artel: stopping; press Ctrl-C again to end at once\n"
        wait_until(lambda: process.send_signal(signal.SIGINT) or process.poll() is not None)
        assert process.stderr.read() == "artel: stopped at once\n"
    assert process.returncode == 130


@pytest.mark.processes
@pytest.mark.ci
def test_ctrl_c_that_the_main_thread_handled_first_is_not_answered():
    """A Ctrl-C at the prompt of a chat was answered half a second later, and a later one then ended the chat."""
    done = run_python(
        "import hashlib, os, signal, sys\n"
        "from artel.interrupts import answer_interrupts, mark_interrupt_handled\n"
        "answer_interrupts()\n"
        "sys.setswitchinterval(1000)\n"  # the thread runs only when the main one is in the call at the end
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    mark_interrupt_handled()\n"
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 5_000_000)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_end_of_a_command_does_not_look_through_all_its_objects():
    """Python's garbage collection at exit took 2 to 3 s after a training, and up to 24 s on a busy machine."""
    done = run_python(
        "import atexit, gc, sys\n"
        "from artel.cli.main import main\n"
        "atexit.register(lambda: print(len(gc.get_objects()) < gc.get_freeze_count()))\n"
        "sys.argv = ['artel', '--version']\n"
        "main()\n"
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "True")


@pytest.mark.processes
@pytest.mark.parametrize("words", ["export {} out", "generate {} --prompt x", "new x.yaml --text {}"])
def test_a_command_says_what_it_reads_before_its_imports(tmp_path, words):
    """They take 5 to 30 s on a busy machine, in which nothing was printed where there is no terminal."""
    script = (
        "import sys\n"
        "from artel.cli.main import main\n"
        "class Imports:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name in ('torch', 'transformers'):\n"
        "            raise SystemExit(f'imports {name}')\n"
        "sys.meta_path.insert(0, Imports())\n"
        "main()\n"
    )
    read = str(tmp_path / "absent")
    done = run_python(script, *words.format(read).split())
    assert done.stderr.splitlines()[0] == f"{'looking at' if words.startswith('new') else 'loading'} {read}"
