"""Damaged inputs, seeded: run files, token stores, checkpoints, tokenizers, model folders.

    python benchmarks/fuzz.py [--cases 10000] [--seed 0] [--out FILE] [--case NUMBER]

Each case changes a whole input (mutations.py) and gives it to the code that a run reads it with, in a forked
process with 10 seconds and 1 GiB of memory more than it began with. What may come out is a right result, or an error
for people: an ArtelError that says something and is no traceback. Anything else (another exception, a hang, the end of
the process, memory) is a fault: it is printed, its input is kept beside FILE (or in fuzz-faults/), and the exit status
is 1. `--case` runs one of them again, here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

from damaged_inputs import Files, Target, targets

from artel.errors import ArtelError

SECONDS = 10.0
MEMORY = 1 << 30
# After so many cases a worker is forked anew, so that what one leaves behind does not reach far.
_CASES_A_WORKER = 250
_LONGEST_PROBLEM = 3000


@dataclass
class Told:
    """What came out of all cases."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By target and outcome: right, refused, fault."""
    faults: list[dict[str, Any]] = field(default_factory=list)


def case_of(made: dict[str, Target], seed: int, number: int) -> tuple[str, Files, Files]:
    """(its target, a whole input, what it is changed to): a function of seed and number."""
    chance = Random(f"{seed}:{number}")
    (name,) = chance.choices(list(made), [target.share for target in made.values()])
    whole = chance.choice(made[name].wholes)
    return name, whole, made[name].change(whole, chance)


def run_case(made: dict[str, Target], seed: int, number: int, folder: Path) -> tuple[str, str, str]:
    """(target, outcome, what is to be said of it)."""
    name, whole, files = case_of(made, seed, number)
    shutil.rmtree(folder, ignore_errors=True)
    write_files(files, folder)
    try:
        made[name].read(folder, files, whole)
    except ArtelError as error:
        return name, *_judged(error)
    except BaseException:  # a panic of Rust is no Exception
        return name, "fault", traceback.format_exc()
    return name, "right", ""


def write_files(files: Files, folder: Path) -> None:
    for file, data in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)


def _judged(error: ArtelError) -> tuple[str, str]:
    """Whether an error is one for people."""
    text = str(error)
    for problem in error.problems:
        if not problem.what.strip():
            return "fault", f"an error that says nothing: {text!r}"
    if not error.problems or "Traceback (most recent" in text:
        return "fault", f"no message for people: {text!r}"
    longest = max(len(str(problem)) for problem in error.problems)
    try:
        text.encode()
    except UnicodeEncodeError:
        return "fault", f"cannot be printed: {text!r}"
    return ("refused", text) if longest <= _LONGEST_PROBLEM else ("fault", f"a message of {longest:,} letters")


def run_cases(made: dict[str, Target], numbers: list[int], seed: int, workers: int, keep: Path) -> Told:
    """Run cases in forked workers; inputs of those that are faults are kept in `keep`."""
    told = Told()
    chunks = [numbers[at : at + _CASES_A_WORKER] for at in range(0, len(numbers), _CASES_A_WORKER)]
    slow: set[int] = set()
    running: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="artel-fuzz-") as folder:
        while chunks or running:
            while chunks and len(running) < workers:
                running.append(_Worker(made, chunks.pop(), seed, Path(folder)))
            wait([worker.connection for worker in running], 0.2)
            for worker in list(running):
                for name, outcome, text, number in worker.answers():
                    _tell(told, made, seed, number, name, outcome, text, keep)
                why = worker.why_stopped()
                if why is None:
                    continue
                running.remove(worker)
                left = worker.left
                if why and why == _TOO_LONG and left[0] not in slow:  # once more: the machine may have been busy
                    slow.add(left[0])
                elif why:
                    name, _, _ = case_of(made, seed, left[0])
                    _tell(told, made, seed, left.pop(0), name, "fault", why, keep)
                if left:
                    chunks.append(left)
    return told


def _tell(told: Told, made: dict[str, Target], seed: int, number: int, name: str, outcome: str, text: str,
          keep: Path) -> None:  # fmt: skip
    told.counts[name, outcome] += 1
    if outcome == "fault":
        told.faults.append({"case": number, "seed": seed, "target": name, "what": text})
        write_files(case_of(made, seed, number)[2], keep / f"{seed}-{number}")
        print(f"case {number} ({name}): {text.strip()[-1500:]}\n", flush=True)


_TOO_LONG = f"took over {SECONDS:g} seconds"


class _Worker:
    """A forked process that runs cases one after another."""

    def __init__(self, made: dict[str, Target], numbers: list[int], seed: int, folder: Path) -> None:
        self.left = list(numbers)
        """Those that are not done yet."""
        self._since, self._has_ended = time.monotonic(), False
        self.connection, theirs = get_context("fork").Pipe(duplex=False)
        self._process = get_context("fork").Process(target=_work, args=(theirs, made, list(numbers), seed, folder))
        self._process.start()
        theirs.close()

    def answers(self) -> Iterator[tuple[str, str, str, int]]:
        """What has come since it was asked last."""
        try:
            while self.connection.poll():
                name, outcome, text = self.connection.recv()
                self._since = time.monotonic()
                yield name, outcome, text, self.left.pop(0)
        except EOFError:
            self._has_ended = True

    def why_stopped(self) -> str | None:
        """None while it runs; an empty text when it has done all, else what was wrong with the first one left."""
        if self.left and time.monotonic() - self._since > SECONDS:
            self._process.kill()
            self._process.join()
            return _TOO_LONG
        if not self._has_ended:
            return None
        self._process.join()
        status = self._process.exitcode or 0
        return f"the process ended: {signal.Signals(-status).name if status < 0 else status}" if self.left else ""


def _work(connection: Connection, made: dict[str, Target], numbers: list[int], seed: int, folder: Path) -> None:
    place = folder / str(os.getpid())
    place.mkdir()
    os.chdir(place)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    for number in numbers:
        connection.send(run_case(made, seed, number, place / "case"))
    shutil.rmtree(place, ignore_errors=True)
    os._exit(0)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, help="JSON: counts by kind of input and outcome, time, faults")
    options.add_argument("--case", type=int, help="one case alone, in this process")
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="artel-fuzz-made-"))
    try:
        made = targets(folder)
        if given.case is not None:
            name, outcome, text = run_case(made, given.seed, given.case, folder / "case")
            print(f"{name}: {outcome}\n{text}")
            return int(outcome == "fault")
        keep = given.out.with_suffix(".faults") if given.out else Path("fuzz-faults")
        start = time.monotonic()
        workers = len(os.sched_getaffinity(0))
        told = run_cases(made, list(range(given.cases)), given.seed, workers, keep)
        seconds = time.monotonic() - start
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counts = {name: {outcome: told.counts[name, outcome] for outcome in ("right", "refused", "fault")} for name in made}
    for name, of in counts.items():
        print(f"{name:12} {of['right']:6,} right, {of['refused']:6,} refused, {of['fault']:4,} faults")
    rate = given.cases / seconds / workers
    print(f"{given.cases:,} cases, seed {given.seed}: {seconds:.0f} s, {rate:.0f} a second and core")
    if given.out:
        result = {"cases": given.cases, "seed": given.seed, "seconds": seconds, "workers": workers, "counts": counts}
        given.out.write_text(json.dumps({**result, "faults": told.faults}, indent=1, ensure_ascii=False))
    return int(bool(told.faults))


if __name__ == "__main__":
    sys.exit(main())
