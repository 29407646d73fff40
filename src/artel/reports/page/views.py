"""Texts, key numbers and tables of the report page, in the reader's language."""

from __future__ import annotations

import shlex
import time
from typing import Any

import numpy as np
import yaml

from artel.messages import from_json
from artel.reports.details import Details, Matrix, columns_of, is_number, read_details
from artel.reports.page.charts import EVENT_WORDS, events
from artel.reports.page.language import Language
from artel.reports.page.run_file import in_yaml, set_keys
from artel.reports.run_data import RunData, Sample
from artel.training.comparison import EXPECTED, choice_values, expected_range

Table = dict[str, Any]
"""Keys: columns, rows, numbers (indices of numeric columns), code (True for code), caption."""

_MAX_SAMPLES = 4
_MAX_REJECTED = 200
_UNIT_SECONDS = {"hours": 3600, "minutes": 60}
_ARTEL_ROWS = ("averages", "Rank of the first document that matches")
"""Tables whose row names come from artel and are translated. In other tables they come from the data."""


def table(columns: list[str], rows: list[list[str]], numbers: set[int] | None = None, *, code: bool = False) -> Table:
    return {"columns": columns, "rows": rows, "numbers": numbers or set(), "code": code, "caption": ""}


def view(run: RunData, number: int, name: str, color: str, words: Language) -> dict[str, Any]:
    """Return everything that the templates show of one run."""
    return {
        "index": number,
        "name": name,
        "color": color,
        "status": run.status,
        "verdict": _verdict(run, words),
        "about": _about(run, words),
        "tiles": list(_tiles(run, words)),
        "events": [
            {"step": words.integer(event.step), "kind": words[EVENT_WORDS[event.kind]], "text": event.text}
            for event in events(run, words)
        ],
        "samples": _samples(run, number, words),
        "ledger": ledger_view(run, number, words),
        "profile": _profile(run, number, words),
        "plan": plan_table(run, words),
        "choice": choice_table(run, words),
        "faults": [{"title": hang.name, "text": hang.text} for hang in run.hangs],
        "ranks": _ranks(run, words),
        "config": yaml.safe_dump(run.config, allow_unicode=True, sort_keys=False) if run.config else "",
        "set_keys": _keys(set_keys(run.config), words),
        "chosen": _keys(_translate(run.starts[-1].chosen if run.starts else {}, words), words),
        "commands": _commands(run),
        "environment": _environment(run, words),
        "starts": table(
            [words["step"], words["time"], words["process"], words["device"]],
            [
                [words.integer(start.step), start.time, str(start.processes), str(start.environment.get("device", ""))]
                for start in run.starts
            ],
            {0, 2},
        ),
    }


# The head ---------------------------------------------------------------------------------


def _verdict(run: RunData, words: Language) -> str:
    """Return a sentence or two about the state of the run."""
    status, elapsed, left = run.status, run.elapsed_seconds, run.seconds_left
    newest = max((checkpoint.step for checkpoint in run.checkpoints), default=None)
    text = words[f"verdict_{status.state.replace(' ', '_')}"].format(
        step=words.integer(status.step),
        of=words["of_steps"].format(steps=words.integer(run.steps)) if run.steps else "",
        time=words["in_time"].format(time=words.duration(elapsed)) if elapsed is not None else "",
        left=words["time_left"].format(time=words.duration(left)) if left is not None else "",
        silent=words.duration(status.silent),
        message=status.message,
        checkpoint=words["from_checkpoint"].format(step=words.integer(newest)) if newest is not None else "",
    )
    if status.silent_ranks:
        text += " " + words["silent_ranks"].format(ranks=", ".join(map(str, status.silent_ranks)))
    return text


def _about(run: RunData, words: Language) -> str:
    """Return the objective, the model and the device."""
    start = run.starts[-1] if run.starts else None
    parts = [run.objective]
    if start is not None:
        parts += [words.phrase(start.chosen.get("model", "")), str(start.environment.get("device", ""))]
        if start.processes > 1:
            parts.append(words["processes"].format(count=words.integer(start.processes)))
    return " · ".join(part for part in parts if part)


