"""The store that a run names itself, and so needs no texts."""

from __future__ import annotations

from pathlib import Path

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.tokens import TokenStore, load_tokenizer


def check_from_store(run: RunConfig, *, verify: bool = False) -> None:
    """Raise InputError where it is none, damaged, of another objective or of another tokenizer.

    With `verify` all of it is read.
    """
    folder = Path(run.data.from_store or "")
    where = "data.from_store"
    try:
        store = TokenStore(folder)
        if verify:
            store.verify(load_tokenizer(str(folder / "tokenizer")).vocabulary)
    except InputError as error:
        fix = "give the folder that artel data import or artel prepare printed; a damaged one must be made anew"
        raise InputError([Problem(where, f"{each.where} {each.what}", fix) for each in error.problems]) from None
    manifest = store.manifest
    problems = []
    if manifest["objective"] != run.objective:
        what = f"{folder} holds samples of objective {manifest['objective']}, and the run's is {run.objective}"
        problems.append(Problem(where, what, f"write objective: {manifest['objective']}, or give another store"))
    name = run.tokenizer.from_
    trusted = name == run.model.trust_remote_code
    if run.tokenizer.train is not None or (
        name and load_tokenizer(name, runs_code=trusted).fingerprint != manifest["tokenizer"]
    ):
        what = f"{folder} was made by its own tokenizer, and the run names another"
        problems.append(Problem("tokenizer", what, "leave tokenizer out: the store has it"))
    if problems:
        raise InputError(problems)
