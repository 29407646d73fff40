"""Finds the token store of a run by its key, or builds it from the sources.

Text is prepared before any process group exists. If several processes start, the first to get a file lock builds the
store, and the other processes find it. A store appears atomically. It is built shard by shard in a folder beside it
(`workspace.py`). After a kill, finished shards are reused. The result does not depend on interruptions or the number of
workers.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from artel.config import RunConfig
from artel.errors import InputError, Problem, WorkError
from artel.interrupts import explain_interrupt
from artel.messages import from_json, logger, silence_messages
from artel.notebooks import html_table
from artel.objectives import objective_type
from artel.preparing.build_store import Check, build_store
from artel.preparing.document_lists import LISTS, copy_lists
from artel.preparing.overlap import check_overlaps, output_problems, overlap_problems
from artel.preparing.progress import reporting
from artel.preparing.record_decisions import (
    require_recorded_values,
    resolve_values,
    with_recorded_values,
    with_stored_values,
)
from artel.preparing.run_mark import check_claim
from artel.preparing.run_tokenizer import check_tokenizer_folder
from artel.preparing.stores import (
    check_from_store,
    copy_record_file,
    fetch_store,
    find_damage,
    push_store,
    record_store,
    recorded_store,
    rename_damaged_store,
    settings_digest,
    store_key,
)
from artel.storage import cache_folder, is_remote, lock, remove_leftovers, write_bytes
from artel.text import check_text, count_drops
from artel.tokens import Tokenizer, TokenStore, load_tokenizer
from artel.tokens.manifest import SPLITS

# Unfinished work is removed if nobody has resumed it for this long.
_ABANDONED_SECONDS = 7 * 86400


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A finished store."""

    folder: Path
    is_new: bool
    """True if this call built it."""
    config: RunConfig
    """The run, with the values that its records decided (`record_decisions.py`)."""

    def open(self) -> TokenStore:
        return TokenStore(self.folder)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(str(self.folder / "tokenizer"))

    def ledger(self) -> dict[str, Any]:
        return orjson.loads((self.folder / "ledger.json").read_bytes())

    def notes(self) -> list[str]:
        """Return notes for the user: decisions about the text, and records that could not be used."""
        return from_json(self.ledger().get("notes", []))

    def summary(self) -> str:
        """Return one line: documents read, kept and dropped by reason, and tokens of both splits."""
        ledger = self.ledger()
        documents, tokens, split = ledger["documents"], ledger["tokens"], ledger["parts"]
        return (
            f"{documents['read']:,} documents read, {documents['kept']:,} kept, "
            f"{count_drops(documents['dropped'])} · "
            f"{tokens['train']:,} training tokens in {split['train']['documents']:,} documents, "
            f"{tokens['validation']:,} validation tokens in {split['validation']['documents']:,}"
            f"{'' if self.is_new else ' (made before)'}"
        )

    def _repr_html_(self) -> str:
        ledger = self.ledger()
        documents, tokens = ledger["documents"], ledger["tokens"]
        rows = [
            ("documents read", f"{documents['read']:,}"),
            *((f"dropped: {reason}", f"{count:,}") for reason, count in documents["dropped"].items()),
            ("documents kept", f"{documents['kept']:,}"),
            *((f"tokens for {name}", f"{count:,}") for name, count in tokens.items()),
        ]
        return html_table(rows, caption=str(self.folder))


def prepare(
    config: RunConfig,
    *,
    verify: bool = False,
    while_building: Callable[[], AbstractContextManager[Check]] = lambda: nullcontext(lambda **_: None),
) -> PreparedText:
    """Find the token store of a run, or build it from the sources.

    If the texts are gone, use the store that the run started with. RUN/rejected.jsonl lists the records that could
    not be used, even if there are too many.

    Args:
        verify: read an existing store in full. A damaged store is reported and rebuilt, byte for byte the same.
        while_building: a context manager around building a store. It yields a check that is called from time to time,
            and with `wait=True` before the store is written. An error that it raises ends the work.
    """
    check_overlaps(config)
    if config.run:
        check_claim(Path(config.run))
    if config.data.from_store:
        check_from_store(config, verify=verify)
        return PreparedText(Path(config.data.from_store), is_new=False, config=require_recorded_values(config))
    try:
        with reporting(lambda: "looking at the sources"):
            check_text(config.data)
            check_tokenizer_folder(config)
            key = store_key(config)
    except InputError as error:
        return _store_without_texts(with_recorded_values(config), error, verify)
    stores, remote_stores = _store_locations(config)
    resolved = resolve_values(config, stores / f"{key}.settled.json")
    if resolved is not config:
        config, key = resolved, store_key(resolved)
    folder = stores / key
    address = remote_stores and f"{remote_stores}/{key}"
    is_damaged = verify and _is_complete(folder) and find_damage(folder) is not None
    is_new = False
    if is_damaged or not _is_complete(folder, address):
        message = "waiting for another process that is preparing the same text"
        with lock(stores / f"{key}.lock", lambda: logger.info(message)):
            damaged_store = None
            if folder.exists() and (is_damaged or not _is_complete(folder)):
                damaged_store = _rename_if_damaged(folder)
            is_new = _fetch_or_build(config, folder, key, address, while_building)
            if damaged_store is not None:
                shutil.rmtree(damaged_store, ignore_errors=True)
    copy_lists(config, folder)
    prepared = PreparedText(folder, is_new, config)
    for note in prepared.notes() if is_new else ():
        logger.info(note)
    return prepared