def _tiles(run: RunData, words: Language) -> Any:
    """Yield the tiles with key numbers."""
    curves, newest = run.curves, run.curves.newest
    best = next((checkpoint.step for checkpoint in run.checkpoints if checkpoint.is_best), None)
    for name in dict.fromkeys([str(_config_value(run.config, "checkpoint", "best") or "loss"), "bits_per_byte"]):
        if name not in curves.validation:
            continue
        curve = curves.validation[name]
        more = ""
        if best is not None and best in curve.step and best != curve.step[-1]:
            value = float(curve.value[np.searchsorted(curve.step, best)])
            more = words["tile_best"].format(value=words.number(value), step=words.integer(best))
        known = {"loss": words["tile_loss_on_validation"], "bits_per_byte": words["tile_bits_per_byte"]}
        label = known.get(name, words["tile_validation"].format(metric=words.label(name)))
        yield _tile(label, words.number(curve.newest), more=more)
    if "loss" in curves.training:
        yield _tile(words["tile_loss"], words.number(newest.get("loss")))
    if curves.lines:
        more = words["tile_of_steps"].format(steps=words.integer(run.steps)) if run.steps else ""
        yield _tile(words["tile_step"], words.integer(newest.get("step", run.status.step)), more=more)
    if isinstance(newest.get("tokens"), int):
        yield _tile(words["tile_tokens"], words.integer(newest["tokens"]))
    if run.elapsed_seconds is not None:
        yield _tile(words["tile_time"], words.duration(run.elapsed_seconds))
    if run.tokens_per_second is not None:
        yield _tile(words["tile_speed"], words.integer(run.tokens_per_second), words["tile_tokens_per_second"])
    if isinstance(newest.get("mfu"), int | float):
        yield _tile(words["tile_mfu"], words.percent(newest["mfu"]))
    peak = (run.result or {}).get("peak_memory_gib")
    if isinstance(peak, int | float):
        yield _tile(words["tile_peak"], words.number(peak, 3), words["tile_gib"])
    elif "memory_gib" in curves.training:
        yield _tile(words["tile_memory"], words.number(curves.training["memory_gib"].newest, 3), words["tile_gib"])


def _tile(label: str, figure: str, unit: str = "", more: str = "") -> dict[str, str]:
    return {"label": label, "figure": figure, "unit": unit, "more": more}


# Samples, text, time -----------------------------------------------------------------------


def _samples(run: RunData, number: int, words: Language) -> list[dict[str, Any]]:
    """Return samples by prompt: the first, the last, some in between, and the full list."""
    by_prompt: dict[str, list[Sample]] = {}
    for sample in run.samples:
        by_prompt.setdefault(sample.prompt, []).append(sample)
    groups = []
    for index, samples in enumerate(by_prompt.values()):
        last = len(samples) - 1
        selected = sorted({round(part * last / (_MAX_SAMPLES - 1)) for part in range(_MAX_SAMPLES)})
        rows = [{"step": words.integer(item.step), "prompt": item.prompt, "text": item.text} for item in samples]
        shown = [rows[position] for position in selected]
        groups.append({"id": f"{number}-{index}", "shown": shown, "all": rows, "others": len(shown) < len(rows)})
    return groups


def ledger_view(run: RunData, number: int, words: Language) -> dict[str, Any] | None:
    ledger = run.ledger
    if ledger is None or not isinstance(ledger.get("sets"), dict) or not isinstance(ledger.get("documents"), dict):
        return None
    documents, sets = ledger["documents"], ledger["sets"]
    reasons = sorted(documents.get("dropped", {}), key=lambda reason: -documents["dropped"][reason])
    reason_names = [words.phrase(reason.replace("_", " ")) for reason in reasons]
    splits = [split for split in ("train", "validation") if any(split in counts for counts in sets.values())]
    rows = []
    for name, counts in [*sets.items(), ("Σ", documents | ledger.get("parts", {}))]:
        cells = [counts.get("read", 0), counts.get("kept", 0)]
        cells += [counts.get("dropped", {}).get(reason, 0) for reason in reasons]
        cells += [counts.get(split, {}).get("tokens", 0) for split in splits]
        rows.append([name, *map(words.integer, cells)])
    columns = [words["set"], words["read"], words["kept"], *reason_names]
    columns += [f"{words['tokens']}: {words[_SPLIT_WORDS[split]]}" for split in splits]
    rejected = run.rejected[:_MAX_REJECTED]
    return {
        "id": f"ledger-{number}",
        "verdict": words["ledger_verdict"].format(
            read=words.integer(documents.get("read", 0)),
            kept=words.integer(documents.get("kept", 0)),
            dropped=words.integer(sum(documents.get("dropped", {}).values())),
        ),
        "sets": table(columns, rows, set(range(1, len(columns)))),
        "notes": [words.phrase(note) for note in from_json(ledger.get("notes", []))],
        "rejected": table(
            [words["origin"], words["reason"], words["about_it"]],
            [[line["origin"], words.phrase(line["reason"].replace("_", " ")), line["detail"]] for line in rejected],
        ),
        "bars": {
            "id": f"ledger-{number}",
            "unit": words["documents"],
            "categories": list(sets),
            "texts": [],
            "series": [
                {"name": words["kept"], "values": [counts.get("kept", 0) for counts in sets.values()]},
                *(
                    {"name": name, "values": [counts.get("dropped", {}).get(reason, 0) for counts in sets.values()]}
                    for reason, name in zip(reasons, reason_names, strict=True)
                ),
            ],
        },
    }


