"""From sources to a token store: find it by its key, or make it.

All text work of a run is here, and it is over before any process group exists. Processes that start together meet at
a file lock: the first makes the store, the others find it. A store appears whole or not at all. It is made part by
part in a folder beside it (`workspace.py`); a start after a kill goes on from the parts that are finished, and what
comes out depends neither on that, nor on how many worked at it.
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
import xxhash

from artel.config import RunConfig
from artel.errors import InputError, Problem, WorkError
from artel.objectives import objective_type
from artel.plugins import code_digest
from artel.preparing.claim import check_claim, claim, identity
from artel.preparing.from_store import check_from_store
from artel.preparing.known_stores import damage, remember_store, remembered_store, set_aside
from artel.preparing.mixture import depends_on_seed
from artel.preparing.news import News, Tell, still
from artel.preparing.overlap import output_problems, overlap_problems, refuse_overlaps
from artel.preparing.run_tokenizer import run_tokenizer, tokenizer_files
from artel.preparing.workspace import Workspace
from artel.registry import FORMATS, OBJECTIVES
from artel.secrets import hide_secrets
from artel.storage import (
    cache_folder,
    exists,
    is_remote,
    lock,
    new_folder,
    pull_folder,
    push_folder,
    read_bytes,
    remove_leftovers,
    write_bytes,
    write_file,
)
from artel.text import check_text, describe_drops, more_documents, source_fingerprint
from artel.text.dedup.shingles import SHINGLE_VERSION
from artel.tokens import Tokenizer, TokenStore, load_tokenizer
from artel.tokens.store.manifest import FORMAT, PARTS, stored_files

Check = Callable[..., None]
"""Raises what is found wrong with the run meanwhile; with `wait=True` it waits for all of that."""

# Unfinished work that nobody went on with for so long is cleared away.
_FORGOTTEN_SECONDS = 7 * 86400


@dataclass(frozen=True, slots=True)
class Prepared:
    """A store ready to be read, and whether this call made it."""

    folder: Path
    made: bool

    def open(self) -> TokenStore:
        return TokenStore(self.folder)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(str(self.folder / "tokenizer"))

    def ledger(self) -> dict[str, Any]:
        return orjson.loads((self.folder / "ledger.json").read_bytes())

    def notes(self) -> list[str]:
        """What was decided about the text, and what of it could not be used, in sentences."""
        return self.ledger().get("notes", [])

    def summary(self) -> str:
        """In a line: documents read, kept and dropped, by reason, and the tokens of both parts."""
        ledger = self.ledger()
        documents, tokens, split = ledger["documents"], ledger["tokens"], ledger["parts"]
        return (
            f"{documents['read']:,} documents read, {documents['kept']:,} kept, "
            f"{describe_drops(documents['dropped']) or 'none'} dropped · "
            f"{tokens['train']:,} training tokens in {split['train']['documents']:,} documents, "
            f"{tokens['validation']:,} validation tokens in {split['validation']['documents']:,}"
            f"{'' if self.made else ' (made before)'}"
        )


def prepare(
    run: RunConfig,
    tell: Tell = lambda _: None,
    *,
    verify: bool = False,
    while_making: Callable[[], AbstractContextManager[Check]] = lambda: nullcontext(lambda **_: None),
) -> Prepared:
    """The token store of a run: found when its inputs were seen before, else made. Raises InputError, WorkError.

    With `verify` a store that is found is read through (as fast as the disk); one that is damaged is told, set aside
    and made anew, the same byte for byte. Where the texts are gone, the store that the run began with is taken.
    RUN/rejected.jsonl has the records that could not be used, also where they are too many. `while_making` is entered
    where a store must be made; what it gives is asked now and then, and with `wait=True` before the store is written:
    what it raises ends the work.
    """
    refuse_overlaps(run)
    if run.run:
        check_claim(Path(run.run))
    if run.data.from_store:
        check_from_store(run, verify=verify)
        return Prepared(Path(run.data.from_store), made=False)
    try:
        with still(tell, lambda: "looking at the sources"):
            check_text(run.data, tell)
            key = store_key(run)
    except InputError as error:
        return _without_texts(run, error, tell, verify)
    there = run.data.store.rstrip("/") if is_remote(run.data.store) else ""
    stores = Path(run.data.store) if run.data.store and not there else cache_folder() / "stores"
    folder, made = stores / key, False
    address = there and f"{there}/{key}"
    is_damaged = verify and _is_whole(folder) and damage(folder) is not None
    if is_damaged or not _is_whole(folder, address):
        with lock(stores / f"{key}.lock", lambda: tell("waiting for another process that prepares the same text")):
            aside = None
            if folder.exists() and (is_damaged or not _is_whole(folder)):
                aside = _set_damaged_aside(folder, tell)
            if address and not folder.exists():
                _fetch(folder, address, tell)
            if not _is_whole(folder):
                if address:  # a right that is missing is told now, not when all is done
                    write_bytes(f"{address}.begun", b"")
                remove_leftovers(stores)
                _remove_forgotten(stores)
                with while_making() as check:
                    _make(run, folder, key, tell, check)
                made = True
            if not _is_whole(folder, address):
                tell(f"writing the store to {address}")
                push_folder(folder, address)
                write_file(_copy_note(folder), address)
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
    _copy_rejected(run, folder)
    prepared = Prepared(folder, made)
    for note in prepared.notes() if made else ():
        tell(note)
    return prepared


def check_texts(run: RunConfig) -> None:
    """Raise InputError for outputs that cannot be written or lie in inputs, and for wrong sources that are needed."""
    problems = [*output_problems(run), *overlap_problems(run)]
    try:
        check_text(run.data)
    except InputError as error:
        if not has_store(run):
            problems += error.problems
    if problems:
        raise InputError(problems)


def has_store(run: RunConfig) -> bool:
    """Whether the store that a run began with is still there: neither texts nor a tokenizer are then needed."""
    return remembered_store(run, _digest(_settings(run))) is not None


def remember(run: RunConfig, prepared: Prepared) -> None:
    """Keep in the run's folder which store it is trained on, for when its texts are gone. Raises what a disk does."""
    if not run.data.from_store:
        remember_store(run, _digest(_settings(run)), prepared.folder)


