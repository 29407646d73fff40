"""Resolve values at `auto` from the records, such as the labels of a classification, before tokenization.

The values are saved beside the store as KEY.settled.json, under the key of the run as its user wrote it. So the
records are read only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from artel.config import RunConfig, load_run
from artel.errors import InputError, Problem
from artel.messages import logger
from artel.objectives import objective_type
from artel.preparing.document_lists import REJECTED, copy_list, create_ledger
from artel.preparing.progress import reporting
from artel.storage import write_file
from artel.text import Record, read_documents


def resolve_values(config: RunConfig, file: Path) -> RunConfig:
    """Return the run with the values that its records decide; the unchanged run if there are none.

    `file` stores the values. Raise InputError for records that cannot be read, or do not determine a value.
    """
    if objective_type(config).undecided(config) and _read_values(config, file) is None:
        write_file(file, orjson.dumps(_decide_values(config, file)))
    return with_stored_values(config, file)


def with_stored_values(config: RunConfig, file: Path) -> RunConfig:
    """Return the run with the values stored in `file`; the unchanged run if its records were not read yet."""
    values = _read_values(config, file) if objective_type(config).undecided(config) else None
    return config if values is None else _with_values(config, values)


def _read_values(config: RunConfig, file: Path) -> dict[str, Any] | None:
    """Return the stored values of the undecided keys; None if `file` is missing or damaged."""
    section = type(getattr(config, objective_type(config).section))
    with suppress(OSError, ValueError, TypeError):
        values = orjson.loads(file.read_bytes())
        section.model_validate(values)  # with defaults: conflicts with the user's keys are reported elsewhere
        return values if values.keys() >= set(objective_type(config).undecided(config)) else None
    return None


def with_recorded_values(config: RunConfig) -> RunConfig:
    """Return the run with the values in RUN/config.yaml, decided at its start; the unchanged run if there are none."""
    objective = objective_type(config)
    file = Path(config.run, "config.yaml")
    undecided = objective.undecided(config)
    if not undecided or not config.run or not file.is_file():
        return config
    recorded = load_run(str(file))
    if recorded.objective != config.objective or objective.undecided(recorded):
        return config
    return _with_values(config, {key: getattr(getattr(recorded, objective.section), key) for key in undecided})


def require_recorded_values(config: RunConfig) -> RunConfig:
    """Return the run with the values recorded at its start. Raise InputError if values are still undecided."""
    objective = objective_type(config)
    config = with_recorded_values(config)
    problems = [
        Problem(f"{objective.section}.{key}", "auto needs the records, but there is only a token store", "set a value")
        for key in objective.undecided(config)
    ]
    if problems:
        raise InputError(problems)
    return config


def _decide_values(config: RunConfig, file: Path) -> dict[str, Any]:
    """Decide the values of the undecided keys. `file`: the file that will store them."""
    objective = objective_type(config)
    num_read = 0
    is_split_by_fraction = config.data.held_out is not None  # the fraction held out depends on the labels
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.parent) as folder:
        rejected = Path(folder, REJECTED)

        def records() -> Iterator[Record]:
            nonlocal num_read
            for document in read_documents(config.data, ledger):
                num_read += 1
                if is_split_by_fraction or document.split == "train":
                    yield document.record

        try:
            with rejected.open("wb") as stream:
                ledger = create_ledger(config, stream)
                activity = f"reading the records for {objective.section}.{objective.undecided(config)[0]}"
                logger.info(activity)
                with reporting(lambda: f"{activity}: {num_read:,} read"):
                    return objective.decide(config, records())
        except InputError:
            if rejected.stat().st_size:  # too many were rejected: the selection will not list them
                copy_list(config, rejected)
            raise


def _with_values(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """Return the run with values in its objective's section, not counted as set by the user."""
    name = objective_type(config).section
    section = getattr(config, name).model_copy(update=values)
    section.model_fields_set.difference_update(values)
    return config.model_copy(update={name: section})