_SPLIT_WORDS = {"train": "training", "validation": "validation"}


def _profile(run: RunData, number: int, words: Language) -> dict[str, Any] | None:
    profile = run.profile
    if profile is None or not profile.get("kinds"):
        return None
    kinds = [kind for kind in profile["kinds"] if kind["milliseconds"]]
    kinds.sort(key=lambda kind: -kind["milliseconds"])
    names = [words.phrase(kind["kind"]) for kind in kinds]
    largest = kinds[0]
    rows = [
        [name, words.number(kind["milliseconds"]), words.percent(kind["percent"] / 100)]
        for name, kind in zip(names, kinds, strict=True)
    ]
    operators = [
        [row["name"], words.phrase(row["kind"]), words.number(row["milliseconds"]), words.number(row["calls"], 3)]
        for row in profile.get("operators", [])
    ]
    return {
        "id": f"profile-{number}",
        "verdict": words["profile_verdict"].format(
            milliseconds=words.number(profile["milliseconds"]),
            largest=names[0],
            percent=words.number(largest["percent"], 3),
            steps=profile["steps"],
            device=profile["device"],
        ),
        "kinds": table([words["part"], words["milliseconds"], words["share"]], rows, {1, 2}),
        "operators": table(
            [words["operator"], words["part"], words["milliseconds"], words["calls"]], operators, {2, 3}
        ),
        "bars": {
            "id": f"profile-{number}",
            "unit": words["milliseconds"],
            "categories": names,
            "texts": [words.percent(kind["percent"] / 100) for kind in kinds],
            "series": [{"name": "", "values": [kind["milliseconds"] for kind in kinds]}],
        },
    }


# Plan, ranks, environment ------------------------------------------------------------------


def plan_table(run: RunData, words: Language) -> Table | None:
    """Return planned values beside measured ones, or None if there is no plan."""
    plan = run.plan
    if plan is None:
        return None
    measured = plan.get("measured") or {}
    chosen = run.starts[-1].chosen if run.starts else {}
    elapsed, newest = run.elapsed_seconds, run.curves.newest
    is_complete = run.status.state == "complete"
    per_rank = plan.get("per_rank_gib") or {}
    rows = [
        _plan_row("tokens_per_second", plan.get("tokens_per_second"), measured.get("tokens_per_second"), words),
        _plan_row("per_rank_gib", per_rank.get("reserved"), measured.get("per_rank_gib"), words),
        _plan_row("host_gib", plan.get("host_gib"), measured.get("host_gib"), words),
        _plan_row("hours", plan.get("hours"), elapsed / 3600 if elapsed is not None and is_complete else None, words),
        _plan_row("steps", plan.get("steps"), run.status.step if is_complete else None, words),
        _plan_row("tokens", plan.get("tokens"), newest.get("tokens") if is_complete else None, words),
    ]
    for name in ("micro_batch", "activation_checkpointing", "precision"):
        planned, used = map(words.phrase, (plan.get(name, ""), chosen.get(f"train.{name}", "")))
        rows.append([words[f"plan_{name}"], planned, used, ""])
    columns = ["", words["planned"], words["measured"], words["difference"]]
    return table(columns, [row for row in rows if row[1] or row[2]], {1, 2, 3})


def choice_table(run: RunData, words: Language) -> Table | None:
    """Return expected metrics of `model.auto` beside those reached, or None if the model was not chosen."""
    expected, reached = (choice_values(run.choice or {}, group) for group in ("expected", "reached"))
    if not expected:
        return None
    planned: dict[str, Any] = dict(expected)
    if "bits_per_byte" in expected:
        low, high = expected_range(expected["bits_per_byte"])
        planned["bits_per_byte"] = {"low": low, "mid": expected["bits_per_byte"], "high": high}
    rows = [_plan_row(name, planned.get(name), reached.get(name), words) for name in EXPECTED]
    columns = ["", words["expected"], words["reached"], words["difference"]]
    return table(columns, [row for row in rows if row[1] or row[2]], {1, 2, 3})