def store_key(run: RunConfig) -> str:
    """One short text for everything that the store's content depends on; cheap, no file is read."""
    files = {"files": source_fingerprint(run.data), "tokenizer_files": tokenizer_files(run)}
    return _digest({**_settings(run), **files})


def _settings(run: RunConfig) -> dict[str, Any]:
    """What in the run file shapes the store."""
    data = run.data.model_dump(mode="json", exclude={"block", "packing", "document_mask", "store", "max_bad"})
    modules = [FORMATS.module_of(source.format) for source in run.data.sources]
    plugins = {module for module in (*modules, OBJECTIVES.module_of(run.objective)) if module is not None}
    return {
        "format": FORMAT,
        **({"plugins": [[module, code_digest(module)] for module in sorted(plugins)]} if plugins else {}),
        **({"grams": SHINGLE_VERSION} if run.data.dedup.near is not None else {}),
        "data": data,
        "tokenizer": run.tokenizer.model_dump(mode="json", exclude={"replace"}),
        "objective": [run.objective, objective_type(run).store_settings(run)],
        "seed": run.seed if depends_on_seed(run) else None,
    }


def _digest(inputs: dict[str, Any]) -> str:
    """Another token or signature in an address is no other text: what a file holds has its own digest among these."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps(hide_secrets(inputs), option=orjson.OPT_SORT_KEYS))


def _without_texts(run: RunConfig, error: InputError, tell: Tell, verify: bool) -> Prepared:
    """The store that the run began with, now that its texts cannot be read. Raises `error` where there is none."""
    folder = remembered_store(run, _digest(_settings(run)))
    if folder is None:
        raise error
    problem = error.problems[0]
    fault = damage(folder) if verify else None
    if fault is not None:
        fix = "the store cannot be made anew without its texts: put them back, or a copy of the store"
        raise InputError([problem, Problem(fault.where, fault.what, fix)])
    tell(f"{problem.where}: {problem.what}; the run goes on with the store that was made of its texts: {folder}")
    return Prepared(folder, made=False)


def _set_damaged_aside(folder: Path, tell: Tell) -> Path | None:
    """The new name of a store that is damaged; None where another process has made it anew meanwhile."""
    if not _is_artels(folder):
        what, fix = "stands where a store is to be written, and is none", "move it away, or choose another data.store"
        raise InputError.at(str(folder), what, fix)
    fault = damage(folder)
    if fault is None:
        return None
    aside = set_aside(folder)
    _copy_note(folder).unlink(missing_ok=True)
    tell(f"{fault.where} {fault.what}: the store is set aside and made anew")
    return aside


def _is_artels(folder: Path) -> bool:
    """Whether all that lies in a folder has a name that a store's files have."""
    names = {"manifest.json", "ledger.json", "rejected.jsonl", "tokenizer", *PARTS}
    return folder.is_dir() and not folder.is_symlink() and {file.name for file in folder.iterdir()} <= names


def _is_whole(folder: Path, address: str = "") -> bool:
    """Whether the store is finished here and, where it belongs to an address on S3, is there too."""
    if not (folder / "manifest.json").is_file():
        return False
    return not address or (_copy_note(folder).is_file() and _copy_note(folder).read_text() == address)


def _copy_note(folder: Path) -> Path:
    """The file that says where a copy of a store lies: with it no network is needed to start."""
    return folder.with_name(f"{folder.name}.copy")


def _fetch(folder: Path, address: str, tell: Tell) -> None:
    """The store from S3, where another machine wrote it."""
    if exists(f"{address}/manifest.json"):
        tell(f"fetching the store {address}")
        manifest = orjson.loads(read_bytes(f"{address}/manifest.json"))
        pull_folder(address, folder, stored_files(manifest))
        write_file(_copy_note(folder), address)


