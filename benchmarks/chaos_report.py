"""The tables of benchmarks/chaos.md: what was done to runs, what they did, and what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from run_on_disk import PHASES, PHASES_WITH_ROUNDS

FROM_BEGINNING, FROM_LATEST, FROM_NEWER, FROM_OLDER, NOT_SO_FAR = (
    "from the beginning", "from `latest`", "from a newer one", "from an older one", "killed before that"
)  # fmt: skip
TAKEN = (FROM_BEGINNING, FROM_LATEST, FROM_NEWER, FROM_OLDER, NOT_SO_FAR)
LOST_PEERS = 75
"""The status of a rank that has nothing wrong but the loss of its peers (artel/launching/worker.py)."""


@dataclass
class Undisturbed:
    """What a run of a layout leaves and how long it takes when nobody kills it."""

    outcome: dict[str, Any]
    seconds: float
    opening: float
    """Seconds until its first figures are there."""
    lasting: dict[str, float]
    """Seconds that each phase lasts at a time, the median."""

    def seen_in(self, seconds: float) -> None:
        """A whole run took so long: when that is less, the machine was busy before, and all of it was slower."""
        share = min(1.0, seconds / self.seconds)
        self.seconds, self.opening = share * self.seconds, share * self.opening
        self.lasting = {phase: share * lasting for phase, lasting in self.lasting.items()}


@dataclass
class Tally:
    """What happened to the runs of a layout."""

    undisturbed: Undisturbed
    kills: Counter[str] = field(default_factory=Counter)
    """By the phase that was observed."""
    of_one: int = 0
    """Of the kills, those of one rank alone."""
    runs: int = 0
    starts: int = 0
    taken: Counter[str] = field(default_factory=Counter)
    """What starts resumed from."""
    left: Counter[int | None] = field(default_factory=Counter)
    """Statuses of ranks that were left alone."""
    slowest_end: float = 0.0
    """Seconds from the kill of one until the rest had ended."""
    verified: int = 0
    """Checkpoints whose checksums were read."""
    equal: Counter[str] = field(default_factory=Counter)
    """Runs that ended with the same, by what was compared."""
    tidy: int = 0
    """Runs that left nothing unfinished behind."""
    faults: list[str] = field(default_factory=list)


def report(command: str, length: str, tallies: dict[str, Tally], seconds: float) -> str:
    """The page so far: chaos_page.txt with the figures of `tallies`."""
    every = list(tallies.values())
    wrong = list(dict.fromkeys(fault for tally in every for fault in tally.faults))
    torn, verified = sum("step-0" in fault for fault in wrong), sum(tally.verified for tally in every)
    same = sum(tally.equal["weights"] for tally in every)
    text = Path(__file__).with_name("chaos_page.txt").read_text(encoding="utf-8").format(
        command=command, length=length, today=date.today(), kills=sum(tally.kills.total() for tally in every),
        minutes=seconds / 60, verdict="Not all is well" if wrong else "Nothing was lost", same=same, torn=torn,
        runs=sum(tally.runs for tally in every), verified=verified, kills_table=_kills(tallies),
        starts_table=_starts(tallies), same_table=_same(tallies),
    )  # fmt: skip
    return text + "".join(f"\n- {fault}" for fault in wrong) + "\n" * bool(wrong)


def _kills(tallies: dict[str, Tally]) -> str:
    has_rounds = any("rounds" in tally.undisturbed.outcome for tally in tallies.values())
    phases = PHASES_WITH_ROUNDS if has_rounds else PHASES
    rows = [[layout, *(tally.kills[phase] for phase in phases), tally.kills.total(), tally.of_one]
            for layout, tally in tallies.items()]  # fmt: skip
    return _table(["", *phases, "all", "of one rank alone"], rows)


def _starts(tallies: dict[str, Tally]) -> str:
    rows: list[list[object]] = []
    for layout, tally in tallies.items():
        slowest = f"{tally.slowest_end:.1f} s" if tally.of_one else "-"
        lost = f"{tally.left[LOST_PEERS]} of {tally.left.total()}" if tally.left else "-"
        rows.append([layout, tally.runs, tally.starts, *(tally.taken[name] for name in TAKEN), slowest, lost])
    return _table(["", "runs", "starts", *TAKEN, "the rest had ended within", "with status 75"], rows)


def _same(tallies: dict[str, Tally]) -> str:
    compared = list(next(iter(tallies.values())).undisturbed.outcome)
    rows = [[layout, *(f"{tally.equal[name]} of {tally.runs}" for name in compared), f"{tally.tidy} of {tally.runs}"]
            for layout, tally in tallies.items()]  # fmt: skip
    return _table(["", *compared, "nothing unfinished left"], rows)


def _table(titles: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [titles, ["---"] * len(titles), *rows])
