"""Texts, tiles and tables of the report page, in the reader's language."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import yaml

from artel.messages import from_json
from artel.reports.details import Details, Matrix, is_number, list_columns, read_details
from artel.reports.page.charts import EVENT_WORDS, list_events
from artel.reports.page.language import Language
from artel.reports.page.run_file import changed_keys, config_value, format_yaml
from artel.reports.rounds import Answer, RoundView
from artel.reports.run_data import RunData, Sample
from artel.training.comparison import EXPECTED, choice_values, expected_range

Table = dict[str, Any]
"""Keys: columns, rows, numbers (indices of numeric columns), code (True for code), caption."""

_MAX_SAMPLES = 4
_MAX_REJECTED = 200
_UNIT_SECONDS = {"hours": 3600, "minutes": 60}
_ARTEL_ROWS = ("averages", "Rank of the first document that matches")
"""Tables whose row names come from artel and are translated. In other tables they come from the data."""


def make_table(
    columns: list[str], rows: list[list[str]], numbers: set[int] | None = None, *, code: bool = False
) -> Table:
    return {"columns": columns, "rows": rows, "numbers": numbers or set(), "code": code, "caption": ""}


def build_view(run: RunData, run_index: int, name: str, color: str, language: Language) -> dict[str, Any]:
    """Return the values that the templates show for one run."""
    return {
        "index": run_index,
        "name": name,
        "color": color,
        "status": run.status,
        "verdict": _describe_state(run, language),
        "about": _describe_setup(run, language),
        "tiles": list(_metric_tiles(run, language)),
        "events": [
            {"step": language.integer(event.step), "kind": language[EVENT_WORDS[event.kind]], "text": event.text}
            for event in list_events(run, language)
        ],
        "rounds": [_round_view(round_, run_index, language) for round_ in run.rounds],
        "rounds_lead": _describe_rounds(run, language),
        "samples": _sample_groups(run, run_index, language),
        "ledger": ledger_view(run, run_index, language),
        "profile": _profile_view(run, run_index, language),
        "plan": plan_table(run, language),
        "choice": choice_table(run, language),
        "faults": [{"title": hang.name, "text": hang.text} for hang in run.hangs],
        "ranks": _ranks_table(run, language),
        "config": yaml.safe_dump(run.config, allow_unicode=True, sort_keys=False) if run.config else "",
        "set_keys": _keys_table(changed_keys(run.config), language),
        "chosen": _keys_table(_translate_values(run.starts[-1].chosen if run.starts else {}, language), language),
        "commands": _repeat_commands(run),
        "environment": _environment_table(run, language),
        "starts": make_table(
            [language["step"], language["time"], language["process"], language["device"]],
            [
                [
                    language.integer(start.step),
                    start.time,
                    str(start.processes),
                    str(start.environment.get("device", "")),
                ]
                for start in run.starts
            ],
            {0, 2},
        ),
    }


# Head of the page ---------------------------------------------------------------------------------


def _describe_state(run: RunData, language: Language) -> str:
    """Return a sentence or two about the state of the run."""
    status, elapsed, left = run.status, run.elapsed_seconds, run.seconds_left
    newest = max((checkpoint.step for checkpoint in run.checkpoints), default=None)
    state = "stopped_unsaved" if status.state == "stopped" and newest is None else status.state.replace(" ", "_")
    text = language[f"verdict_{state}"].format(
        step=language.integer(status.step),
        of=language["of_steps"].format(steps=language.integer(run.steps)) if run.steps else "",
        time=language["in_time"].format(time=language.duration(elapsed)) if elapsed is not None else "",
        left=language["time_left"].format(time=language.duration(left)) if left is not None else "",
        silent=language.duration(status.silent_seconds),
        message=status.message,
        doing=language["verdict_doing"].format(doing=language.phrase(status.doing)) if status.doing else "",
        checkpoint=language["from_checkpoint"].format(step=language.integer(newest)) if newest is not None else "",
    )
    if status.silent_ranks:
        text += " " + language["silent_ranks"].format(ranks=", ".join(map(str, status.silent_ranks)))
    return text


def _describe_setup(run: RunData, language: Language) -> str:
    """Return the objective, the model and the device."""
    start = run.starts[-1] if run.starts else None
    facts = [run.objective]
    if start is not None:
        facts += [language.phrase(start.chosen.get("model", "")), str(start.environment.get("device", ""))]
        if start.processes > 1:
            facts.append(language["processes"].format(count=language.integer(start.processes)))
    return " · ".join(fact for fact in facts if fact)


def _metric_tiles(run: RunData, language: Language) -> Iterator[dict[str, str]]:
    """Yield a tile for each of the most important metrics."""
    curves, newest = run.curves, run.curves.newest
    if run.rounds and run.learns_from_rewards:
        round_ = run.rounds[0]
        deviation = f"± {language.number(round_.deviation)}"
        yield _make_tile(language["tile_reward"], language.number(round_.reward), more=deviation)
        yield _make_tile(language["tile_signal"], language.percent(round_.signal, 0))
    best = next((checkpoint.step for checkpoint in run.checkpoints if checkpoint.is_best), None)
    for name in dict.fromkeys([str(config_value(run.config, "checkpoint", "best") or "loss"), "bits_per_byte"]):
        if name not in curves.validation:
            continue
        curve = curves.validation[name]
        more = ""
        if best is not None and best in curve.step and best != curve.step[-1]:
            value = float(curve.value[np.searchsorted(curve.step, best)])
            more = language["tile_best"].format(value=language.number(value), step=language.integer(best))
        labels = {"loss": language["tile_loss_on_validation"], "bits_per_byte": language["tile_bits_per_byte"]}
        label = labels.get(name, language["tile_validation"].format(metric=language.label(name)))
        yield _make_tile(label, language.number(curve.newest), more=more)
    if "loss" in curves.training:
        yield _make_tile(language["tile_loss"], language.number(newest.get("loss")))
    if curves.line_count:
        more = language["tile_of_steps"].format(steps=language.integer(run.steps)) if run.steps else ""
        yield _make_tile(language["tile_step"], language.integer(newest.get("step", run.status.step)), more=more)
    if isinstance(newest.get("tokens"), int):
        yield _make_tile(language["tile_tokens"], language.integer(newest["tokens"]))
    if run.elapsed_seconds is not None:
        yield _make_tile(language["tile_time"], language.duration(run.elapsed_seconds))
    if run.tokens_per_second is not None:
        yield _make_tile(
            language["tile_speed"], language.integer(run.tokens_per_second), language["tile_tokens_per_second"]
        )
    if isinstance(newest.get("mfu"), int | float):
        yield _make_tile(language["tile_mfu"], language.percent(newest["mfu"]))
    peak = (run.result or {}).get("peak_memory_gib")
    if isinstance(peak, int | float):
        yield _make_tile(language["tile_peak"], language.number(peak, 3), language["tile_gib"])
    elif "memory_gib" in curves.training:
        yield _make_tile(
            language["tile_memory"], language.number(curves.training["memory_gib"].newest, 3), language["tile_gib"]
        )


def _make_tile(label: str, value: str, unit: str = "", more: str = "") -> dict[str, str]:
    return {"label": label, "figure": value, "unit": unit, "more": more}


# Rounds ------------------------------------------------------------------------------------


def _describe_rounds(run: RunData, language: Language) -> str:
    return language["rounds_lead" if run.learns_from_rewards else "rounds_lead_no_rewards"].format(
        count=language.integer(run.round_count), shown=language.integer(len(run.rounds))
    )


def _round_view(round_: RoundView, run_index: int, language: Language) -> dict[str, Any]:
    """Return a round as a table of answers that the reader can sort by any of its numbers."""
    about = language["round_about" if round_.has_reward else "round_about_no_rewards"].format(
        answers=language.integer(round_.answers),
        prompts=language.integer(round_.prompts),
        reward=language.number(round_.reward),
        deviation=language.number(round_.deviation),
        signal=language.percent(round_.signal, 0),
        tokens=language.integer(round_.mean_length),
        cut_off=language.percent(round_.cut_off, 0),
    )
    if round_.failed:
        about += " " + language["round_failed"].format(count=language.integer(round_.failed))
    if len(round_.shown) < round_.answers:
        about += " " + language["round_left_out"].format(
            count=language.integer(round_.answers - len(round_.shown)), file=f"rollouts/{round_.number:06d}.jsonl.zst"
        )
    return {
        "id": f"round-{run_index}-{round_.number}",
        "title": language["round_title"].format(number=language.integer(round_.number)),
        "about": about,
        "columns": [
            language["round_reward"],
            *round_.reward_names,
            language["tokens"],
            language["round_prompt_number"],
        ],
        "rows": [_answer_row(answer, round_, language) for answer in round_.shown],
    }


def _answer_row(answer: Answer, round_: RoundView, language: Language) -> dict[str, Any]:
    rewards = [answer.reward, *(answer.rewards.get(name) for name in round_.reward_names)]
    cells = [(value, "–" if value is None else language.number(value)) for value in rewards]
    cells += [(number, language.integer(number)) for number in (answer.tokens, answer.prompt_number)]
    notes = [language["round_cut_off"]] if answer.cut_off else []
    notes += [f"{name}: {reason}" for name, reason in answer.failures.items()]
    return {
        "cells": [{"value": "" if value is None else repr(value), "text": text} for value, text in cells],
        "prompt": answer.prompt,
        "text": answer.text,
        "notes": notes,
    }


# Samples, text, time -----------------------------------------------------------------------


def _sample_groups(run: RunData, run_index: int, language: Language) -> list[dict[str, Any]]:
    """Return samples by prompt: the first, the last, some in between, and the full list."""
    by_prompt: dict[str, list[Sample]] = {}
    for sample in run.samples:
        by_prompt.setdefault(sample.prompt, []).append(sample)
    groups = []
    for index, samples in enumerate(by_prompt.values()):
        last = len(samples) - 1
        selected = sorted({round(index * last / (_MAX_SAMPLES - 1)) for index in range(_MAX_SAMPLES)})
        rows = [{"step": language.integer(item.step), "prompt": item.prompt, "text": item.text} for item in samples]
        selected_rows = [rows[position] for position in selected]
        groups.append(
            {
                "id": f"{run_index}-{index}",
                "shown": selected_rows,
                "all": rows,
                "others": len(selected_rows) < len(rows),
            }
        )
    return groups


def ledger_view(run: RunData, run_index: int, language: Language) -> dict[str, Any] | None:
    ledger = run.ledger
    if ledger is None or not isinstance(ledger.get("sets"), dict) or not isinstance(ledger.get("documents"), dict):
        return None
    documents, sets = ledger["documents"], ledger["sets"]
    reasons = sorted(documents.get("dropped", {}), key=lambda reason: -documents["dropped"][reason])
    reason_names = [language.phrase(reason.replace("_", " ")) for reason in reasons]
    splits = [split for split in ("train", "validation") if any(split in counts for counts in sets.values())]
    rows = []
    for name, counts in [*sets.items(), ("Σ", documents | ledger.get("parts", {}))]:
        cells = [counts.get("read", 0), counts.get("kept", 0)]
        cells += [counts.get("dropped", {}).get(reason, 0) for reason in reasons]
        cells += [counts.get(split, {}).get("tokens", 0) for split in splits]
        rows.append([name, *map(language.integer, cells)])
    columns = [language["set"], language["read"], language["kept"], *reason_names]
    columns += [f"{language['tokens']}: {language[_SPLIT_WORDS[split]]}" for split in splits]
    rejected = run.rejected[:_MAX_REJECTED]
    return {
        "id": f"ledger-{run_index}",
        "verdict": language["ledger_verdict"].format(
            read=language.integer(documents.get("read", 0)),
            kept=language.integer(documents.get("kept", 0)),
            dropped=language.integer(sum(documents.get("dropped", {}).values())),
        ),
        "sets": make_table(columns, rows, set(range(1, len(columns)))),
        "notes": [language.phrase(note) for note in from_json(ledger.get("notes", []))],
        "rejected": make_table(
            [language["origin"], language["reason"], language["about_it"]],
            [[line["origin"], language.phrase(line["reason"].replace("_", " ")), line["detail"]] for line in rejected],
        ),
        "bars": {
            "id": f"ledger-{run_index}",
            "unit": language["documents"],
            "categories": list(sets),
            "texts": [],
            "series": [
                {"name": language["kept"], "values": [counts.get("kept", 0) for counts in sets.values()]},
                *(
                    {"name": name, "values": [counts.get("dropped", {}).get(reason, 0) for counts in sets.values()]}
                    for reason, name in zip(reasons, reason_names, strict=True)
                ),
            ],
        },
    }


_SPLIT_WORDS = {"train": "training", "validation": "validation"}


def _profile_view(run: RunData, run_index: int, language: Language) -> dict[str, Any] | None:
    profile = run.profile
    if profile is None or not profile.get("kinds"):
        return None
    kinds = [kind for kind in profile["kinds"] if kind["milliseconds"]]
    kinds.sort(key=lambda kind: -kind["milliseconds"])
    names = [language.phrase(kind["kind"]) for kind in kinds]
    largest = kinds[0]
    rows = [
        [name, language.number(kind["milliseconds"]), language.percent(kind["percent"] / 100)]
        for name, kind in zip(names, kinds, strict=True)
    ]
    operators = [
        [
            row["name"],
            language.phrase(row["kind"]),
            language.number(row["milliseconds"]),
            language.number(row["calls"], 3),
        ]
        for row in profile.get("operators", [])
    ]
    return {
        "id": f"profile-{run_index}",
        "verdict": language["profile_verdict"].format(
            milliseconds=language.number(profile["milliseconds"]),
            largest=names[0],
            percent=language.number(largest["percent"], 3),
            steps=profile["steps"],
            device=profile["device"],
        ),
        "kinds": make_table([language["part"], language["milliseconds"], language["share"]], rows, {1, 2}),
        "operators": make_table(
            [language["operator"], language["part"], language["milliseconds"], language["calls"]], operators, {2, 3}
        ),
        "bars": {
            "id": f"profile-{run_index}",
            "unit": language["milliseconds"],
            "categories": names,
            "texts": [language.percent(kind["percent"] / 100) for kind in kinds],
            "series": [{"name": "", "values": [kind["milliseconds"] for kind in kinds]}],
        },
    }


# Plan, ranks, environment ------------------------------------------------------------------


def plan_table(run: RunData, language: Language) -> Table | None:
    """Return planned values next to measured ones, or None if there is no plan."""
    plan = run.plan
    if plan is None:
        return None
    measured = plan.get("measured") or {}
    chosen = run.starts[-1].chosen if run.starts else {}
    elapsed = run.elapsed_seconds
    newest = run.curves.newest
    is_complete = run.status.state == "complete"
    per_rank = plan.get("per_rank_gib") or {}
    rows = [
        _plan_row("tokens_per_second", plan.get("tokens_per_second"), measured.get("tokens_per_second"), language),
        _plan_row("per_rank_gib", per_rank.get("reserved"), measured.get("per_rank_gib"), language),
        _plan_row("host_gib", plan.get("host_gib"), measured.get("host_gib"), language),
        _plan_row(
            "hours", plan.get("hours"), elapsed / 3600 if elapsed is not None and is_complete else None, language
        ),
        _plan_row("steps", plan.get("steps"), run.status.step if is_complete else None, language),
        _plan_row("tokens", plan.get("tokens"), newest.get("tokens") if is_complete else None, language),
    ]
    for name in ("micro_batch", "activation_checkpointing", "precision"):
        planned_value, used_value = map(language.phrase, (plan.get(name, ""), chosen.get(f"train.{name}", "")))
        rows.append([language[f"plan_{name}"], planned_value, used_value, ""])
    columns = ["", language["planned"], language["measured"], language["difference"]]
    return make_table(columns, [row for row in rows if row[1] or row[2]], {1, 2, 3})


def choice_table(run: RunData, language: Language) -> Table | None:
    """Return expected metrics of `model.auto` next to the metrics reached, or None if the model was not chosen."""
    expected, reached = (choice_values(run.choice or {}, group) for group in ("expected", "reached"))
    if not expected:
        return None
    expected_values: dict[str, Any] = dict(expected)
    if "bits_per_byte" in expected:
        low, high = expected_range(expected["bits_per_byte"])
        expected_values["bits_per_byte"] = {"low": low, "mid": expected["bits_per_byte"], "high": high}
    rows = [_plan_row(name, expected_values.get(name), reached.get(name), language) for name in EXPECTED]
    columns = ["", language["expected"], language["reached"], language["difference"]]
    return make_table(columns, [row for row in rows if row[1] or row[2]], {1, 2, 3})


def _plan_row(name: str, planned: Any, measured: Any, language: Language) -> list[str]:
    """Return a row of the plan. `planned` is a number, or `mid` with `low` and `high`."""

    def format_value(value: float) -> str:
        if name in _UNIT_SECONDS:
            return language.duration(value * _UNIT_SECONDS[name])
        return language.integer(value) if name in ("steps", "tokens") else language.number(value)

    middle = planned.get("mid") if isinstance(planned, dict) else planned
    text = "" if middle is None else format_value(middle)
    if isinstance(planned, dict) and middle is not None:
        values = {bound: format_value(planned[bound]) for bound in ("mid", "low", "high")}
        text = language["plan_range"].format(**values)
    if not isinstance(measured, int | float):
        return [language[f"plan_{name}"], text, "", ""]
    difference = language.difference(measured / middle - 1) if middle else ""
    return [language[f"plan_{name}"], text, format_value(measured), difference]


def _ranks_table(run: RunData, language: Language) -> Table | None:
    if len(run.ranks) < 2 and run.status.state not in ("running", "dead"):
        return None
    rows = []
    for rank in run.ranks:
        silent = run.status.state == "dead" or rank.rank in run.status.silent_ranks
        state = language["state_dead"] if silent and rank.state == "running" else language[f"state_{rank.state}"]
        last_sign = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(rank.time))
        memory = language.number(rank.memory_gib, 3)
        rows.append([str(rank.rank), rank.host, rank.device, language.integer(rank.step), memory, state, last_sign])
    columns = [language[name] for name in ("rank", "host", "device", "step", "memory_gib", "state", "last_sign")]
    return make_table(columns, rows, {0, 3, 4})


def _keys_table(values: dict[str, Any], language: Language) -> Table:
    rows = [[key, format_yaml(value)] for key, value in values.items() if value is not None]
    return make_table([language["key"], language["value"]], rows, code=True)


def _translate_values(values: dict[str, Any], language: Language) -> dict[str, Any]:
    """Translate the English phrases among the values."""
    return {key: language.phrase(value) if isinstance(value, str) else value for key, value in values.items()}


def _environment_table(run: RunData, language: Language) -> Table:
    if not run.starts:
        return make_table([], [])
    start = run.starts[-1]
    values = {**start.environment, "processes": start.processes}
    rows = [[language.phrase(name), str(value)] for name, value in values.items()]
    return make_table([language["key"], language["value"]], rows, code=True)


def _repeat_commands(run: RunData) -> str:
    """Return command lines that repeat the run in another folder."""
    folder = str(run.folder)
    start = run.starts[-1] if run.starts else None
    override = shlex.quote(f"run={folder.rstrip('/')}-again")
    processes = ""
    if start is not None and start.processes > 1:
        hosts = int(start.environment.get("hosts", 1))
        processes = f" --nproc {start.processes // hosts}" + (f" --nnodes {hosts}" if hosts > 1 else "")
    lines = [f"artel train {shlex.quote(folder)} {override}{processes}", f"artel train run.yaml {override}{processes}"]
    return "\n".join(lines)


# Details of a validation -------------------------------------------------------------------


def details_view(run: RunData, language: Language) -> dict[str, Any] | None:
    """Return the content of the section on validation details, or None if there is none."""
    details = read_details(run.validation)
    if not details:
        return None
    return {
        "step": _format_cell((run.validation or {}).get("step", ""), language),
        "tables": list(_details_tables(details, language)),
        "matrices": [_matrix_view(title, matrix, language) for title, matrix in details.matrices.items()],
    }


def _details_tables(details: Details, language: Language) -> Iterator[dict[str, Any]]:
    for title, rows in details.tables.items():
        columns = list_columns(rows)
        numbers = {index for index, name in enumerate(columns) if any(is_number(row.get(name)) for row in rows)}
        cells = [[_format_cell(row.get(name, ""), language) for name in columns] for row in rows]
        if title in _ARTEL_ROWS:
            cells = [[language.phrase(row_name), *values] for row_name, *values in cells]
        yield {
            "title": language.phrase(title),
            "table": make_table([language.label(name) for name in columns], cells, numbers),
        }


def _format_cell(value: Any, language: Language) -> str:
    if isinstance(value, float):
        return language.number(value)
    return language.integer(value) if is_number(value) else str(value)


def _matrix_view(title: str, matrix: Matrix, language: Language) -> dict[str, Any]:
    content: dict[str, Any] = {"title": language.phrase(title), "labels": matrix.labels, "rows": [], "confusions": None}
    if not matrix.is_small:
        columns = [language["true_label"], language["predicted_label"], language["count"]]
        rows = [[true, predicted, language.integer(count)] for true, predicted, count in matrix.confusions()]
        return content | {"confusions": make_table(columns, rows, {2})}
    for label, counts in zip(matrix.labels, matrix.counts, strict=True):
        row_total = max(1, sum(counts))
        cells = [{"count": language.integer(count), "share": f"{count / row_total:.3f}"} for count in counts]
        content["rows"].append({"label": label, "cells": cells})
    return content
