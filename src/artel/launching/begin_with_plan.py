"""The plan with which `artel train` begins: three lines, and a refusal of what cannot fit.

`artel plan` makes it in a process of its own, whose memory is gone before training begins. RUN/plan.json keeps it: the
search for a micro-batch starts from it, and what was measured is written beside it.
"""

from __future__ import annotations

import math
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

import artel
from artel.config import RunConfig, dump_run
from artel.config.schema.quantities import duration
from artel.errors import InputError
from artel.host import memory, swap
from artel.interpreter import python_of
from artel.launching.quiet_libraries import quiet_libraries
from artel.storage import write_file
from artel.training.budget import FEWEST_STEPS
from artel.training.run_folder import RunFolder

if TYPE_CHECKING:
    from artel.preparing import Prepared

_ERROR = 0.15
"""No plan in benchmarks/plan.md is more than 10 % too high: what exceeds the memory by less may still fit."""
_SHORT_FLOPS, _SHORT_SECONDS = 1e13, 60.0
"""A run that is over about as soon as it is planned: a minute of a laptop."""
_SECONDS = 300
"""A plan of the largest recipe takes 30 s on a busy machine; what takes longer is not waited for."""
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def begin_with_plan(
    run: RunConfig,
    prepared: Prepared,
    processes: int,
    nodes: int,
    force: bool,
    announce: Callable[[str], None],
) -> None:
    """Plan a run before it begins, with `processes` on each of `nodes`.

    A run that is over in a minute or has DeepSpeed is not planned, and a start like the one before is not planned
    again. Raises InputError where the plan exceeds the memory by more than its error, or its first steps outlast
    `train.budget`, unless `force`.
    """
    folder = RunFolder(Path(run.run))
    key = _key(run, processes, nodes)
    plan = _kept(folder.plan, key)
    if plan is None:
        folder.plan.unlink(missing_ok=True)
        if run.parallel.deepspeed is not None or _is_short(run, prepared):  # the first is not planned yet
            return
        announce("planning the run")
        plan = _plan(run, processes, nodes, announce)
        if plan is None:
            return
        write_file(folder.plan, orjson.dumps({"key": key, **plan}, option=orjson.OPT_INDENT_2))
    for line in plan["summary"]:
        announce(f"plan: {line}")
    if not force:
        _refuse(plan)
        _refuse_budget(plan, run)


def _plan(run: RunConfig, processes: int, nodes: int, announce: Callable[[str], None]) -> dict[str, Any] | None:
    """What `artel plan` says of the run on this machine; None where it cannot be planned, which is said."""
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    lines: list[str] = []
    with TemporaryDirectory() as folder:
        file, result = Path(folder, "run.yaml"), Path(folder, "plan.json")
        file.write_text(dump_run(run, secrets=True), encoding="utf-8")
        command = [*python_of("artel"), "plan", str(file), f"--nproc={processes}", f"--nodes={nodes}", "--json"]
        with (
            result.open("wb") as out,
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, errors="replace"
            ) as process,
        ):
            timer = threading.Timer(_SECONDS, process.kill)
            timer.start()
            try:
                assert process.stderr is not None
                for line in process.stderr:
                    lines.append(line.strip())
                    if line.startswith("tracing "):  # how far it is
                        announce(lines[-1])
            finally:
                was_in_time = timer.is_alive()
                timer.cancel()
                process.kill()  # interrupted: it has nothing to finish
        content = result.read_bytes()
    try:
        plan: dict[str, Any] = orjson.loads(content)
    except ValueError:
        why = f"that took more than {_SECONDS} s"
        if was_in_time:
            last = [line for line in lines if line] or [f"exit status {process.returncode}"]
            why = last[-1].removeprefix("artel: ")
        announce(f"the run is not planned: {why}")
        return None
    return plan


def _refuse(plan: dict[str, Any]) -> None:
    """Raise InputError where the plan exceeds the memory by more than its error. Swap counts as memory of a host."""
    extra = swap() / (memory().limit or memory().total) if plan["device"] == "cpu" else 0.0
    if plan["memory_share"] <= 1 + _ERROR + extra:
        return
    fix = "take a smaller model, data.block or train.micro_batch, or share it: parallel.data=fsdp; --force tries it"
    raise InputError.at("train", "; ".join(plan["summary"][:2]), fix)


def _refuse_budget(plan: dict[str, Any], run: RunConfig) -> None:
    """Raise InputError where the fewest steps of a run on a budget outlast it, however wrong the plan is."""
    shortest, budget = plan.get("shortest_budget_seconds"), run.train.budget
    if shortest is None or budget is None or shortest <= budget:
        return
    least = duration(60 * math.ceil(shortest / 60))
    what = f"{duration(budget)} is too short: {FEWEST_STEPS} steps take {least} at least; {plan['summary'][2]}"
    raise InputError.at("train.budget", what, f"write {least} or more, a smaller train.batch, or a smaller model")


def _is_short(run: RunConfig, prepared: Prepared) -> bool:
    """Whether the run is over in about a minute, by its budget or by 6 N D FLOPs (Kaplan et al. 2020)."""
    quiet_libraries()
    from artel.objectives import objective_of
    from artel.planning.outline import outline_model
    from artel.training.schedule import run_length

    if run.train.budget is not None:
        return run.train.budget < _SHORT_SECONDS
    try:
        objective = objective_of(run, prepared.tokenizer())
        parameters = sum(parameter.numel() for parameter in outline_model(run, objective.auto_class).parameters())
    except InputError:  # the model is not known here
        return False
    part = prepared.open().train
    length = run_length(run, objective.dataset(part), part)
    if not length.samples:  # less than a block: said where the store is opened
        return True
    assert length.total is not None
    return 6.0 * parameters * length.total * part.tokens / length.samples < _SHORT_FLOPS


def _key(run: RunConfig, processes: int, nodes: int) -> str:
    """A digest of what the plan depends on: the run, the machine, what was measured of it, and the programs."""
    quiet_libraries()
    import torch
    import transformers

    from artel.planning.hardware import find_hardware
    from artel.planning.rates import read_rates

    rates = read_rates(processes, torch.device("cpu"))
    programs = [artel.__version__, torch.__version__, transformers.__version__]
    content = [run.model_dump(mode="json"), processes, nodes, repr(find_hardware()), repr(rates), programs]
    return xxhash.xxh3_128_hexdigest(orjson.dumps(content, default=str, option=orjson.OPT_SORT_KEYS))


def _kept(file: Path, key: str) -> dict[str, Any] | None:
    """The plan of an earlier start that was like this one."""
    try:
        plan: dict[str, Any] = orjson.loads(file.read_bytes())
        return plan if plan["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
