"""Prepare, plan and train a run: the verbs of the same names, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from artel.api.process import Tell, leaves_process_unchanged, tell
from artel.api.run import Run
from artel.api.run_values import OverridesLike, RunLike, as_overrides, as_run_file
from artel.notebooks import html_table

if TYPE_CHECKING:
    from artel.planning.budget.choose import Choice
    from artel.planning.plan import Plan
    from artel.preparing import Prepared
    from artel.training.callbacks import Callback


@leaves_process_unchanged()
def prepare(run: RunLike, overrides: OverridesLike = None, *, tell: Tell = tell) -> Prepared:
    """Clean, unique, split and tokenize a run's text, unless that was done before: `artel prepare`.

    Args:
        run: the path of a run file, a recipe's name, the folder of an earlier run, the keys of a run file as a dict, or
            an `artel.RunConfig`. A source of a dict may be `{"rows": …}`: texts, dicts, a DataFrame, a Dataset.
        overrides: values for dotted keys, laid over the run's: `{"data.block": 512}`, or `["data.block=512"]`.
        tell: is called with each message for people, a line of text.

    Returns:
        The token store: its `folder`, whether this call `made` it, `ledger()` with the counts of documents (read, kept,
        dropped by reason), tokens and bytes of text, `tokenizer()`, `open()` for the tokens themselves.

    Raises InputError with all that is wrong with the run and its texts, WorkError where a disk is full or the like.
    """
    from artel.launching.prepare_run import prepare_run

    return prepare_run(as_run_file(run, tell), as_overrides(overrides, tell), tell)


@leaves_process_unchanged(with_torch=True)
def train(
    run: RunLike,
    overrides: OverridesLike = None,
    *,
    callbacks: Sequence[Callback] = (),
    nproc: int | None = None,
    restart: bool = False,
    force: bool = False,
    tell: Tell = tell,
    **settings: Any,
) -> Run:
    """Train a run, or resume it: `artel train`. A run that is complete is not trained again.

    Ctrl-C (a notebook's stop button) ends the run after its step, saved: it raises Interrupted, and the same call
    resumes. A second one, or one before the first step, raises KeyboardInterrupt at once.

    Args:
        run: the path of a run file, a recipe's name, the folder of an earlier run, the keys of a run file as a dict, or
            an `artel.RunConfig`. A source of a dict may be `{"rows": …}`: texts, dicts, a DataFrame, a Dataset.
        overrides: values for dotted keys, laid over the run's: `{"data.block": 512}`, or `["data.block=512"]`.
        callbacks: called with the state of the training after every step, in order (docs/extending.md). Those with
            `state_dict` and `load_state_dict` are saved in checkpoints. In one process only: with several, the run file
            names them.
        nproc: processes on this host, started as the command starts them. By default one, in this process; or as many
            as the numbers in `parallel` need.
        restart: start over: what an earlier start wrote into the run's folder is removed first.
        force: train although the plan says that it cannot fit.
        tell: is called with each message for people, a line of text.
        settings: keys of the section train, laid over the run's: `steps=300, learning_rate=3e-4`.

    Returns:
        The run: its metrics, ledger, samples and result.

    Raises InputError before the first step, WorkError where the work fails, Interrupted where it was stopped and saved.
    """
    from artel.launching.start_run import StartOptions, start_run

    options = StartOptions(nproc=nproc, restart=restart, force=force)
    file, changes = as_run_file(run, tell), as_overrides(overrides, tell, settings)
    start_run(file, changes, options, tell, callbacks)
    return Run(file.run(changes).run)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will need. Printed, it is what `artel plan` says."""

    plan: Plan
    """All figures: parameters, memory of each rank by kind (bytes), speed, hours, disk."""
    choice: Choice | None = None
    """Of the model, where the run has `model.auto`: the run with it, and what is expected."""

    @property
    def fits(self) -> bool:
        """Whether the run fits into the memory there is."""
        return self.plan.share <= 1

    @property
    def verdict(self) -> str:
        """fits; tight, from 90 % of the memory on; or does not fit."""
        return self.plan.verdict

    @property
    def memory_share(self) -> float:
        """The part of the memory that is used where it is scarcest; above 1 the run does not fit."""
        return self.plan.share

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values, as `artel plan --json` prints them; memory and disk in GiB."""
        return self.plan.to_json() | ({} if self.choice is None else {"choice": self.choice.to_json()})

    def __str__(self) -> str:
        from artel.planning.plan import describe

        return describe(self.plan, None if self.choice is None else self.choice.expected.beside_plan())

    def _repr_html_(self) -> str:
        from artel.planning.plan import in_brief

        verdict, memory, speed = in_brief(self.plan)
        kinds = self.plan.fullest.kinds.items()
        rows = [
            ("parameters", f"{self.plan.parameters['total']:,}"),
            ("processes", f"{self.plan.processes:,}"),
            ("memory", memory),
            *((f"memory: {kind.replace('_', ' ')}", f"{size / 2**20:,.1f} MiB") for kind, size in kinds if size),
            ("speed and time", speed),
            *((f"disk: {name}", f"{size / 2**20:,.1f} MiB") for name, size in self.plan.disk.items()),
        ]
        return html_table(rows, caption=verdict)


@leaves_process_unchanged(with_torch=True)
def plan(
    run: RunLike,
    overrides: OverridesLike = None,
    *,
    hardware: str = "",
    nodes: int = 1,
    nproc: int | None = None,
    host_memory: str | None = None,
    interconnect: str | None = None,
    price: float | None = None,
    tell: Tell = tell,
) -> RunPlan:
    """Say before a run what it will need, and whether it fits: `artel plan`. Nothing is trained or written.

    The model is built without memory, and two steps of it are traced with the code that trains.

    Args:
        run: the path of a run file, a recipe's name, the folder of an earlier run, the keys of a run file as a dict, or
            an `artel.RunConfig`.
        overrides: values for dotted keys, laid over the run's.
        hardware: accelerators of a node, as `h100-80gb:8`; by default this machine.
        nodes: machines with that hardware.
        nproc: processes on each node; by default one for each accelerator, or as the numbers in `parallel` need.
        host_memory: memory of each machine, as `1TB`.
        interconnect: rate of one accelerator to other machines, as `400Gb/s`.
        price: of one accelerator (of the machine, on a CPU) for an hour, in any currency.
        tell: is called with each message for people, a line of text.

    Raises InputError for what is wrong with the run, and for what cannot be planned.
    """
    from artel.launching.plan_run import PlanOptions, plan_run

    options = PlanOptions(hardware, nodes, nproc, host_memory, interconnect, price)
    made = plan_run(as_run_file(run, tell), as_overrides(overrides, tell), options, tell)
    return RunPlan(made.plan, made.choice)
