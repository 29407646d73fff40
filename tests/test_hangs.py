"""Processes that hang, that are stopped or killed; a run without any network; two runs on one folder."""

import json
import linecache
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from artel.errors import WorkError
from artel.launching.hosts import Hosts
from artel.launching.local import _process_error
from artel.launching.rendezvous import Rendezvous
from artel.parallel.process_group import threads_per_process
from artel.storage import lock
from artel.training import RunFolder
from artel.training.faults.watchdog import _WatchdogProcess
from artel.training.faults.watchdog_process import IGNORED_SIGNALS
from support import WORKERS
from support.runs import ENVIRONMENT, artel, end, metrics, start, succeed, wait_for_step, workers_of, write_run
from support.waiting import LIMIT, wait_until_gone

# Long enough to be caught in its midst.
RUN = {"train": {"steps": 300}, "checkpoint": {"every": 10}, "validate": {"every": "never"}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The final weights of two processes that nothing befell."""
    run = write_run(tmp_path_factory.mktemp("undisturbed") / "run.yaml", **RUN)
    succeed("train", run, "--nproc", 2, timeout=LIMIT)
    return weights(run)


def weights(run):
    return (run.with_suffix("") / "model" / "model.safetensors").read_bytes()


# Hangs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(folder, what hang_cases.py tells of each case, its standard error)."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, str(WORKERS / "hang_cases.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout), done.stderr


def stacks(folder):
    return {file.name: file.read_text() for file in sorted((folder / "hangs").glob("*"))}


@pytest.mark.processes
def test_a_process_that_hangs_writes_down_where_and_ends(alone):
    folder, statuses, output = alone
    assert os.waitstatus_to_exitcode(statuses["free"]) == 77, output
    ((name, text),) = stacks(folder / "free").items()
    assert re.fullmatch(r"[-\d]+-process-0\.txt", name)
    assert re.match(r"process 0 on \S+: no progress for \d+ s after step 3; last finished: a step\n", text)
    assert "in hangs_here\n" in text
    assert "in _watch\n" in text  # all threads
    assert str(folder / "free" / "hangs" / name) in output
    assert os.waitstatus_to_exitcode(statuses["held"]) == -signal.SIGVTALRM, output
    ((_, text),) = stacks(folder / "held").items()
    assert "in a call that held Python's lock\n" in text
    assert "in hangs_with_pythons_lock\n" in text


@pytest.mark.processes
def test_neither_who_is_slow_nor_who_was_stopped_hangs_and_collectives_wait_as_long_as_they_are_told(alone):
    folder, statuses, output = alone
    ends = {name: os.waitstatus_to_exitcode(statuses[name]) for name in ("slow", "stopped", "waits")}
    assert ends == {"slow": 0, "stopped": 130, "waits": 0}, output
    assert not stacks(folder / "slow")
    assert not stacks(folder / "stopped")


@pytest.mark.processes
def test_an_overseer_that_is_interrupted_while_it_starts_goes_on(tmp_path):
    """Ctrl-C reaches all processes of a terminal; this one would write a traceback of its imports."""
    overseer = _WatchdogProcess(0, 60.0, 1.0, tmp_path)
    for number in IGNORED_SIGNALS:
        os.kill(overseer._process.pid, number)
    overseer._process.stdin.close()  # as when the process has ended
    status = overseer._process.wait(LIMIT)
    overseer.close()
    assert status == 0


@pytest.mark.processes
def test_a_run_of_which_one_process_hangs_is_started_again(tmp_path, undisturbed):
    run = write_run(tmp_path / "run.yaml", **RUN)
    launcher, workers = start("train", run, "--nproc", "2", "--max-restarts", "1", "train.hang_timeout=5"), {}
    try:
        wait_for_step(launcher, tmp_path / "run", 50)
        workers = workers_of(launcher)
        os.kill(workers[1], signal.SIGSTOP)
        wait_until_gone([workers[1]])
        _, output = launcher.communicate(timeout=LIMIT)
    finally:
        end(launcher, *workers.values())
    assert launcher.returncode == 0, output
    ((name, text),) = stacks(tmp_path / "run").items()  # a stopped process cannot tell
    assert name.endswith("-process-0.txt")
    assert re.match(r"process 0 on \S+: no progress for \d+ s after step \d+; last finished: \w+", text)
    assert "training/loop.py" in text
    assert "resuming from step" in output
    assert weights(run) == undisturbed


# What the agent makes of it, with processes that need no torch -------------------------------------------------------

ONCE = """
import os, pathlib, sys, time
file = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
other = file.with_name(str(1 - int(file.name)))
with file.open("ab") as times:
    times.write(b".")
starts = file.stat().st_size
# One that failed at once would end the other before that has begun.
while not other.exists() or other.stat().st_size < starts:
    time.sleep(0.01)
"""


@pytest.fixture
def agent(tmp_path):
    """Runs such a program as two processes under our agent: (its result, starts of each)."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from artel.launching.agent import Agent

    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    }

    def agent(program, restarts=0):
        hosts = Hosts(restarts=restarts)
        spec = WorkerSpec(
            role="test",
            local_world_size=2,
            rdzv_handler=Rendezvous.open(hosts).handler(RunFolder(tmp_path)),
            entrypoint=sys.executable,
            args=("-c", ONCE + program, str(tmp_path)),
            max_restarts=restarts,
            monitor_interval=0.2,
            local_addr="localhost",
        )
        result = Agent(spec, hosts, lambda failures: None).run()
        return result, [(tmp_path / str(rank)).stat().st_size for rank in range(2)]

    yield agent
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "restarts", "failed", "count"),
    [
        ("time.sleep(0.5); sys.exit(76 if starts < 3 and os.environ['RANK'] == '1' else 0)", 0, False, 3),
        ("sys.exit(77 if starts < 4 else 0)", 1, True, 2),
    ],
    ids=["memory", "hang"],
)
def test_memory_costs_no_restart_and_a_hang_costs_one(agent, program, restarts, failed, count):
    result, starts = agent(program, restarts)
    assert (result.is_failed(), starts) == (failed, [count, count])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("others", "own", "status"),
    [
        ("os.kill(os.getpid(), 19)", "time.sleep(0.5); sys.exit(77)", 77),  # SIGSTOP
        ("import signal; signal.signal(15, signal.SIG_IGN); time.sleep(600)", "time.sleep(0.5); sys.exit(77)", 77),
        ("time.sleep(0.5); sys.exit(75)", "time.sleep(0.5); os.kill(os.getpid(), 9)", -9),
    ],
)
def test_the_others_end_within_seconds_and_the_cause_is_named(agent, others, own, status, monkeypatch):
    """Those that do not end by themselves are given 5 s; by torchrun 30."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    from artel.launching.agent import first_failure

    close, given = PContext.close, []
    monkeypatch.setattr(PContext, "close", lambda *args: given.append(args[2:]) or close(*args))
    result, _ = agent(f"if os.environ['RANK'] == '0':\n    {others}\nelse:\n    {own}")
    assert result.is_failed()
    assert given[0] == (5,)
    assert first_failure(result.failures) == (1, status)


STOPPABLE = """
import signal
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
file.with_suffix(".ready").touch()
end = time.monotonic() + 60
while not asked and time.monotonic() < end:
    time.sleep(0.01)