def _copy_rejected(run: RunConfig, folder: Path) -> None:
    rejected = folder / "rejected.jsonl"
    if rejected.is_file() and rejected.stat().st_size:
        _keep_rejected(run, rejected)
    elif run.run and identity(Path(run.run)):  # an earlier start's, before the texts were mended
        Path(run.run, "rejected.jsonl").unlink(missing_ok=True)


def _keep_rejected(run: RunConfig, file: Path) -> None:
    """Copy a list of what could not be used into the run's folder, where there is a run and not only a text."""
    if run.run:
        claim(Path(run.run))
        write_file(Path(run.run, "rejected.jsonl"), file.read_bytes())


def _remove_forgotten(stores: Path) -> None:
    for left in (*stores.glob("*.parts"), *stores.glob("*.damaged")):
        if time.time() - left.stat().st_mtime > _FORGOTTEN_SECONDS:
            with suppress(WorkError), lock(left.with_suffix(".lock"), wait=False):  # in use it is not forgotten
                shutil.rmtree(left, ignore_errors=True)


def _make(run: RunConfig, folder: Path, key: str, tell: Tell, check: Check) -> None:
    """The store of a run into `folder`, stage by stage; what an earlier start finished is not done again."""
    # These stand on torch, and a store that is found does not need it.
    from artel.preparing.assembly import write_store
    from artel.preparing.engines.run_stage import check_engine, run_stage
    from artel.preparing.selection import Verdict, encoder_notes, find_earlier_lines, find_exact
    from artel.preparing.tasks import Stage, Tasks

    check_engine(run.prepare)
    with still(tell, lambda: "dividing the sources into parts"):
        workspace = Workspace.of(folder.with_name(f"{key}.parts"), run)

    def work(stage: Stage, what: str) -> None:
        tasks = Tasks(workspace)
        if tasks.left(stage):
            tell(what)
            news = News(tell, what)

            def progress(done: int, count: int) -> None:
                check()
                news(done, count)

            run_stage(tasks, stage, run.prepare, progress)

    def read_texts() -> Verdict:
        tokenizer = run_tokenizer(workspace, tell, lambda file: _keep_rejected(run, file))
        if tokenizer.spacing_is_lost:
            tell("this tokenizer loses the spaces of a text (tokenizer.train.pattern: whitespace)")
        if run.data.dedup.lines != "none" and Tasks(workspace).left("text"):
            work("lines", "looking for repeated lines")
            find_earlier_lines(workspace)
        work("text", "turning text into tokens")
        for note in encoder_notes(workspace):
            tell(note)
        with still(tell, lambda: "looking for duplicates"):
            find_exact(workspace)
        if run.data.dedup.near is not None:
            work("near", "looking for near-duplicates")
        return Verdict(workspace)

    if not workspace.verdict.exists():
        verdict = read_texts()
        wider = verdict.wider_share()
        if wider is not None:
            tell("no document is held out: the texts are read again")
            workspace = workspace.hold_out(*wider)
            verdict = read_texts()
        with still(tell, lambda: "choosing what is kept"):
            verdict.write(workspace.verdict, lambda file: _keep_rejected(run, file))
    check(wait=True)
    work("shards", "writing the store")
    _check_unchanged(run, key, workspace)
    tokenizer = load_tokenizer(str(workspace.tokenizer))
    with new_folder(folder) as partial:
        about = {"key": key, "objective": run.objective, "tokenizer": tokenizer.fingerprint}
        manifest = write_store(workspace, partial, {**about, "vocabulary": tokenizer.vocabulary}, tokenizer.vocabulary)
        _check_parts(run, manifest)
    shutil.rmtree(workspace.path)


def _check_unchanged(run: RunConfig, key: str, workspace: Workspace) -> None:
    """Raise WorkError where the files that a store is made of are no longer those that its key names."""
    if store_key(run) != key:
        shutil.rmtree(workspace.path)
        what, fix = "files came, went or changed while they were prepared", "start again when nothing writes there"
        raise WorkError.at("data.sources", what, fix)


def _check_parts(run: RunConfig, manifest: dict[str, Any]) -> None:
    parts = manifest["parts"]
    if run.data.validation != 0.0 and parts["validation"]["samples"] == 0:
        documents = parts["train"]["documents"]
        what = f"the {documents:,} documents are all of one group, which is not divided: none can be held out"
        if documents == 1:
            what = "there is one document, and it cannot be held out"
        if parts["validation"]["documents"]:
            what = "no sample could be made of the documents that are held out"
        fix = f"write data.validation: 0, or the path of validation texts; or {more_documents(run.data)}"
        raise InputError.at("data.validation", what, fix)
    if run.data.validation != 1.0 and parts["train"]["samples"] == 0:
        raise InputError.at(
            "data.sources",
            "no training sample could be made of them",
            "see what was dropped, and raise data.max_bad or mend it",
        )