def _fetch_or_build(
    config: RunConfig, folder: Path, key: str, address: str, while_building: Callable[[], AbstractContextManager[Check]]
) -> bool:
    """Fetch the store from S3, or build it and copy it there. Return True if it was built.

    The caller holds the lock of the store.
    """
    is_new = False
    if address and not folder.exists():
        fetch_store(folder, address)
    if not _is_complete(folder):
        if address:  # reports a missing permission now, not at the end
            write_bytes(f"{address}.begun", b"")
        remove_leftovers(folder.parent)
        _remove_abandoned(folder.parent)
        with explain_interrupt(lambda: _resume_hint(folder)), while_building() as check:
            build_store(config, folder, key, check)
        is_new = True
    if not _is_complete(folder, address):
        push_store(folder, address)
    return is_new


@silence_messages()
def prepare_silently(config: RunConfig) -> PreparedText:
    """Prepare a text, as `prepare` does, without messages."""
    return prepare(config)


def check_sources_and_outputs(config: RunConfig) -> None:
    """Raise InputError for outputs that cannot be written or overlap inputs; without a store, also for the sources."""
    problems = [*output_problems(config), *overlap_problems(config)]
    try:
        check_text(config.data)
    except InputError as error:
        if not has_store(config):
            problems += error.problems
    if problems:
        raise InputError(problems)


def resolve_from_records(config: RunConfig) -> RunConfig:
    """Return the run with the values that its records decide. Reads the records once.

    Raise InputError if the records cannot be read.
    """
    if not objective_type(config).undecided(config):
        return config
    return resolve_values(config, _values_file(config))


def _values_file(config: RunConfig) -> Path:
    """Return the file of decided values for the run as written by its user."""
    return _store_locations(config)[0] / f"{store_key(config)}.settled.json"


def has_store(config: RunConfig) -> bool:
    """True if the store that the run started with still exists: then neither texts nor a tokenizer are needed."""
    config = with_recorded_values(config)
    return recorded_store(config, settings_digest(config)) is not None


def is_prepared(config: RunConfig) -> bool:
    """True if `prepare` would find the run's store and build nothing."""
    config = with_recorded_values(config)
    if config.data.from_store or has_store(config):
        return True
    try:
        config = with_stored_values(config, _values_file(config))
        key = store_key(config)
    except InputError:  # the texts are missing or invalid
        return False
    stores, remote_stores = _store_locations(config)
    return _is_complete(stores / key, remote_stores and f"{remote_stores}/{key}")


def record_prepared(config: RunConfig, prepared: PreparedText) -> None:
    """Record the run's store in its folder, in case its texts disappear."""
    if not config.data.from_store:
        record_store(config, settings_digest(config), prepared.folder)


def _resume_hint(folder: Path) -> str:
    """Return a hint on how to resume an interrupted preparation of the store `folder`."""
    if not (folder.with_name(f"{folder.name}.parts") / "tokenizer").exists():
        return "the tokenizer was not finished; the same command starts over with it"
    return "finished shards of the text are kept; the same command resumes"


def _store_locations(config: RunConfig) -> tuple[Path, str]:
    """Return (folder of stores on this machine, address on S3 or empty)."""
    address = config.data.store.rstrip("/") if is_remote(config.data.store) else ""
    return (Path(config.data.store) if config.data.store and not address else cache_folder() / "stores"), address


def _store_without_texts(config: RunConfig, error: InputError, verify: bool) -> PreparedText:
    """Return the store that the run started with, because its texts cannot be read. Raise `error` if it is gone."""
    folder = recorded_store(config, settings_digest(config))
    if folder is None:
        raise error
    problem = error.problems[0]
    damage_problem = find_damage(folder) if verify else None
    if damage_problem is not None:
        fix = "the store cannot be rebuilt without its texts: restore them, or a copy of the store"
        raise InputError([problem, Problem(damage_problem.where, damage_problem.what, fix)])
    logger.info("%s: %s; continuing with the store of its texts: %s", problem.where, problem.what, folder)
    return PreparedText(folder, is_new=False, config=config)


def _rename_if_damaged(folder: Path) -> Path | None:
    """Rename a damaged store. Return its new path; None if another process has rebuilt it in the meantime."""
    if not _is_store_folder(folder):
        what, fix = "exists but is not a token store", "move it away, or choose another data.store"
        raise InputError.at(str(folder), what, fix)
    damage_problem = find_damage(folder)
    if damage_problem is None:
        return None
    damaged_store = rename_damaged_store(folder)
    copy_record_file(folder).unlink(missing_ok=True)
    logger.info("%s %s: rebuilding the store", damage_problem.where, damage_problem.what)
    return damaged_store


def _is_store_folder(folder: Path) -> bool:
    """True if every entry of a folder has the name of a store's file."""
    names = {"manifest.json", "ledger.json", *LISTS, "tokenizer", *SPLITS}
    return folder.is_dir() and not folder.is_symlink() and {file.name for file in folder.iterdir()} <= names


def _is_complete(folder: Path, address: str = "") -> bool:
    """True if the store is finished on this machine and, if it has an address, also on S3."""
    if not (folder / "manifest.json").is_file():
        return False
    return not address or (copy_record_file(folder).is_file() and copy_record_file(folder).read_text() == address)


def _remove_abandoned(stores: Path) -> None:
    for folder in (*stores.glob("*.parts"), *stores.glob("*.damaged")):
        if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
            with suppress(WorkError), lock(folder.with_suffix(".lock"), wait=False):  # skipped while in use
                shutil.rmtree(folder, ignore_errors=True)