file.with_suffix(".asked").touch() if asked else None
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("file", "function", "line"),
    [
        ("elastic/metrics/api.py", "wrapper", "start = time.time()"),  # a name that its `finally` needs
        ("subprocess.py", "_internal_poll", "try:"),  # it has a lock, which its `finally` is to give back
    ],
)
def test_ctrl_c_in_the_midst_of_a_look_at_the_workers_is_passed_on(agent, tmp_path, file, function, line):
    from torch.distributed.elastic.multiprocessing import SignalException

    sent = []

    def on_call(frame, event, argument):
        code = frame.f_code
        return on_line if code.co_name == function and code.co_filename.endswith(file) and not sent else None

    def on_line(frame, event, argument):
        """Ctrl-C before the line, once both workers run."""
        here = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if here == line and not sent and len(list(tmp_path.glob("*.ready"))) == 2:
            sent.append(line)
            os.kill(os.getpid(), signal.SIGINT)
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        with pytest.raises(SignalException):
            agent(STOPPABLE)
    finally:
        sys.settrace(before)
    assert sent == [line]
    assert len(list(tmp_path.glob("*.asked"))) == 2


def test_what_is_said_at_the_end(tmp_path):
    folder = RunFolder(tmp_path)
    for status, said in (
        (77, f"hung; the stacks of its threads are in {tmp_path}/hangs"),
        (-signal.SIGVTALRM, f"hung; the stacks of its threads are in {tmp_path}/hangs"),
        (76, "was out of memory"),
    ):
        error = _process_error(3, status, folder, os.getpid())
        assert isinstance(error, WorkError)
        assert re.match(rf"process 3 on \S+: {re.escape(said)}\n.*the same command resumes", str(error))


# Two runs on one folder ---------------------------------------------------------------------------------------------


