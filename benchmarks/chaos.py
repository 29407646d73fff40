"""A run that is killed again and again ends with the same weights: writes benchmarks/chaos.md.

    python benchmarks/chaos.py [--kills 200] [--seed 0] [--layouts alone,ddp-2,fsdp-2,fsdp-4] [--out FILE]
                               [--run chaos_policy.yaml]

Each run is ended by SIGKILL two to four times and started again by the same command, until it ends by itself. Half of
the kills take all its processes; the other half one rank at random, and the rest must notice. Moments are drawn from
the seed: a third of them evenly over the time that an undisturbed run takes, the others aimed at a phase, which is
watched for on the disk. What is counted is the phase that lay on the disk when the process was dead.

After each kill all checkpoints with a final name are verified by code of this file's own, and the step that the next
start resumes from must be one of the good ones. At the end everything that a run leaves is compared with the run of
the same layout that nobody disturbed. Exits 1 when anything is wrong; the folder of such a run is kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from chaos_report import FROM_BEGINNING, FROM_LATEST, FROM_NEWER, FROM_OLDER, NOT_SO_FAR, Tally, Undisturbed, report
from forked_train import POLL, Start, import_all
from run_on_disk import (
    CHECKPOINT,
    COMMIT,
    EXPORT,
    FIRST_STEP,
    OVER,
    PHASES_WITH_ROUNDS,
    PREPARING,
    SCORING,
    Watched,
    faults,
    leftovers,
    outcome,
)
from run_on_disk import PHASES as PHASES_OF_STORES

LAYOUTS = {"alone": (1, "auto"), "ddp-2": (2, "ddp"), "fsdp-2": (2, "fsdp"), "fsdp-4": (4, "fsdp")}


def read_options() -> argparse.Namespace:
    options = argparse.ArgumentParser()
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--layouts", default=",".join(LAYOUTS))
    options.add_argument("--run", default="chaos.yaml", help="run file in this folder")
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("chaos.md"))
    return options.parse_args()


GIVEN = read_options()
RUN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(GIVEN.run).read_text(encoding="utf-8"))
STEPS, EVERY = RUN["train"]["steps"], RUN["checkpoint"]["every"]
LENGTH = f"{STEPS} steps of AdamW, a checkpoint every {EVERY} steps"
HAS_ROUNDS = RUN.get("objective") == "policy"
PHASES = PHASES_WITH_ROUNDS if HAS_ROUNDS else PHASES_OF_STORES
SECONDS = 300.0
"""A start that takes longer hangs."""
LOST_SECONDS = 5.0
"""What artel's launcher gives ranks whose peer was killed, before it ends them."""
AT_RANDOM = "at random"
SHORT = (CHECKPOINT, COMMIT, EXPORT, SCORING)
"""Phases of milliseconds: half of what is aimed at them comes as soon as they are seen."""


@dataclass(frozen=True)
class Moment:
    """When a start is killed, and what of it."""

    aim: str
    """A phase, or AT_RANDOM: evenly over the time that is left."""
    share: float
    """Of the time that is left, or of the steps that are left before a phase is watched for."""
    delay: float
    """Of the time that the phase usually lasts, waited when it has begun."""
    rank: int | None
    """This rank alone, or all processes."""


def main() -> None:
    layouts = GIVEN.layouts.split(",")
    import_all()
    gc.freeze()  # forks share what is there
    folder = Path(tempfile.mkdtemp(prefix="artel-chaos-"))
    tallies: dict[str, Tally] = {}
    began = time.monotonic()
    for number, layout in enumerate(layouts):
        kills = GIVEN.kills // len(layouts) + (number < GIVEN.kills % len(layouts))
        chance = random.Random(f"{GIVEN.seed}:{layout}")
        for tally in torment(folder / layout, layout, kills, chance, PHASES[2 * number :] + PHASES[: 2 * number]):
            tallies[layout] = tally
            GIVEN.out.write_text(report(command(), LENGTH, tallies, time.monotonic() - began))
    wrong = [fault for tally in tallies.values() for fault in tally.faults]
    if not wrong:
        shutil.rmtree(folder)
    print(json.dumps({"kills": sum(tally.kills.total() for tally in tallies.values()), "faults": wrong}))
    sys.exit(int(bool(wrong)))


def command() -> str:
    chosen = "" if GIVEN.layouts == ",".join(LAYOUTS) else f" --layouts {GIVEN.layouts}"
    chosen += "" if GIVEN.run == "chaos.yaml" else f" --run {GIVEN.run}"
    return f"python benchmarks/chaos.py --kills {GIVEN.kills} --seed {GIVEN.seed}{chosen}"


