"""Cases chosen, and judged one after another or side by side."""

from __future__ import annotations

import math
import random
import time
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
    cases: Sequence[Case],
    jobs: int,
    *,
    patience: float = 30.0,
    seconds: float = 90.0,
    keep: bool = False,
    minutes: float = math.inf,
    seed: int = 0,
) -> list[Verdict]:
    """The verdicts, in the order of the cases; those that are not right are printed as they come.

    With `minutes` the cases come by chance, and none begins after these.
    """
    end = time.monotonic() + 60 * minutes
    turns = list(cases) if math.isinf(minutes) else random.Random(seed).sample(list(cases), len(cases))
    runner = Runner(patience=patience, seconds=seconds, keep=keep)
    try:

        def judge(case: Case) -> Verdict | None:
            if time.monotonic() > end:
                return None
            verdict = runner.judge(case)
            print(f"{case.name}: {verdict.text} ({verdict.seconds:.1f} s)", flush=True)
            for kind, what in verdict.faults:
                print(f"    {kind}: {what}\n    after: artel {' ; '.join(verdict.commands)}", flush=True)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            verdicts = {verdict.case: verdict for verdict in pool.map(judge, turns) if verdict is not None}
            return [verdicts[case.name] for case in cases if case.name in verdicts]
    finally:
        runner.close()
