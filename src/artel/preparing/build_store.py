"""Build a token store, stage by stage, in a workspace beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from artel.config import RunConfig
from artel.errors import InputError, WorkError
from artel.messages import Phrase, logger
from artel.objectives import Objective, build_objective, objective_type
from artel.preparing.document_lists import copy_list
from artel.preparing.progress import Progress, reporting
from artel.preparing.run_tokenizer import run_tokenizer
from artel.preparing.stores import store_key
from artel.preparing.workspace import Workspace
from artel.storage import new_folder
from artel.text import Document, Ledger, describe_drops, read_documents, suggest_more_documents, write_index
from artel.tokens import TokenStore, load_tokenizer

_MAX_NOTED_DOCUMENTS = 200
_DATE_NOTE = Phrase(
    "The chat template writes today's date (strftime_now) into the prepared texts. Prepared on another day, they will "
    "differ; a run that has begun keeps its own. To fix the date, copy the template, write a date in place of "
    "strftime_now, and name the copy as chat.template"
)

Check = Callable[..., None]
"""Raise an error that was found in the run so far. With `wait=True`, first wait for all checks."""


def build_store(config: RunConfig, folder: Path, key: str, check: Check) -> None:
    """Build the store of a run in `folder`, stage by stage. Reuses stages that an earlier start finished."""
    # These modules import torch, which is not needed if the store exists.
    from artel.preparing.assembly import write_store
    from artel.preparing.engines import check_engine, run_stage
    from artel.preparing.prepared_shard import encoder_notes
    from artel.preparing.selection import Selection
    from artel.preparing.selection_rules import find_exact_duplicates, find_repeated_lines
    from artel.preparing.tasks import Stage, Tasks

    check_engine(config.prepare)
    with reporting(lambda: "dividing the sources into parts"):
        workspace = Workspace.open_or_plan(folder.with_name(f"{key}.parts"), config)

    def run_tasks(stage: Stage, description: str) -> None:
        tasks = Tasks(workspace)
        if tasks.unfinished(stage):
            logger.info(description)
            progress_line = Progress(description)

            def progress(num_done: int, num_tasks: int) -> None:
                check()
                progress_line(num_done, num_tasks)

            run_stage(tasks, stage, config.prepare, progress)

    if config.data.decontaminate is not None and not workspace.benchmarks_path.exists():
        with reporting(lambda: "reading the benchmarks"):
            write_index(config.data, workspace.benchmarks_path)

    def read_texts() -> Selection:
        tokenizer = run_tokenizer(workspace, lambda file: copy_list(config, file))
        if tokenizer.loses_spacing and objective_type(config).generates:
            logger.info(
                "the tokenizer loses the spaces of a text, as will the model (tokenizer.train.pattern: whitespace)"
            )
        if tokenizer.changed_letters and objective_type(config).generates:
            changed = ", ".join(
                f"{letter} becomes {changed_letter}" for letter, changed_letter in tokenizer.changed_letters.items()
            )
            logger.info("the tokenizer changes letters, so the model will too: %s", changed)
        if tokenizer.plain_frame_tokens:
            frame_text = " and ".join(tokenizer.plain_frame_tokens)
            logger.info(
                "the tokenizer puts %s around each text: no special token; see post_processor in tokenizer.json",
                frame_text,
            )
        if config.data.dedup.lines != "none" and Tasks(workspace).unfinished("text"):
            run_tasks("lines", "looking for repeated lines")
            find_repeated_lines(workspace)
        run_tasks("text", "turning text into tokens")
        for note in encoder_notes(workspace):
            logger.info(note)
        with reporting(lambda: "looking for duplicates"):
            find_exact_duplicates(workspace)
        if config.data.dedup.near is not None:
            run_tasks("near", "looking for near-duplicates")
        return Selection(workspace)

    if not workspace.selection_path.exists():
        selection = read_texts()
        larger_fraction = selection.larger_fraction()
        if larger_fraction is not None:
            logger.info("the validation split is empty: holding out some documents, and reading the text again")
            workspace = workspace.hold_out(*larger_fraction)
            selection = read_texts()
        with reporting(lambda: "selecting documents"):
            objective = build_objective(config, load_tokenizer(str(workspace.tokenizer_path)))
            notes = objective_notes(objective)
            selection.write(workspace.selection_path, lambda file: copy_list(config, file), notes, objective.review)
    check(wait=True)
    run_tasks("shards", "writing the store")
    _check_unchanged(config, key, workspace)
    tokenizer = load_tokenizer(str(workspace.tokenizer_path))
    with new_folder(folder) as partial:
        entries = {"key": key, "objective": config.objective, "tokenizer": tokenizer.fingerprint}
        if build_objective(config, tokenizer).inserts_date:
            entries["day"] = date.today().isoformat()
        manifest = write_store(
            workspace, partial, {**entries, "vocabulary": tokenizer.vocabulary}, tokenizer.vocabulary
        )
        _check_splits(config, manifest, orjson.loads((partial / "ledger.json").read_bytes()))
        build_objective(config, tokenizer).check_store(TokenStore(partial))
    shutil.rmtree(workspace.path)


def objective_notes(objective: Objective, documents: Iterable[Document] | None = None) -> list[str]:
    """Return an objective's notes on a run's first documents; [] if texts cannot be read.

    `documents`: the first ones, if they have been read.
    """
    try:
        if documents is None:
            documents = read_documents(objective.config.data, Ledger())
        return [
            *objective.notes(islice(documents, _MAX_NOTED_DOCUMENTS)),
            *([_DATE_NOTE] if objective.inserts_date else []),
        ]
    except InputError:
        return []  # reported when all texts are read


def _check_unchanged(config: RunConfig, key: str, workspace: Workspace) -> None:
    """Raise WorkError if files that the store's key depends on changed while the store was built."""
    if store_key(config) != key:
        shutil.rmtree(workspace.path)
        what, fix = "files changed while they were being prepared", "run again when no process writes to them"
        raise WorkError.at("data.sources", what, fix)


def _check_splits(config: RunConfig, manifest: dict[str, Any], ledger: dict[str, Any]) -> None:
    splits = manifest["parts"]
    if config.data.held_out != 0.0 and splits["validation"]["samples"] == 0:
        documents = splits["train"]["documents"]
        what = f"all {documents:,} documents are in one group, which cannot be divided, so none can be held out"
        if documents == 1:
            what = "the only document cannot be held out"
        if splits["validation"]["documents"]:
            what = "no sample could be made of the documents that are held out"
        elif config.data.held_out is None:  # separate validation texts are counted as the set "validation"
            dropped = describe_drops(ledger["sets"].get("validation", {}).get("dropped", {}))
            what = f"no sample could be made of {config.data.validation}: {dropped or 'it has no documents'}"
        elif dropped := describe_drops(ledger["documents"]["dropped"]):
            what = f"no document is left to hold out (dropped: {dropped})"
        fix = f"write data.validation: 0, or the path of validation texts; or {suggest_more_documents(config.data)}"
        raise InputError.at("data.validation", what, fix)
    if config.data.held_out != 1.0 and splits["train"]["samples"] == 0:
        fix = "fix the documents that were dropped, or raise data.max_bad"
        raise InputError.at("data.sources", "they yield no training sample", fix)