def torment(folder: Path, layout: str, kills: int, chance: random.Random, phases: tuple[str, ...]) -> Iterator[Tally]:
    """Runs of a layout, killed so often in all; the tally after each of them. Few kills take the first of `phases`."""
    folder.mkdir()
    tally = Tally(measure(folder, layout))
    moments = draw(kills, LAYOUTS[layout][0], chance, phases)
    while moments and tally.runs < 2 * kills + 5:
        # In the order of phases, so that each of them is still to come.
        now = sorted(moments[: chance.randint(2, 4)], key=place)
        unused = run_until_end(folder, layout, list(now), tally)
        # What did not come before the end of its run is tried earlier.
        moments = moments[len(now) :] + [replace(moment, share=moment.share / 2) for moment in unused]
        yield tally
    if moments:
        tally.faults.append(f"{layout}: {len(moments)} moments did not come in {tally.runs} runs")
        yield tally


def draw(kills: int, ranks: int, chance: random.Random, phases: tuple[str, ...]) -> list[Moment]:
    """So many moments, a third of them at random in time and the others shared out evenly among the phases."""
    aims = [AT_RANDOM if number % 3 == 2 else phases[(number - number // 3) % len(phases)] for number in range(kills)]
    chance.shuffle(aims)
    moments = []
    for aim in aims:
        # The last checkpoint is aimed at more often: no later one would make good what goes wrong with it.
        share = chance.choice([chance.random(), chance.random(), 0.999]) if aim != AT_RANDOM else chance.random()
        delay = chance.choice([0.0, chance.random()]) if aim in SHORT else chance.random()
        rank = chance.randrange(ranks) if ranks > 1 and chance.random() < 0.5 else None
        moments.append(Moment(aim, share, delay, rank))
    return moments


def place(moment: Moment) -> float:
    return PHASES.index(moment.aim) if moment.aim in PHASES else moment.share * len(PHASES)


def run_until_end(folder: Path, layout: str, moments: list[Moment], tally: Tally) -> list[Moment]:
    """A run from its beginning to its end, killed at the moments that come; those that did not."""
    tally.runs += 1
    name = f"run-{tally.runs:03d}"
    run, stores, file = write_run(folder, name, layout)
    wrong: list[str] = []
    while True:
        watched = Watched(run, stores, STEPS)
        moment = next((moment for moment in moments if can_come(moment, watched)), None)
        tally.starts += 1
        start = Start(file, LAYOUTS[layout][0], folder / f"{name}-{tally.starts:04d}.log")
        watched.pids = start.pids
        killed = moment is not None and comes(moment, start, watched, tally.undisturbed)
        if moment is not None and killed and kill(moment, start, watched, tally, f"{layout} {name}"):
            moments.remove(moment)
        status = start.wait(SECONDS)
        wrong += [fault for fault in faults(run) if fault not in wrong]
        wrong += what_was_taken(start, watched, tally)
        if status == 0 and not killed and not watched.good:
            tally.undisturbed.seen_in(time.monotonic() - start.began)
        if status == 0:
            break
        if not killed:
            said = start.log.read_text(errors="replace").splitlines()[-3:]
            wrong.append(f"a start that nobody killed ended with {status}: {said}")
            break
    if status == 0:
        wrong += compare(tally, outcome(run, stores))
        tally.tidy += not leftovers(run)
    tally.faults += [f"{layout} {name}: {fault}" for fault in wrong]
    if not wrong:
        for path in folder.glob(f"{name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return moments


def can_come(moment: Moment, watched: Watched) -> bool:
    """Whether the moment is still ahead of the next start of a run."""
    phase = watched.phase()
    if phase == OVER or moment.aim == PREPARING:
        return phase == moment.aim
    return moment.aim in (FIRST_STEP, EXPORT, AT_RANDOM) or watched.newest_good < STEPS


def comes(moment: Moment, start: Start, watched: Watched, usual: Undisturbed) -> bool:
    """Wait for the moment; whether it comes before the start ends by itself."""
    done = watched.newest_good
    if moment.aim == AT_RANDOM:
        left = usual.opening + (usual.seconds - usual.opening) * (1 - done / STEPS)
        return waited(start, start.began + moment.share * left)
    first = done + int(moment.share * (STEPS - done))  # the step after which the phase is watched for
    while not start.has_ended and time.monotonic() - start.began < SECONDS:
        phase = watched.phase()
        if phase == moment.aim and (moment.aim in PHASES[:2] or watched.step_logged() >= first):
            return waited(start, time.monotonic() + moment.delay * usual.lasting.get(moment.aim, 0.0))
        if (phase, moment.aim) != (CHECKPOINT, COMMIT):  # a commit may last no longer than a sleep
            time.sleep(POLL)
    return False


def waited(start: Start, until: float) -> bool:
    while time.monotonic() < until and not start.has_ended:
        time.sleep(POLL)
    return not start.has_ended


def kill(moment: Moment, start: Start, watched: Watched, tally: Tally, name: str) -> bool:
    """Kill, see which phase it was, and how the rest ended; whether it came before the result."""
    killed_at = time.monotonic()
    if moment.rank is None:
        start.kill_all()
        phase = watched.phase()
    else:
        launched = start.is_launched
        start.kill_one(moment.rank)
        phase = watched.phase()
        start.wait(LOST_SECONDS)
        tally.slowest_end = max(tally.slowest_end, time.monotonic() - killed_at)
        if launched:
            tally.left.update(status for rank, status in enumerate(start.statuses) if rank != moment.rank)
    counts = phase != OVER
    if counts:
        tally.kills[phase] += 1
        tally.of_one += moment.rank is not None
    line = {"run": name, "aim": moment.aim, "rank": moment.rank, "phase": phase, "after": watched.newest_good,
            "seconds": round(killed_at - start.began, 3), "kills": tally.kills.total()}  # fmt: skip
    print(json.dumps(line), flush=True)
    return counts


def what_was_taken(start: Start, watched: Watched, tally: Tally) -> list[str]:
    """Count what a start resumed from, as it says itself; what is wrong with it."""
    tally.verified += len(watched.good)
    told = start.log.read_text(errors="replace")
    found = re.search(r"resuming from step ([\d,]+)", told)
    if found is None and not watched.step_logged():
        tally.taken[NOT_SO_FAR] += 1
        return []
    step = int(found[1].replace(",", "")) if found is not None else 0
    if step in (0, watched.latest):
        tally.taken[FROM_LATEST if step else FROM_BEGINNING] += 1
    else:
        tally.taken[FROM_NEWER if step > (watched.latest or 0) else FROM_OLDER] += 1
    if step != watched.newest_good:
        return [f"start {tally.starts} resumed from step {step}; the whole checkpoints were {watched.good}"]
    return []


def compare(tally: Tally, found: dict[str, Any]) -> list[str]:
    expected = tally.undisturbed.outcome
    same = {name: found[name] == expected[name] for name in expected}
    tally.equal.update({name: int(equal) for name, equal in same.items()})
    return [f"{name} differ from the undisturbed run's" for name, equal in same.items() if not equal]


def measure(folder: Path, layout: str) -> Undisturbed:
    """A run that nobody kills, watched."""
    run, stores, file = write_run(folder, "undisturbed", layout)
    watched = Watched(run, stores, STEPS)
    start = Start(file, LAYOUTS[layout][0], folder / "undisturbed.log")
    watched.pids = start.pids
    changes = [(time.monotonic(), PREPARING)]
    while not start.has_ended:
        phase = watched.phase()
        if phase != changes[-1][1]:
            changes.append((time.monotonic(), phase))
        time.sleep(POLL)
    end = time.monotonic()
    if start.wait(SECONDS) != 0 or faults(run) or leftovers(run):
        sys.exit(f"the undisturbed run failed: {folder}\n{start.log.read_text()}")
    lasting: dict[str, list[float]] = {}
    for (began, phase), (ended, _) in zip(changes, [*changes[1:], (end, OVER)], strict=True):
        lasting.setdefault(phase, []).append(ended - began)
    opening = sum(lasting[PREPARING]) + sum(lasting.get(FIRST_STEP, [0.0]))
    medians = {phase: sorted(times)[len(times) // 2] for phase, times in lasting.items()}
    told = {phase: f"{seconds:.4f} s x {len(lasting[phase])}" for phase, seconds in medians.items()}
    print(json.dumps({"layout": layout, "seconds": round(end - start.began, 2), **told}), flush=True)
    return Undisturbed(outcome(run, stores), end - start.began, opening, medians)


def write_run(folder: Path, name: str, layout: str) -> tuple[Path, Path, Path]:
    """Of a new run: its folder, the folder of its token store, its file."""
    run, stores, file = folder / name, folder / f"{name}-stores", folder / f"{name}.yaml"
    tree = {**RUN, "run": str(run), "data": {**RUN["data"], "store": str(stores)},
            "parallel": {"data": LAYOUTS[layout][1]}}  # fmt: skip
    if HAS_ROUNDS:
        prompts = folder / "prompts.jsonl"
        rows = ({"prompt": f"Number {number} is", "touched": str(folder / "scoring")} for number in range(100))
        if not prompts.exists():  # the store records its time
            prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree["data"]["sources"] = [{**RUN["data"]["sources"][0], "path": str(prompts)}]
        tree["policy"] = {**RUN["policy"], "rewards": [f"{Path(__file__).with_name('chaos_rewards.py')}:vowels"]}
    file.write_text(yaml.safe_dump(tree))
    return run, stores, file


if __name__ == "__main__":
    main()
