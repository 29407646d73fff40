"""What happens on a node of a cluster, and what the starter of its jobs needs to know of them.

    KEY.parts/jobs/text-0/claims/12    a link to the name of the process that took task 12
    KEY.parts/jobs/text-0/killed/3     what is to be said of rank 3, of which a process was killed
    KEY.parts/jobs/text-0/completions  ranks that ended well          }
    KEY.parts/jobs/text-0/logs         what each rank told            } datatrove's
    KEY.parts/jobs/text-0/slurm_logs   and all that its job printed   }
    KEY.parts/jobs/text-0/slurm-job    the job's number

Each submission has a folder of its own, so that nothing an earlier one noted hides work: what is done is told by the
tasks' results alone. Two who do the same task write the same, and the first one's result stays.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.utils.logging import logger  # type: ignore[import-untyped]

from artel.errors import ArtelError, WorkError
from artel.preparing.engines.local import end_with
from artel.preparing.tasks import Stage, Tasks
from artel.preparing.workspace import Workspace
from artel.storage import write_file
from artel.storage.unexpected_errors import worker_error
from artel.tokens.tokenizer.fast_encoder import encode_in_one_thread

SHARED = "set data.store to a folder on a disk that all nodes see under the same path"
GO_ON = "then run the same command: it goes on from the finished parts"
# A folder's listing over NFS may be a minute old: so long a result may be there and not be seen.
UNSEEN_SECONDS = 60
# The results are looked for every two seconds; where looking takes long, for there are many, a tenth of the time.
_POLL_SECONDS = 2.0
_QUOTED_LINES = 12


@dataclass(frozen=True)
class Work:
    """A step of datatrove's pipelines: each rank does tasks of a stage that nobody took before, until none is left.

    Whoever starts first takes more: jobs of a busy cluster start hours apart, and nodes are not equally fast.
    """

    workspace: str
    stage: Stage
    numbers: list[int]
    """Of the tasks that were left when the job was submitted."""
    folder: str
    """Of this submission."""
    directory: str
    """Where the starter stood: from there the run file's paths lead."""
    processes: int = 1
    """Of each rank."""

    def __call__(self, _data: Any, rank: int, ranks: int) -> None:
        # Its folder alone proves nothing: where it is not seen, it is made for the logs.
        if not Path(self.workspace, "plan.json").is_file():
            node = socket.gethostname()
            raise WorkError.at("data.store", f"the node {node} does not see {self.workspace}", SHARED)
        workspace = Workspace.at(Path(self.workspace))
        try:
            os.chdir(self.directory)
        except OSError as error:
            what = f"the node {socket.gethostname()} cannot go to {self.directory}: {error.strerror}"
            workspace.note_error(f"{self.stage}-rank-{rank}", WorkError.at("prepare.engine", what, SHARED))
            return
        encode_in_one_thread()  # each process is one of several
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
        # Forked even where there is but one: a pool of datatrove's waits for ever for a process that was killed.
        context = multiprocessing.get_context("fork")
        names = [f"{rank}.{number}" for number in range(self.processes)]
        first = [len(self.numbers) * (rank * self.processes + place) // (ranks * self.processes)
                 for place in range(self.processes)]  # fmt: skip
        processes = [context.Process(target=self._do_tasks, args=(workspace, *each, os.getpid()))
                     for each in zip(names, first, strict=True)]  # fmt: skip
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes = [process.exitcode or 0 for process in processes]
        if killed := [signal.Signals(-code).name for code in codes if code < 0]:
            what = f"a process on {socket.gethostname()} was ended by {killed[0]}"
            write_file(Path(self.folder, "killed", str(rank)), what)
            raise WorkError.at("prepare.workers", what)
        if any(codes):
            raise WorkError.at("prepare.workers", "a process failed; its log tells why")

    def _do_tasks(self, workspace: Workspace, name: str, first: int, starter: int) -> None:
        threading.Thread(target=end_with, args=(starter,), daemon=True).start()
        tasks = Tasks(workspace)
        for number in self._taken(name, first):
            try:
                workspace.raise_errors()
            except ArtelError:
                return  # another found that the whole is in vain
            logger.info(f"{self.stage} {number}")
            try:
                tasks.do(self.stage, number)
            except ArtelError as error:
                logger.error(error.in_a_line)
                workspace.note_error(f"{self.stage}-{number}", error)
                return
            except Exception as error:
                logger.exception(error)  # the log of this task is where one looks for it
                workspace.note_error(
                    f"{self.stage}-{number}", worker_error(error, f"stage {self.stage}, part {number}")
                )
                os._exit(1)

    def _taken(self, name: str, first: int) -> Iterator[int]:
        """Tasks taken for a process, one at a time, from the `first` on; before them what it took before a requeue."""
        claims = Path(self.folder, "claims")
        yield from [int(claim.name) for claim in claims.iterdir() if str(claim.readlink()) == name]
        left = deque(self.numbers[first:] + self.numbers[:first])
        while left:
            claimed = {claim.name for claim in claims.iterdir()}
            left = deque(number for number in left if str(number) not in claimed)
            if left:
                number = left.popleft()
                try:
                    (claims / str(number)).symlink_to(name)  # fails where it is there: one call, also over a network
                except FileExistsError:
                    continue
                yield number


