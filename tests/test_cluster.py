"""Clusters: the same store, byte for byte, from processes here, a real Slurm and a real Ray, after any kill."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from artel.config import PrepareConfig
from artel.errors import ArtelError, InputError, WorkError
from artel.preparing import prepare
from artel.preparing.engines import check_engine
from artel.preparing.engines.cluster import Submission, create_submission, lost_tasks_error, rank_command
from artel.preparing.engines.slurm import job_script
from artel.preparing.tasks import Tasks
from artel.preparing.workspace import Workspace
from support import WORKERS, cluster_slurm
from support.cluster_runs import KILLED_ONCE, SLOW_IN_JOBS, converted, every_stage, written
from support.runs import kill, refused
from support.stores import run_of, tree
from support.waiting import LIMIT, wait_until

SLURM = {"memory": "1G", "options": {"time": "0:10:00"}}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return tmp_path_factory.mktemp("texts") / "all"


@pytest.fixture(scope="module")
def expected(texts, tmp_path_factory):
    """What one process makes."""
    return tree(prepare(every_stage(texts, tmp_path_factory.mktemp("one"), workers=1)).folder)


@pytest.mark.slow
def test_two_processes_here(tmp_path, texts, expected):
    assert tree(prepare(every_stage(texts, tmp_path, workers=2)).folder) == expected


# Ranks alone ----------------------------------------------------------------------------------------------------------


def lines_left(run, folder):
    """A workspace of which the first stage is to be done."""
    from artel.preparing.run_tokenizer import run_tokenizer

    workspace = Workspace.open_or_plan(folder, run)
    run_tokenizer(workspace, print)
    return Tasks(workspace)


def run_submission(work, ranks):
    """Run the ranks of a submission at the same time, as a cluster would, and return their exit statuses."""
    processes = []
    for rank in range(ranks):
        with Path(work.folder, "logs", f"here_{rank}.log").open("wb") as log:
            command = [*rank_command(work), str(rank), str(ranks)]
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return [process.wait(LIMIT) for process in processes]


def test_ranks_share_the_tasks_of_a_stage(tmp_path, texts):
    tasks = lines_left(every_stage(texts, tmp_path), tmp_path / "key.parts")
    work = create_submission(tasks, "lines", processes_per_rank=2)
    assert len(work.task_indices) > 10
    assert run_submission(work, 2) == [0, 0]
    assert sorted(file.name for file in Path(work.folder, "succeeded").iterdir()) == ["0", "1"]
    assert tasks.unfinished("lines") == []
    claims = {claim.name: str(claim.readlink()) for claim in Path(work.folder, "claims").iterdir()}
    assert sorted(map(int, claims)) == work.task_indices
    assert len(set(claims.values())) > 1
    assert create_submission(tasks, "lines").folder != work.folder


def test_a_rank_that_is_started_again_does_what_it_took(tmp_path, texts):
    """As Slurm does with a job whose node was lost; what others took it leaves to them."""
    work = create_submission(lines_left(every_stage(texts, tmp_path), tmp_path / "key.parts"), "lines")
    before = work._claim_tasks("1.0", first=4)
    others = work._claim_tasks("0.0", first=0)
    assert [next(before), next(before), next(others)] == [4, 5, 0]
    again = list(work._claim_tasks("1.0", first=4))
    assert sorted(again[:2]) == [4, 5]
    assert sorted(again) == work.task_indices[1:]
    assert list(others) == []


def test_an_error_of_a_task_is_the_users_to_see(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "word " * 500}) for _ in range(9)))
    data = {"sources": [{"path": str(tmp_path / "a.jsonl")}], "max_document": 1000}
    tasks = lines_left(run_of(tmp_path, data=data), tmp_path / "key.parts")
    run_submission(create_submission(tasks, "text"), 1)
    with pytest.raises(InputError, match="the line is over 1,000 bytes"):
        tasks.workspace.raise_errors()


def test_a_node_that_does_not_see_the_workspace(tmp_path):
    work = Submission(str(tmp_path / "elsewhere"), "text", [1, 2], str(tmp_path / "jobs"), str(tmp_path))
    with pytest.raises(WorkError, match=r"data\.store: the node \S+ does not see .*elsewhere\n.*a disk that all nodes"):
        work.run(0, 1)
    with pytest.raises(WorkError, match=r"data\.store: the node \S+ does not see .*jobs\n"):
        Submission.read(tmp_path / "jobs")
    error = str(lost_tasks_error(work, 2, "the job 7 ended as FAILED", "mend it"))
    assert "2 of 2 tasks (text) were not done: the job 7 ended as FAILED and left no log" in error
    assert "data.store" in error


def test_the_last_lines_of_a_failures_log_are_quoted(tmp_path):
    work = Submission(str(tmp_path), "text", [0, 1], str(tmp_path), str(tmp_path))
    for folder, name, log in (
        ("logs", "7_0.log", "well\n"),
        ("logs", "7_1.log", "a\n\n" * 30 + "why\n"),
        ("succeeded", "0", ""),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(log)
    error = str(lost_tasks_error(work, 1, "the job 7 ended as FAILED", "mend it"))
    assert error.startswith(f"{tmp_path}/logs/7_1.log: 1 of 2 tasks (text) were not done")
    assert error.count("    | a") == 11
    assert "| why" in error
    assert error.endswith("mend it; then run the same command: it resumes from the finished parts")


def test_the_script_for_slurm(tmp_path):
    config = PrepareConfig.model_validate({
        "engine": "slurm",
        "slurm": {"memory": "3G", "cpus": 8, "setup": ["module load python", "echo ready"],
                  "options": {"account": "nlp", "time": "2:00:00"}},
    })  # fmt: skip
    work = Submission(str(tmp_path), "near", [0, 1, 2, 3], str(tmp_path), str(tmp_path), 8)
    lines = job_script(work, 5, config.slurm).splitlines()
    for line in ("job-name=artel-near", "array=0-4", "cpus-per-task=8", "mem-per-cpu=2862M", "time=2:00:00",
                 "account=nlp", "requeue", "nodes=1"):  # fmt: skip
        assert f"#SBATCH --{line}" in lines
    setup = [f"export PATH={Path(sys.executable).parent}:$PATH", "module load python", "echo ready", "set -xe"]
    assert lines[-5:-1] == setup
    assert lines[-1] == f'python -P -m artel.preparing.engines.cluster {tmp_path} "$SLURM_ARRAY_TASK_ID" 5'
    assert "#SBATCH --time=24:00:00" in job_script(work, 1, PrepareConfig(engine="slurm").slurm)


def test_a_path_that_no_script_can_name_is_told(tmp_path):
    folder = tmp_path / 'a"b'
    work = Submission(str(folder), "near", [0], str(folder), str(folder), 1)
    with pytest.raises(InputError, match=r"data\.store: .* has a quote or a backslash"):
        job_script(work, 1, PrepareConfig(engine="slurm").slurm)


def test_without_slurm_nothing_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    run = written(run_of(tmp_path, data={"sources": [{"path": str(tmp_path / "a.txt")}]}, prepare={"engine": "slurm"}),
                  tmp_path / "run.yaml")  # fmt: skip
    (tmp_path / "bin").mkdir()
    done = refused("prepare", run, env={"PATH": str(tmp_path / "bin")})
    assert "prepare.engine: slurm: sbatch is not installed" in done.stderr
    assert not list(tmp_path.rglob("*.parts"))


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("artel.preparing.engines.ray.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"prepare\.engine: needs the package ray.*\n.*artel-lm\[cluster\]"):
        check_engine(PrepareConfig(engine="ray"))
    check_engine(PrepareConfig())


# Slurm ----------------------------------------------------------------------------------------------------------------

needs_slurm = pytest.mark.skipif(bool(cluster_slurm.MISSING), reason=f"a Slurm of its own: {cluster_slurm.MISSING}")


@pytest.fixture(scope="module")
def slurm_environment(tmp_path_factory):
    with cluster_slurm.two_nodes(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def slurm(slurm_environment, monkeypatch):
    for name, value in slurm_environment.items():
        monkeypatch.setenv(name, value)
    yield
    assert queue() == []  # whatever happened, nothing is left in it


def queue():
    done = subprocess.run(["squeue", "--noheader", "--format=%A"], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def in_thread(run):
    """(thread, what it raised): the starter waits for Slurm in it."""
    raised = []

    def work():
        try:
            prepare(run)
        except ArtelError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, raised


@pytest.mark.long
@needs_slurm
@pytest.mark.processes
def test_slurm_makes_the_same(tmp_path, texts, expected, slurm):
    """Two jobs of two processes each, on two nodes."""
    run = every_stage(texts, tmp_path, engine="slurm", workers=4, slurm={**SLURM, "cpus": 2})
    assert tree(prepare(run).folder) == expected


@pytest.mark.long
@needs_slurm
@pytest.mark.processes
def test_the_starter_is_killed_and_then_the_job_cancelled(tmp_path, slurm):

    def run(store, **prepare):
        return converted(tmp_path, SLOW_IN_JOBS, 60, store, **prepare)

    expected = tree(prepare(run("here")).folder)
    on_slurm = run("stores", engine="slurm", workers=2, slurm=SLURM)

    def finished():
        return {path.name: path.stat().st_ino for path in tmp_path.glob("stores/*.parts/text/0*")}

    command = [sys.executable, "-m", "artel", "prepare", str(written(on_slurm, tmp_path / "run.yaml"))]
    process = subprocess.Popen(command, start_new_session=True)  # with the environment as it is now: slurm's
    wait_until(lambda: len(finished()) >= 4 or process.poll() is not None)
    kill(process)
    first, before = set(queue()), finished()
    assert first  # its job goes on
    thread, raised = in_thread(on_slurm)
    wait_until(lambda: len(finished()) >= len(before) + 4 and queue() and not first & set(queue()))  # it was ended
    subprocess.run(["scancel", *queue()], check=True, timeout=LIMIT)
    thread.join(LIMIT)
    [error] = raised
    assert "tasks (text) were not done: the job" in str(error)
    assert "ended as CANCELLED" in str(error)
    assert before.items() <= finished().items()
    assert len(finished()) < 60
    assert tree(prepare(on_slurm).folder) == expected


@pytest.mark.long
@needs_slurm
@pytest.mark.processes
def test_a_process_is_killed(tmp_path, slurm):
    """As a kernel does it when memory runs out."""
    run = converted(tmp_path, KILLED_ONCE, 4, "stores", engine="slurm", workers=1, slurm=SLURM)
    with pytest.raises(
        WorkError, match=r"prepare\.workers: 1 of 4 tasks .*FAILED; a process on \S+ was killed by SIGK"
    ):
        prepare(run)
    assert prepare(run).open().train.documents == 120


@pytest.mark.long
@needs_slurm
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"partition": "nowhere", "time": "0:10:00"}, InputError, "Slurm rejected the job .*[Ii]nvalid partition"),
        ({"time": "24:00:00"}, WorkError, "cannot start: PartitionTimeLimit"),
    ],
)
def test_what_slurm_does_not_allow(tmp_path, texts, slurm, options, kind, message):
    with pytest.raises(kind, match=rf"prepare\.slurm: .*{message}"):
        prepare(every_stage(texts, tmp_path, engine="slurm", slurm={**SLURM, "options": options}))


# Ray ------------------------------------------------------------------------------------------------------------------


def apart():
    """A command that starts another in a network and with process numbers of its own: all of Ray ends with it."""
    as_root = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def why_not_apart():
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "needs unshare and ip"
    done = subprocess.run([*apart(), "ip", "link", "set", "lo", "up"], capture_output=True, text=True, timeout=30)
    return done.stderr.strip()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_ray(tmp_path, texts, expected):
    """One cluster of two nodes for all cases, since it takes long to start; see cluster_ray.py."""
    pytest.importorskip("ray")
    if why := why_not_apart():
        pytest.skip(f"Ray listens on all interfaces, and no network of its own can be made here: {why}")
    script = WORKERS / "cluster_ray.py"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*apart(), sys.executable, str(script), str(tmp_path), str(texts)], env={**os.environ, "PYTHONPATH": path},
        stdout=(tmp_path / "log").open("wb"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        process.wait(580)
    finally:
        if process.poll() is None:
            kill(process)
    assert process.returncode == 0, (tmp_path / "log").read_text()[-6000:]
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["no_cluster"].startswith("InputError prepare.engine: ray: no Ray cluster")
    assert "ray start --head" in report["no_cluster"]
    assert "RAY_ADDRESS" in report["no_cluster"]
    assert report["whole"] == expected
    assert report["workspace_left"] == []
    assert "1 of 4 tasks (text) were not done" in report["killed_task"]
    assert "was killed by SIGKILL" in report["killed_task"]
    assert report["killed_task_then"] == 120
    assert report["status"] == 0, report["second"]
    assert report["killed"] == [expected]
    assert report["parts_when_killed"] < report["parts_when_node_went"] < 200
