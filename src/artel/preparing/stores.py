"""Token stores of runs: keys, damage, copies on S3, and stores named in a run file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import orjson
import xxhash

from artel.config import RunConfig, Section
from artel.errors import InputError, Problem
from artel.messages import logger
from artel.objectives import build_objective, objective_type
from artel.plugins import code_digest
from artel.preparing.run_tokenizer import tokenizer_files
from artel.preparing.selection_rules import depends_on_seed
from artel.registry import FORMATS, OBJECTIVES
from artel.secrets import hide_secrets
from artel.storage import disk_errors, exists, pull_folder, push_folder, read_bytes, write_file
from artel.text import source_fingerprint
from artel.text.classifier import classifier_digest
from artel.text.decontamination import benchmark_fingerprint
from artel.text.dedup.shingles import SHINGLE_VERSION
from artel.text.pipeline import TEXT_VERSION
from artel.tokens import DamagedStore, TokenStore, load_tokenizer
from artel.tokens.manifest import FORMAT, stored_files


def store_key(config: RunConfig) -> str:
    """Return a digest of everything that the store's content depends on. Reads no file."""
    files: dict[str, Any] = {"files": source_fingerprint(config.data), "tokenizer_files": tokenizer_files(config)}
    if config.data.decontaminate is not None:
        files["benchmarks"] = benchmark_fingerprint(config.data)
    if config.data.clean.classifier is not None:
        files["classifier"] = classifier_digest(config.data.clean.classifier)
    return _digest_inputs({**_store_settings(config), **files})


def settings_digest(config: RunConfig) -> str:
    """Return a digest of the settings that shape the store, without its texts."""
    return _digest_inputs(_store_settings(config))


def _store_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that shape the store."""
    excluded: dict[str, Any] = dict.fromkeys(("block", "packing", "document_mask", "store", "max_bad"), True)
    data = config.data.model_dump(mode="json", exclude=excluded | {"sources": {"__all__": {"license"}}})
    modules = [FORMATS.get_module(source.format) for source in config.data.sources]
    plugins = {module for module in (*modules, OBJECTIVES.get_module(config.objective)) if module is not None}
    # artel's own objectives name the settings that shape their samples in `store_settings`.
    is_plugin = OBJECTIVES.get_module(config.objective) is not None
    section: Section | None = (config.model_extra or {}).get(config.objective) if is_plugin else None
    return {
        "format": FORMAT,
        "text": TEXT_VERSION,
        **({"plugins": [[module, code_digest(module)] for module in sorted(plugins)]} if plugins else {}),
        **({"grams": SHINGLE_VERSION} if config.data.dedup.near is not None else {}),
        "data": data,
        "tokenizer": config.tokenizer.model_dump(mode="json", exclude={"replace"}),
        "objective": [config.objective, objective_type(config).store_settings(config)],
        **({"settings": section.model_dump(mode="json")} if section is not None else {}),
        "seed": config.seed if depends_on_seed(config) else None,
    }


def _digest_inputs(inputs: dict[str, Any]) -> str:
    """Return a digest without secrets: a new token in an address does not change the text."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps(hide_secrets(inputs), option=orjson.OPT_SORT_KEYS))


def find_damage(folder: Path) -> Problem | None:
    """Read a store in full. Return the problem if it is damaged. Raise InputError without permission to read."""
    try:
        TokenStore(folder).verify()
    except DamagedStore as error:
        return error.problems[0]
    return None


def rename_damaged_store(folder: Path) -> Path:
    """Rename a damaged store to KEY.damaged, so that nothing opens it. Return the new path."""
    damaged = folder.with_name(f"{folder.name}.damaged")
    with disk_errors(folder.parent):
        shutil.rmtree(damaged, ignore_errors=True)
        folder.rename(damaged)
        os.utime(damaged)  # it is removed after a week
    return damaged


def copy_record_file(folder: Path) -> Path:
    """Return the file with the address of a store's copy on S3. If it exists, a start needs no network."""
    return folder.with_name(f"{folder.name}.copy")


def fetch_store(folder: Path, address: str) -> None:
    """Download the store from S3, if another machine wrote it there."""
    if exists(f"{address}/manifest.json"):
        logger.info("fetching the store %s", address)
        manifest = orjson.loads(read_bytes(f"{address}/manifest.json"))
        pull_folder(address, folder, stored_files(manifest))
        write_file(copy_record_file(folder), address)


def push_store(folder: Path, address: str) -> None:
    """Copy a finished store to S3."""
    logger.info("writing the store to %s", address)
    push_folder(folder, address)
    write_file(copy_record_file(folder), address)


def record_store(config: RunConfig, settings: str, folder: Path) -> None:
    """Write the store into RUN/store.json, so that the run can resume without its texts."""
    content = orjson.dumps({"store": str(folder.resolve()), "settings": settings})
    file = _store_file(config)
    if not file.is_file() or file.read_bytes() != content:
        write_file(file, content)


def recorded_store(config: RunConfig, settings: str) -> Path | None:
    """Return the store in RUN/store.json, if it still exists and was made with the same settings."""
    try:
        record = orjson.loads(_store_file(config).read_bytes())
        folder = Path(record["store"])
        is_same = record["settings"] == settings
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if is_same and (folder / "manifest.json").is_file() else None


def _store_file(config: RunConfig) -> Path:
    return Path(config.run) / "store.json"


def check_from_store(config: RunConfig, *, verify: bool = False) -> None:
    """Raise InputError if data.from_store is not a store, is damaged, or does not fit the objective or tokenizer."""
    folder = Path(config.data.from_store or "")
    key = "data.from_store"
    try:
        store = TokenStore(folder)
        if verify:
            store.verify(load_tokenizer(str(folder / "tokenizer")).vocabulary)
    except InputError as error:
        fix = "use the folder that artel data import or artel prepare printed; a damaged one must be rebuilt"
        raise InputError([Problem(key, f"{problem.where} {problem.what}", fix) for problem in error.problems]) from None
    manifest = store.manifest
    problems = []
    if manifest["objective"] != config.objective:
        what = f"{folder} holds samples of objective {manifest['objective']}, but the run's is {config.objective}"
        problems.append(Problem(key, what, f"write objective: {manifest['objective']}, or use another store"))
    name = config.tokenizer.from_
    is_trusted = name == config.model.trust_remote_code
    if config.tokenizer.train is not None or (
        name and load_tokenizer(name, runs_code=is_trusted).fingerprint != manifest["tokenizer"]
    ):
        what = f"{folder} was made with its own tokenizer, but the run names another"
        problems.append(Problem("tokenizer", what, "remove tokenizer: the store has it"))
    if problems:
        raise InputError(problems)
    build_objective(config, load_tokenizer(str(folder / "tokenizer"))).check_store(store)