def _plan_row(name: str, planned: Any, measured: Any, words: Language) -> list[str]:
    """Return a row of the plan. `planned` is a number, or `mid` with `low` and `high`."""

    def format_value(value: float) -> str:
        if name in _UNIT_SECONDS:
            return words.duration(value * _UNIT_SECONDS[name])
        return words.integer(value) if name in ("steps", "tokens") else words.number(value)

    middle = planned.get("mid") if isinstance(planned, dict) else planned
    text = "" if middle is None else format_value(middle)
    if isinstance(planned, dict) and middle is not None:
        values = {bound: format_value(planned[bound]) for bound in ("mid", "low", "high")}
        text = words["plan_range"].format(**values)
    if not isinstance(measured, int | float):
        return [words[f"plan_{name}"], text, "", ""]
    difference = words.difference(measured / middle - 1) if middle else ""
    return [words[f"plan_{name}"], text, format_value(measured), difference]


def _ranks(run: RunData, words: Language) -> Table | None:
    if len(run.ranks) < 2 and run.status.state not in ("running", "dead"):
        return None
    rows = []
    for rank in run.ranks:
        silent = run.status.state == "dead" or rank.rank in run.status.silent_ranks
        state = words["state_dead"] if silent and rank.state == "running" else words[f"state_{rank.state}"]
        last_sign = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(rank.time))
        memory = words.number(rank.memory_gib, 3)
        rows.append([str(rank.rank), rank.host, rank.device, words.integer(rank.step), memory, state, last_sign])
    columns = [words[name] for name in ("rank", "host", "device", "step", "memory_gib", "state", "last_sign")]
    return table(columns, rows, {0, 3, 4})


def _keys(values: dict[str, Any], words: Language) -> Table:
    rows = [[key, in_yaml(value)] for key, value in values.items() if value is not None]
    return table([words["key"], words["value"]], rows, code=True)


def _translate(values: dict[str, Any], words: Language) -> dict[str, Any]:
    """Translate the English phrases among the values."""
    return {key: words.phrase(value) if isinstance(value, str) else value for key, value in values.items()}


def _environment(run: RunData, words: Language) -> Table:
    if not run.starts:
        return table([], [])
    start = run.starts[-1]
    values = {**start.environment, "processes": start.processes}
    rows = [[words.phrase(name), str(value)] for name, value in values.items()]
    return table([words["key"], words["value"]], rows, code=True)


def _commands(run: RunData) -> str:
    """Return command lines that repeat the run in another folder."""
    folder, start = str(run.folder), run.starts[-1] if run.starts else None
    override = shlex.quote(f"run={folder.rstrip('/')}-again")
    processes = ""
    if start is not None and start.processes > 1:
        hosts = int(start.environment.get("hosts", 1))
        processes = f" --nproc {start.processes // hosts}" + (f" --nnodes {hosts}" if hosts > 1 else "")
    lines = [f"artel train {shlex.quote(folder)} {override}{processes}", f"artel train run.yaml {override}{processes}"]
    return "\n".join(lines)


def _config_value(config: dict[str, Any], section: str, key: str) -> Any:
    part = config.get(section)
    return part.get(key) if isinstance(part, dict) else None


# Details of a validation -------------------------------------------------------------------


def details_view(run: RunData, words: Language) -> dict[str, Any] | None:
    """Return the content of the section on validation details, or None if there is none."""
    details = read_details(run.validation)
    if not details:
        return None
    return {
        "step": _cell((run.validation or {}).get("step", ""), words),
        "tables": list(_details_tables(details, words)),
        "matrices": [_matrix(title, matrix, words) for title, matrix in details.matrices.items()],
    }


def _details_tables(details: Details, words: Language) -> Any:
    for title, rows in details.tables.items():
        columns = columns_of(rows)
        numbers = {index for index, name in enumerate(columns) if any(is_number(row.get(name)) for row in rows)}
        cells = [[_cell(row.get(name, ""), words) for name in columns] for row in rows]
        if title in _ARTEL_ROWS:
            cells = [[words.phrase(head), *values] for head, *values in cells]
        yield {"title": words.phrase(title), "table": table([words.label(name) for name in columns], cells, numbers)}


def _cell(value: Any, words: Language) -> str:
    if isinstance(value, float):
        return words.number(value)
    return words.integer(value) if is_number(value) else str(value)


def _matrix(title: str, matrix: Matrix, words: Language) -> dict[str, Any]:
    shown: dict[str, Any] = {"title": words.phrase(title), "labels": matrix.labels, "rows": [], "confusions": None}
    if not matrix.is_small:
        columns = [words["true_label"], words["predicted_label"], words["count"]]
        rows = [[true, predicted, words.integer(count)] for true, predicted, count in matrix.confusions()]
        return shown | {"confusions": table(columns, rows, {2})}
    for label, counts in zip(matrix.labels, matrix.counts, strict=True):
        total = max(1, sum(counts))
        cells = [{"count": words.integer(count), "share": f"{count / total:.3f}"} for count in counts]
        shown["rows"].append({"label": label, "cells": cells})
    return shown
