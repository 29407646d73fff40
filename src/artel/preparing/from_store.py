"""The store that a run names (`data.from_store`), so that it needs no texts."""

from __future__ import annotations

from pathlib import Path

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.objectives import objective_of
from artel.tokens import TokenStore, load_tokenizer


def check_from_store(run: RunConfig, *, verify: bool = False) -> None:
    """Raise InputError if it is no store, damaged, of another objective or tokenizer, or teaches nothing.

    With `verify` all of it is read.
    """
    folder = Path(run.data.from_store or "")
    key = "data.from_store"
    try:
        store = TokenStore(folder)
        if verify:
            store.verify(load_tokenizer(str(folder / "tokenizer")).vocabulary)
    except InputError as error:
        fix = "give the folder that artel data import or artel prepare printed; a damaged one must be made again"
        raise InputError([Problem(key, f"{problem.where} {problem.what}", fix) for problem in error.problems]) from None
    manifest = store.manifest
    problems = []
    if manifest["objective"] != run.objective:
        what = f"{folder} holds samples of objective {manifest['objective']}, and the run's is {run.objective}"
        problems.append(Problem(key, what, f"write objective: {manifest['objective']}, or give another store"))
    name = run.tokenizer.from_
    is_trusted = name == run.model.trust_remote_code
    if run.tokenizer.train is not None or (
        name and load_tokenizer(name, runs_code=is_trusted).fingerprint != manifest["tokenizer"]
    ):
        what = f"{folder} was made by its own tokenizer, and the run names another"
        problems.append(Problem("tokenizer", what, "leave tokenizer out: the store has it"))
    if problems:
        raise InputError(problems)
    objective_of(run, load_tokenizer(str(folder / "tokenizer"))).check_store(store)