def test_a_lock_that_several_hold(tmp_path):
    path = tmp_path / "lock"
    in_use = pytest.raises(WorkError, match=rf"is in use by process {os.getpid()} on \S+\n")
    with lock(path, shared=True), lock(path, shared=True), in_use, lock(path, wait=0.3):
        pass
    with lock(path, wait=False), pytest.raises(WorkError), lock(path, wait=False, shared=True):
        pass
    with lock(path, wait=False, shared=True):
        pass


@pytest.mark.processes
def test_two_runs_never_write_one_folder_at_the_same_time(tmp_path, undisturbed):
    run = write_run(tmp_path / "run.yaml", **RUN)
    first, second, workers = start("train", run, "--nproc", "2"), None, {}
    try:
        wait_for_step(first, tmp_path / "run", 50)
        workers = workers_of(first)
        os.kill(workers[0], signal.SIGSTOP)
        refused = artel("train", run, timeout=LIMIT)
        assert refused.returncode == 1
        assert f"is in use by process {first.pid} on " in refused.stderr

        os.kill(first.pid, signal.SIGKILL)  # the launcher alone: its processes still hold the folder
        first.wait()
        second = start("train", run, "--nproc", "2")
        output = ""
        while "waiting for processes of an earlier start" not in output:
            output = second.stderr.readline()
            assert output, "it did not wait"
        assert f"process {workers[0]} on " in output
        assert Path(f"/proc/{workers[0]}").exists()
        assert not workers_of(second)
        os.kill(workers[0], signal.SIGCONT)  # now it hears that its launcher is gone, and saves
        _, output = second.communicate(timeout=LIMIT)
    finally:
        end(first, *workers.values())
        if second is not None:
            end(second)
    assert second.returncode == 0, output
    assert "resuming from step" in output
    steps = [line["step"] for line in metrics(tmp_path / "run") if "loss" in line]  # not those of a validation
    assert steps == sorted({*steps})
    assert weights(run) == undisturbed


# Without a network --------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.processes
def test_a_whole_training_needs_no_network(tmp_path):
    """Not even loopback is up: whatever would speak to anyone, about the run or about itself, fails."""
    apart = ["unshare", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a network namespace of one's own needs root")
    clean = {name: value for name, value in ENVIRONMENT.items() if name not in ("HF_HUB_OFFLINE", "DO_NOT_TRACK")}
    looked = subprocess.run([*apart, "ip", "-brief", "link"], capture_output=True, text=True, check=False)
    assert " UP " not in looked.stdout
    command = [*apart, sys.executable, "-m", "artel", "train", str(write_run(tmp_path / "run.yaml"))]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "run" / "model" / name).stat().st_size
    assert json.loads((tmp_path / "run" / "result.json").read_bytes())["steps"] == 6


# Cores --------------------------------------------------------------------------------------------------------------


def test_cores_are_shared_only_by_those_that_may_use_the_same():
    """As srun --cpus-per-task=4 gives them to two tasks; as nobody parts them; as two of three share."""
    assert threads_per_process([0, 1, 2, 3], [[0, 1, 2, 3], [4, 5, 6, 7]]) == 4
    assert threads_per_process([*range(8)], [[*range(8)]] * 2) == 4
    assert threads_per_process([0, 1], [[0, 1], [0, 1], [2, 3, 4]]) == 1
    assert threads_per_process([2, 3, 4], [[0, 1], [0, 1], [2, 3, 4]]) == 3
    assert threads_per_process([0], [[0]] * 4) == 1


PROBED = """
import os, time
from pathlib import Path
from artel.registry import CALLBACKS

FILE = Path(os.environ["ARTEL_HEARTBEAT"])

@CALLBACKS.register("probed")
class Probed:
    def __call__(self, run):
        if run.step == 1:
            os.utime(FILE, (1, 1))
        elif run.step == 3:  # a heartbeat came with step 2
            end = time.monotonic() + 60
            while FILE.stat().st_mtime == 1 and time.monotonic() < end:
                time.sleep(0.05)
            Path("seen").write_text(str(FILE.stat().st_mtime))
"""


def test_a_probe_outside_sees_progress_while_the_loop_runs(tmp_path):
    Path("probed.py").write_text(PROBED)
    run = write_run(tmp_path / "run.yaml", plugins="probed", callbacks=["probed"], train={"hang_timeout": 60})
    file = tmp_path / "heartbeat"
    succeed("train", run, env={"ARTEL_HEARTBEAT": str(file)})
    assert float(Path("seen").read_text()) > 1
    assert not file.exists()  # a probe takes the process for healthy while it writes the model
