"""Submits tasks to the nodes of a cluster, runs them there, and collects their results.

    KEY.parts/jobs/text-0/work.json     the submission, which each rank reads
    KEY.parts/jobs/text-0/claims/12     a link whose target is the name of the process that claimed task 12
    KEY.parts/jobs/text-0/killed/3      a message about rank 3, of which a process was killed
    KEY.parts/jobs/text-0/succeeded/3   rank 3 ended without an error
    KEY.parts/jobs/text-0/logs/7_3.log  what rank 3 printed (7: the id of Slurm's job)
    KEY.parts/jobs/text-0/slurm-job     the id of the job

Each submission has its own folder, so that old claims do not block tasks: a task is finished if its result exists. If
two processes run the same task, they write the same result, and the first one stays.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from artel.errors import ArtelError, WorkError
from artel.preparing.engines.local import exit_with_parent
from artel.preparing.tasks import Stage, Tasks
from artel.preparing.workspace import Workspace
from artel.storage import write_file
from artel.storage.unexpected_errors import worker_error
from artel.tokens.tokenizer.fast_encoder import encode_in_one_thread

FIX_SHARED_DISK = "set data.store to a folder on a disk that all nodes see under the same path"
FIX_RESUME = "then run the same command: it resumes from the finished parts"
# A folder's listing over NFS may be a minute old, so results may be seen late.
VISIBILITY_SECONDS = 60
# Seconds between checks for results. Checks take at most a tenth of the time.
_POLL_SECONDS = 2.0
_QUOTED_LINES = 12
_WORK_FILE = "work.json"


@dataclass(frozen=True)
class Submission:
    """Tasks submitted to a cluster. Each rank runs unclaimed tasks of a stage until none is left.

    A rank that starts first runs more tasks: jobs of a busy cluster start hours apart, and nodes differ in speed.
    """

    workspace: str
    stage: Stage
    task_indices: list[int]
    """Tasks that were unfinished at submission."""
    folder: str
    """The folder of this submission."""
    cwd: str
    """The working folder of the submitting process, for relative paths in the run file."""
    processes_per_rank: int = 1

    def write(self) -> None:
        """Write the submission into its folder, for the ranks."""
        write_file(Path(self.folder, _WORK_FILE), orjson.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Submission:
        """Read a submission. Raise WorkError on a node that does not see the folder."""
        try:
            return cls(**orjson.loads((folder / _WORK_FILE).read_bytes()))
        except FileNotFoundError:
            raise _invisible_path_error(folder) from None

    def run(self, rank: int, num_ranks: int) -> None:
        """Run the tasks of a rank, 0 to `num_ranks` - 1. Errors of tasks go to the workspace.

        Raise WorkError if this node does not see the workspace, or a process fails.
        """
        # Checking the folder is not enough: if the disk is not shared, the folder is created for the logs.
        if not Path(self.workspace, "plan.json").is_file():
            raise _invisible_path_error(Path(self.workspace))
        workspace = Workspace.load(Path(self.workspace))
        try:
            os.chdir(self.cwd)
        except OSError as error:
            what = f"the node {socket.gethostname()} cannot change to the folder {self.cwd}: {error.strerror}"
            workspace.write_error(f"{self.stage}-rank-{rank}", WorkError.at("prepare.engine", what, FIX_SHARED_DISK))
            return
        encode_in_one_thread()  # other processes use the other cores
        threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
        # Fork even for one process, so that this process sees how it ended.
        context = multiprocessing.get_context("fork")
        processes = []
        num_processes = self.processes_per_rank
        for index in range(num_processes):
            first = len(self.task_indices) * (rank * num_processes + index) // (num_ranks * num_processes)
            arguments = (workspace, f"{rank}.{index}", first, os.getpid())
            processes.append(context.Process(target=self._run_tasks, args=arguments))
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes = [process.exitcode or 0 for process in processes]
        if signals := [signal.Signals(-code).name for code in codes if code < 0]:
            what = f"a process on {socket.gethostname()} was killed by {signals[0]}"
            write_file(Path(self.folder, "killed", str(rank)), what)
            raise WorkError.at("prepare.workers", what)
        if any(codes):
            raise WorkError.at("prepare.workers", "a process failed; see its log")
        write_file(Path(self.folder, "succeeded", str(rank)), "")

    def _run_tasks(self, workspace: Workspace, name: str, first: int, parent_pid: int) -> None:
        threading.Thread(target=exit_with_parent, args=(parent_pid,), daemon=True).start()
        tasks = Tasks(workspace)
        for task_index in self._claim_tasks(name, first):
            try:
                workspace.raise_errors()
            except ArtelError:
                return  # another process failed
            print(f"{self.stage} {task_index}", flush=True)
            try:
                tasks.run(self.stage, task_index)
            except ArtelError as error:
                print(f"artel: {error.one_line}", file=sys.stderr, flush=True)
                workspace.write_error(f"{self.stage}-{task_index}", error)
                return
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                task_error = worker_error(error, f"stage {self.stage}, part {task_index}")
                workspace.write_error(f"{self.stage}-{task_index}", task_error)
                os._exit(1)

    def _claim_tasks(self, name: str, first: int) -> Iterator[int]:
        """Yield tasks claimed for a process, from `first` on. Tasks that it claimed before a requeue come first."""
        claims = Path(self.folder, "claims")
        yield from [int(claim.name) for claim in claims.iterdir() if str(claim.readlink()) == name]
        unclaimed = deque(self.task_indices[first:] + self.task_indices[:first])
        while unclaimed:
            claimed = {claim.name for claim in claims.iterdir()}
            unclaimed = deque(task_index for task_index in unclaimed if str(task_index) not in claimed)
            if unclaimed:
                task_index = unclaimed.popleft()
                try:
                    (claims / str(task_index)).symlink_to(name)  # atomic, also over a network; fails if it exists
                except FileExistsError:
                    continue
                yield task_index


def create_submission(tasks: Tasks, stage: Stage, processes_per_rank: int = 1) -> Submission:
    """Return the unfinished tasks of a stage as a submission, written into its own folder."""
    jobs = tasks.workspace.path.resolve() / "jobs"
    submission_index = len(list(jobs.glob(f"{stage}-*")))
    folder = jobs / f"{stage}-{submission_index}"
    for name in ("claims", "logs", "succeeded"):
        (folder / name).mkdir(parents=True)
    path = str(tasks.workspace.path.resolve())
    submission = Submission(path, stage, tasks.unfinished(stage), str(folder), str(Path.cwd()), processes_per_rank)
    submission.write()
    return submission


def rank_command(submission: Submission, python: str = sys.executable) -> list[str]:
    """Return the command of a rank, without its rank and the number of ranks (see `main`)."""
    return [python, "-P", "-m", "artel.preparing.engines.cluster", submission.folder]


def wait_for_results(tasks: Tasks, submission: Submission, progress: Callable[[int, int], None]) -> int:
    """Report progress, wait a few seconds, and return the number of missing results. Raise the errors of tasks."""
    start = time.monotonic()
    num_missing = len(set(submission.task_indices).intersection(tasks.unfinished(submission.stage)))
    progress(len(submission.task_indices) - num_missing, len(submission.task_indices))
    tasks.workspace.raise_errors()
    if num_missing:
        time.sleep(max(_POLL_SECONDS, 9 * (time.monotonic() - start)))
    return num_missing


def lost_tasks_error(submission: Submission, num_missing: int, reason: str, fix: str) -> WorkError:
    """Build the error for tasks that have neither a result nor an error. It quotes the log of a failed rank."""
    what = f"{num_missing:,} of {len(submission.task_indices):,} tasks ({submission.stage}) were not done: {reason}"
    if kill_notes := [file.read_text() for file in sorted(Path(submission.folder).glob("killed/*"))]:
        memory = "if memory ran out, raise prepare.slurm.memory, or start Ray with fewer CPUs on a node"
        return WorkError.at("prepare.workers", f"{what}; {kill_notes[0]}", f"{memory}; {FIX_RESUME}")
    log = _find_failed_log(Path(submission.folder))
    if log is None:
        what = f"{what} and left no log: do the nodes see that folder?"
        return WorkError.at(submission.folder, what, f"{FIX_SHARED_DISK}; {FIX_RESUME}")
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return WorkError.at(str(log), f"{what}. It ends with", f"{fix}; {FIX_RESUME}", tuple(lines[-_QUOTED_LINES:]))


def _find_failed_log(folder: Path) -> Path | None:
    """Return the newest log of a failed rank, or None."""
    succeeded = {file.name for file in folder.glob("succeeded/*")}
    failed = [log for log in folder.glob("logs/*_*.log") if log.stem.rpartition("_")[2] not in succeeded]
    return max((log for log in failed if log.stat().st_size), key=lambda log: log.stat().st_mtime, default=None)


def _invisible_path_error(path: Path) -> WorkError:
    return WorkError.at("data.store", f"the node {socket.gethostname()} does not see {path}", FIX_SHARED_DISK)


def main() -> int:
    """Run a rank: python -m artel.preparing.engines.cluster FOLDER RANK RANKS. Return the exit status."""
    folder, rank, num_ranks = sys.argv[1:]
    try:
        Submission.read(Path(folder)).run(int(rank), int(num_ranks))
    except ArtelError as error:
        print(f"artel: {error.one_line}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
