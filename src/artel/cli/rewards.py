"""`artel rewards`: try the rewards of a run before it starts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

import typer

from artel.cli.common import AsJson, OverrideWords, RunName, print_json, print_status
from artel.cli.streams import print_result
from artel.launching.quiet_libraries import quiet_libraries
from artel.printable import escape_line, shorten

if TYPE_CHECKING:
    from artel.inference.reward_trial import RewardTrial

_PROMPT_CHARACTERS, _ANSWER_CHARACTERS = 30, 50

app = typer.Typer(help="Try the rewards of a run before it starts.", no_args_is_help=True)


@app.callback()
def rewards() -> None:
    """Try the rewards of a run before it starts."""


@app.command("try", short_help="Score answers of the untrained model.")
def try_command(
    name: RunName,
    overrides: OverrideWords = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts; each gets policy.answers answers.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Let the model that a run starts from answer a few prompts, and print the answers with their rewards.

    The exit status is 2 if no prompt has answers with different rewards: then the model could not learn. A text that is
    not prepared yet is read only as far as needed, if the tokenizer exists.

    Example: artel rewards try run.yaml --prompts 4 policy.answers=16
    """
    print_status(f"reading {name}")
    from artel.config import Overrides
    from artel.launching.hosts import choose_process_interface
    from artel.launching.launcher_environment import check_worker
    from artel.launching.read_run import read_run

    config = read_run(name, Overrides.parse(overrides), here=False)
    quiet_libraries()
    check_worker()
    from artel.inference.reward_trial import try_rewards
    from artel.parallel import join_world
    from artel.planning import StartConditions, check_run
    from artel.training.round_summary import check_signal

    check_run(config, StartConditions(trains_here=False))
    choose_process_interface()
    with join_world(config.train.threads) as world:
        trial = try_rewards(config, prompts, world)
    if as_json:
        print_json(trial.to_json())
    else:
        print_result("\n".join(_format_table(trial)))
    print_status(trial.summary.describe())
    if trial.seconds_per_answer:
        seconds = (f"{name}: {value:.3g} s per answer" for name, value in trial.seconds_per_answer.items())
        print_status(", ".join(seconds))
    failures: dict[str, list[str]] = defaultdict(list)
    for rollout in itertools.chain.from_iterable(trial.groups):
        for name, reason in rollout.failures.items():
            failures[name].append(reason)
    for name, reasons in failures.items():
        print_status(f"{name} failed on {len(reasons)} of {trial.summary.answers} answers: {reasons[0]}")
    check_signal(trial.groups)


def _format_table(trial: RewardTrial) -> list[str]:
    """Return the lines of a table with a row per answer."""
    names = [*trial.names, *(["reward"] if len(trial.names) > 1 else [])]
    rows = [["prompt", "answer", *names]]
    for prompt, group in zip(trial.prompts, trial.groups, strict=True):
        for rollout in group:
            values = [*rollout.rewards.values(), rollout.reward][: len(names)]
            rows.append(
                [
                    shorten(escape_line(prompt), _PROMPT_CHARACTERS) if rollout is group[0] else "",
                    shorten(escape_line(rollout.text), _ANSWER_CHARACTERS),
                    *("-" if value is None else f"{value:.4g}" for value in values),
                ]
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([*map(str.ljust, row[:2], widths[:2]), *map(str.rjust, row[2:], widths[2:])]).rstrip() for row in rows
    ]