def new_work(tasks: Tasks, stage: Stage, processes: int = 1) -> Work:
    """What is left of a stage, for a submission of its own."""
    jobs = tasks.workspace.path.resolve() / "jobs"
    number = len(list(jobs.glob(f"{stage}-*")))
    folder = jobs / f"{stage}-{number}"
    (folder / "claims").mkdir(parents=True)
    path = str(tasks.workspace.path.resolve())
    return Work(path, stage, tasks.left(stage), str(folder), str(Path.cwd()), processes)


class Watch:
    """Looks for results and errors of a submission, tells how far it is, and waits between the looks."""

    def __init__(self, tasks: Tasks, work: Work, progress: Callable[[int, int], None]) -> None:
        self._tasks, self._work, self._progress = tasks, work, progress

    def missing(self) -> int:
        """How many results are not there yet, after a while. Raises what tasks raised."""
        began = time.monotonic()
        missing = len(set(self._work.numbers).intersection(self._tasks.left(self._work.stage)))
        self._progress(len(self._work.numbers) - missing, len(self._work.numbers))
        self._tasks.workspace.raise_errors()
        if missing:
            time.sleep(max(_POLL_SECONDS, 9 * (time.monotonic() - began)))
        return missing


def lost(work: Work, missing: int, ended: str, fix: str) -> WorkError:
    """The error for tasks that nobody did and nobody complained of; it quotes the log of one who failed."""
    what = f"{missing:,} of {len(work.numbers):,} tasks ({work.stage}) were not done: {ended}"
    if killed := [file.read_text() for file in sorted(Path(work.folder).glob("killed/*"))]:
        memory = "if memory ran out, raise prepare.slurm.memory, or start Ray with fewer CPUs on a node"
        return WorkError.at("prepare.workers", f"{what}; {killed[0]}", f"{memory}; {GO_ON}")
    log = _log_of_a_failure(Path(work.folder))
    if log is None:
        what = f"{what} and left no log: do the nodes see that folder?"
        return WorkError.at(work.folder, what, f"{SHARED}; {GO_ON}")
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return WorkError.at(str(log), f"{what}. It ends with", f"{fix}; {GO_ON}", tuple(lines[-_QUOTED_LINES:]))


def _log_of_a_failure(folder: Path) -> Path | None:
    """The newest log of those whose rank did not end well; Slurm's log of a rank has all that datatrove's has."""
    well = {int(file.name) for file in folder.glob("completions/*")}
    logs = [*folder.glob("slurm_logs/*_*.out")] or [*folder.glob("logs/task_*.log")]
    failed = [log for log in logs if int(log.stem.rpartition("_")[2]) not in well and log.stat().st_size]
    return max(failed, key=lambda log: log.stat().st_mtime, default=None)
