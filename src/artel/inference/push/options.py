"""What is said of a push beside the run and the repository, checked before anything is read or sent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from artel.errors import InputError, Problem
from artel.reports.model_card import MAIN
from artel.storage import check_new

_ADDRESS = re.compile(r"(?:https?://[^/]+/|hf://(?:models/)?)([\w.-]+/[\w.-]+?)/?$")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]+)*")
_BRANCH = re.compile(r"(?!.*(?:\.\.|//|@\{))[\w][\w./-]*(?<![./])")


@dataclass(frozen=True, slots=True)
class PushOptions:
    public: bool = False
    """A new repository is private unless this is said."""
    step: str = ""
    """A checkpoint in place of the final model: the number of its step, latest or best."""
    revision: str = ""
    """The branch; by default main, or step-N of a checkpoint."""
    message: str = ""
    """Of the commit."""
    license: str = ""
    """Of the model, as the hub names it: apache-2.0."""
    languages: tuple[str, ...] = ()
    """Codes of what the model writes: ru, en. By default those of data.clean.languages."""
    base_model: str = ""
    """The hub id of the model that training began with, where the run knows a folder only."""
    dry_run: Path | None = None
    """The folder to write; nothing is sent then."""

    def check(self, repo: str) -> None:
        """Raise InputError with all that is wrong with the repository's name and the options."""
        problems = list(self._problems(repo))
        if problems:
            raise InputError(problems)
        if self.dry_run is not None:
            check_new(self.dry_run)

    def _problems(self, repo: str) -> Iterator[Problem]:
        yield from _id_problems("REPO", repo, bare=True)
        if self.base_model:
            yield from _id_problems("--base-model", self.base_model, bare=False)
        if self.step and not re.fullmatch(r"\d+|latest|best", self.step):
            fix = "write the number of a checkpoint's step, latest or best"
            yield Problem("--step", f"{self.step!r} is no step", fix)
        if self.revision and not _BRANCH.fullmatch(self.revision):
            fix = f"write a name, as {MAIN} or step-1500"
            yield Problem("--revision", f"{self.revision!r} cannot be a branch", fix)
        if self.license and not _LICENSE.fullmatch(self.license):
            fix = "write it as the hub names licences: apache-2.0, cc-by-4.0, other"
            yield Problem("--license", f"{self.license!r} is no name of a licence", fix)
        for language in self.languages:
            if not _LANGUAGE.fullmatch(language):
                yield Problem("--language", f"{language!r} is no code of a language", "write it by ISO 639: en, ru")


def is_repo_id(name: str) -> bool:
    """Whether the hub could have a repository of that name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _id_problems(where: str, name: str, *, bare: bool) -> Iterator[Problem]:
    """What is wrong with the id of a repository; a `bare` one has no owner: it is the user's own."""
    fix = "write OWNER/NAME: letters, digits, - _ . in each"
    address = _ADDRESS.match(name)
    if address is not None:
        yield Problem(where, f"{name} is an address, not the name of a repository", f"write {address[1]}")
        return
    if os.path.lexists(name) and not bare:
        yield Problem(where, f"{name} is a folder here, not the name of a repository", fix)
        return
    if not is_repo_id(name):
        yield Problem(where, f"{name!r} is no name of a repository of the hub", fix)
        return
    if "/" not in name and not bare:
        yield Problem(where, f"{name} names no owner", fix)
