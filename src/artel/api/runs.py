"""Prepare, plan and train a run in this process, like the commands of the same names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from artel.api.process import leaves_process_unchanged
from artel.api.run import Run
from artel.api.run_values import OverridesLike, RunLike, as_overrides, as_run_file
from artel.notebooks import html_table

if TYPE_CHECKING:
    from artel.planning.budget.choose import ModelChoice
    from artel.planning.plan import Plan
    from artel.preparing import PreparedText
    from artel.training.callbacks import Callback


@leaves_process_unchanged(prints=True)
def prepare(run: RunLike, overrides: OverridesLike = None) -> PreparedText:
    """Clean, deduplicate, split and tokenize the text of a run, unless that was done before: `artel prepare`.

    Args:
        run: the path of a run file, a recipe's name, the folder of an earlier run, the keys of a run file as a dict, or
            an `artel.RunConfig`. A source of a dict may be `{"rows": …}`: texts, dicts, a DataFrame, a Dataset.
        overrides: values for dotted keys, which replace the run's: `{"data.block": 512}`, or `["data.block=512"]`.

    Returns:
        The token store: its `folder`; `made`, True if this call made it; `ledger()` with the counts of documents (read,
        kept, dropped by reason), tokens and bytes of text; `tokenizer()`; `open()` for the tokens themselves.

    Raise InputError with every problem of the run and its texts, WorkError if the machine fails (a full disk).
    """
    from artel.launching.prepare_run import prepare_run

    return prepare_run(as_run_file(run), as_overrides(overrides))


@leaves_process_unchanged(with_torch=True, prints=True)
def train(
    run: RunLike,
    overrides: OverridesLike = None,
    *,
    callbacks: Sequence[Callback] = (),
    nproc: int | None = None,
    restart: bool = False,
    force: bool = False,
    **settings: Any,
) -> Run:
    """Train or resume a run: `artel train`. A complete run is not trained again.

    Ctrl-C (a notebook's stop button) finishes the current step, saves and raises Interrupted. The same call resumes. A
    second Ctrl-C, or a Ctrl-C before the first step, raises KeyboardInterrupt at once.

    Args:
        run: the path of a run file, a recipe's name, the folder of an earlier run, the keys of a run file as a dict, or
            an `artel.RunConfig`. A source of a dict may be `{"rows": …}`: texts, dicts, a DataFrame, a Dataset.
        overrides: values for dotted keys, which replace the run's: `{"data.block": 512}`, or `["data.block=512"]`.
        callbacks: called in order after every step with the state of the training (docs/extending.md). Those with
            `state_dict` and `load_state_dict` are saved in checkpoints. Only for a single process; with several,
            name them in the run file.
        nproc: number of processes to start on this host. By default one, namely this process, or as many as the
            numbers in `parallel` need.
        restart: start over, and first remove everything that earlier starts wrote into the run's folder.
        force: train even if the plan says that the run does not fit into memory.
        settings: keys of the section train, which replace the run's: `steps=300, learning_rate=3e-4`.

    Returns:
        The run: its metrics, ledger, samples and result.

    Raise InputError before the first step, WorkError if training fails, Interrupted if it was stopped and saved.
    """
    from artel.launching.start_run import StartOptions, start_run

    options = StartOptions(nproc=nproc, restart=restart, force=force)
    file = as_run_file(run)
    changes = as_overrides(overrides, settings=settings)
    start_run(file, changes, options, callbacks)
    return Run(file.run(changes).run)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Resources that a run needs. Prints like `artel plan`."""

    plan: Plan
    """All numbers: parameters, memory of each rank by kind (bytes), speed, hours, disk."""
    choice: ModelChoice | None = None
    """With `model.auto`: the run with the chosen model, and the metrics expected of it."""

    @property
    def fits(self) -> bool:
        """True if the run fits into memory."""
        return self.plan.memory_fraction <= 1

    @property
    def verdict(self) -> str:
        """`fits`, `tight` (from 90 % of the memory) or `does not fit`."""
        return self.plan.verdict

    @property
    def memory_share(self) -> float:
        """Fraction of the memory used by the fullest rank. Above 1, the run does not fit."""
        return self.plan.memory_fraction

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as printed by `artel plan --json`. Memory and disk in GiB."""
        return self.plan.to_json() | ({} if self.choice is None else {"choice": self.choice.to_json()})

    def __str__(self) -> str:
        from artel.planning.plan import describe

        return describe(self.plan, None if self.choice is None else self.choice.expected.speed_note())

    def _repr_html_(self) -> str:
        from artel.planning.plan import describe_briefly

        verdict, memory, speed = describe_briefly(self.plan)
        memory_by_category = self.plan.fullest.by_kind.items()
        rows = [
            ("parameters", f"{self.plan.parameters['total']:,}"),
            ("processes", f"{self.plan.processes:,}"),
            ("memory", memory),
            *(
                (f"memory: {category.replace('_', ' ')}", f"{size / 2**20:,.1f} MiB")
                for category, size in memory_by_category
                if size
            ),
            ("speed and time", speed),
            *((f"disk: {name}", f"{size / 2**20:,.1f} MiB") for name, size in self.plan.disk.items()),
        ]
        return html_table(rows, caption=verdict)


@leaves_process_unchanged(with_torch=True, prints=True)
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
) -> RunPlan:
    """Estimate memory, speed and disk of a run before it starts: `artel plan`. Trains and writes nothing.

    Builds the model without allocating memory and traces two of its steps with the real training code.

    Args:
        run: the path of a run file, a recipe's name, the folder of an earlier run, the keys of a run file as a dict, or
            an `artel.RunConfig`.
        overrides: values for dotted keys, which replace the run's.
        hardware: accelerators of a node, such as `h100-80gb:8`. Default: this machine.
        nodes: number of nodes.
        nproc: processes per node. Default: one per accelerator, or as many as the numbers in `parallel` need.
        host_memory: memory of each node, such as `1TB`.
        interconnect: bandwidth of one accelerator to other nodes, such as `400Gb/s`.
        price: price per hour of one accelerator (on a CPU, of the machine), in any currency.

    Raise InputError if the run file is wrong or the run cannot be planned.
    """
    from artel.launching.plan_run import PlanOptions, plan_run

    options = PlanOptions(hardware, nodes, nproc, host_memory, interconnect, price)
    result = plan_run(as_run_file(run), as_overrides(overrides), options)
    return RunPlan(result.plan, result.choice)
