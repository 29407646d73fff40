"""Cases chosen, and judged one after another or side by side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hostile.case import Case
from hostile.families import FAMILIES, all_cases
from hostile.runner import Runner, Verdict


def short_form(seed: int, of_each: int = 3) -> list[Case]:
    """So many quick cases of each family, chosen by the seed."""
    chance = random.Random(seed)
    chosen: list[Case] = []
    for family in FAMILIES:
        quick = [case for case in all_cases() if case.family == family and case.quick]
        chosen += chance.sample(quick, min(of_each, len(quick)))
    return chosen


def judge_all(
    cases: Sequence[Case], jobs: int, *, patience: float = 30.0, seconds: float = 90.0, keep: bool = False
) -> list[Verdict]:
    """The verdicts, in the order of the cases; those that are not right are printed as they come."""
    runner = Runner(patience=patience, seconds=seconds, keep=keep)
    try:

        def judge(case: Case) -> Verdict:
            verdict = runner.judge(case)
            print(f"{case.name}: {verdict.text} ({verdict.seconds:.1f} s)", flush=True)
            for kind, what in verdict.faults:
                print(f"    {kind}: {what}\n    after: artel {' ; '.join(verdict.commands)}", flush=True)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(judge, cases))
    finally:
        runner.close()
