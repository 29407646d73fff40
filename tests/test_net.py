"""What nobody expected is caught once: three lines and a file with the traceback, of the command and of its processes.

And what the machine refuses (memory, the size of a file, a full standard output) is told in words.
"""

import json
import os
import resource
import subprocess
import sys

import pytest

from support.runs import ENVIRONMENT, TEXT_ALONE, write_run
from support.waiting import LIMIT

ULIMIT = {"memory": resource.RLIMIT_AS, "file": resource.RLIMIT_FSIZE, "open": resource.RLIMIT_NOFILE}


def in_a_shell(*arguments, shell: str = "", limits=(), **variables) -> subprocess.CompletedProcess:
    """`artel ARGUMENTS`, with what a shell does to its streams and with limits on the process; output as text."""
    words = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-m", "artel", *map(str, arguments)]

    def limit() -> None:
        for name, value in limits:
            resource.setrlimit(ULIMIT[name], (value, value))

    variables = {**ENVIRONMENT, **variables}
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, env=variables, preexec_fn=limit)


def test_a_fault_is_three_lines_and_a_file(tmp_path, monkeypatch, command):
    """The error of a library that raises no Exception (Rust's panics) is caught, too."""

    class Panic(BaseException):
        pass

    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path))
    for error in (ZeroDivisionError("nothing\nto divide"), Panic("at the core; token=hf_abcdefghijklmnopqrstuvwx")):

        def fail(error=error) -> None:
            raise error

        monkeypatch.setattr("artel.config.recipe_names", fail)
        status, _, shown = command("recipes", "ls")
        first, second, third = shown.splitlines()
        said = " ".join(str(error).replace("hf_abcdefghijklmnopqrstuvwx", "***").split())
        assert status == 1
        assert first == f"artel: recipes ls: failed with {type(error).__name__}: {said}"
        assert second.startswith("artel: this is a fault of artel, not of what you gave it")
        (file,) = (tmp_path / "faults").iterdir()
        assert third == f"artel: the traceback: {file}"
        content = file.read_text()
        assert "Traceback" in content
        assert "in fail" in content
        assert "artel recipes ls" in content
        assert "hf_abc" not in content
        file.unlink()


def test_a_fault_of_a_process_that_prepares_text(tmp_path, monkeypatch, command):
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path))

    def fail(*_) -> None:
        raise KeyError("no such key")

    monkeypatch.setattr("artel.preparing.tasks.Tasks.run", fail)
    status, _, said = command("prepare", write_run(tmp_path / "run.yaml"))
    assert (status, "Traceback" in said) == (1, False)
    assert "part 0: failed with KeyError: 'no such key' (this is a fault of artel" in said
    (file,) = (tmp_path / "faults").iterdir()
    assert f"the traceback: {file}" in said
    assert "in fail" in file.read_text()


@pytest.mark.processes
def test_a_fault_of_a_process_of_a_run(tmp_path):
    """Its launcher names the file, and ends with 1."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import artel.training.setup\n"
        "    def fail(*_):\n"
        "        raise KeyError('no such key')\n"
        "    artel.training.setup.run_length = fail\n"
    )
    file = write_run(tmp_path / "run.yaml")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = in_a_shell("train", file, "--nproc", "2", ARTEL_CACHE=str(tmp_path / "cache"), PYTHONPATH=path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    (fault,) = (tmp_path / "cache" / "faults").iterdir()
    assert "in fail" in fault.read_text()
    assert "artel: process 1 on " in done.stderr
    assert "failed because of a bug in artel" in done.stderr
    assert done.stderr.count(str(fault)) == 2  # said by the process, and by its launcher


def test_where_no_file_can_be_written_a_fault_names_its_line(tmp_path, monkeypatch):
    from artel.storage.unexpected_errors import fault_lines

    monkeypatch.setenv("ARTEL_CACHE", "/dev/null/cache")
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    with pytest.raises(KeyError) as raised:
        raise KeyError("x")
    assert fault_lines(raised.value, "train")[2].startswith(f"the traceback: {__file__}:")


@pytest.mark.parametrize("words", [["recipes", "ls", "--json"], ["recipes", "ls"], ["config", "explain"], ["--help"]])
@pytest.mark.parametrize(
    ("shell", "says"), [("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_a_result_that_cannot_be_written_is_not_lost_in_silence(words, shell, says):
    done = in_a_shell(*words, shell=shell)
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_closed_streams_and_readers_that_go_away(tmp_path):
    """A stream that is closed is not the next file that is opened."""
    file = write_run(tmp_path / "run.yaml", TEXT_ALONE)
    done = in_a_shell("prepare", file, "--json", shell="<&- 2>&-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["made"]
    assert not done.stderr
    done = in_a_shell("prepare", file, "--json", shell="<&- >&- 2>&-")
    assert done.returncode == 1
    assert not done.stdout
    done = in_a_shell("config", "explain", shell="| head -1")
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.slow
def test_an_environment_of_ascii_alone(tmp_path):
    ascii_alone = {"PYTHONUTF8": "0", "LC_ALL": "C"}
    words = [sys.executable, "-m", "artel", "recipes", "cat", "tolstoy-scratch", "--nö"]
    done = subprocess.run(words, capture_output=True, timeout=LIMIT, env={**ENVIRONMENT, **ascii_alone})
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    done = in_a_shell("recipes", "ls", **ascii_alone)
    assert done.returncode == 0
    (tmp_path / "тексты").mkdir()
    (tmp_path / "тексты" / "а.txt").write_text("Слово и ещё слово.\n\n" * 300)
    data = {"sources": [{"path": "тексты/*.txt", "document": "paragraph"}], "validation": 0}
    file = write_run(tmp_path / "run.yaml", TEXT_ALONE, data=data, tokenizer={"train": {"vocab": 270}})
    done = in_a_shell("prepare", file, **ascii_alone)
    assert not any(words in done.stderr for words in ("Traceback", "fault of artel")), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "limits", "says"),
    [
        ("prepare", [("file", 2000)], "may not become that large"),
        ("prepare", [("open", 16)], "limit on open files"),
        ("train", [("memory", 300 << 20)], "the system has no more"),  # which is just enough for the text alone
    ],
)
def test_limits_of_a_process_are_told(tmp_path, verb, limits, says):
    variables = {
        "ARTEL_CACHE": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",  # Python 3.11 would leave its compiled files as short as the limit makes them
        "OPENBLAS_NUM_THREADS": "1",  # its threads take memory by the core, and it ends the process itself
    }
    done = in_a_shell(verb, write_run(tmp_path / "run.yaml", TEXT_ALONE), limits=limits, **variables)
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    assert "Traceback" not in done.stderr
    assert "fault of artel" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"ARTEL_CACHE": "/dev/null/cache"}, "/dev/null/cache"),
        ({"ARTEL_CACHE": "~no-such-user/cache"}, "ARTEL_CACHE"),
        ({"HOME": "/dev/null/home"}, "/dev/null/home/.cache/artel"),
    ],
)
def test_a_cache_that_cannot_be_written_is_told_before_any_work(tmp_path, monkeypatch, command, variables, place):
    for name in ("ARTEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for verb in ("prepare", "train"):
        file = write_run(tmp_path / "run.yaml", data={"store": ""})
        status, _, said = command(verb, file)
        assert (status, said.startswith(f"artel: {place}: ")) == (2, True), said
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_ctrl_c_while_the_command_is_imported(tmp_path):
    script = (
        "import sys\n"
        "from artel.__main__ import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'artel.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "artel: interrupted\n")
