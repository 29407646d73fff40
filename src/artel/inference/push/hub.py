"""Access to the Hugging Face hub through huggingface_hub. Its errors become InputError and WorkError."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from artel.errors import ArtelError, InputError, WorkError
from artel.reports.model_card import MAIN

_LOG_IN = "log in once with hf auth login, or set HF_TOKEN: https://huggingface.co/settings/tokens (type: write)"
_RETRY = "run the same command again: files that were uploaded are not sent again"
_MODEL_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_MODEL_FILES = ("config.json", "adapter_config.json")


class Hub:
    """The hub, with the token of HF_TOKEN or `hf auth login`. HF_ENDPOINT names another hub."""

    def __init__(self) -> None:
        """Raise InputError if there is no token with write access, WorkError if the hub cannot be reached."""
        self._api = HfApi(library_name="artel")
        if constants.HF_HUB_OFFLINE:
            raise InputError.at("HF_HUB_OFFLINE", "is set, so the hub is not used", "unset it")
        with hub_errors(self._api.endpoint):
            user = self._api.whoami()
            self._user = str(user["name"])
            role = user.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise InputError.at(self._api.endpoint, f"the token of {self._user} has only read access", _LOG_IN)

    def full_name(self, repo: str) -> str:
        """Return OWNER/NAME. A name without an owner is the user's own."""
        return repo if "/" in repo else f"{self._user}/{repo}"

    def prepare_repo(self, repo: str, *, public: bool) -> bool:
        """Create the repository if it does not exist. Return True if it is private.

        Raise InputError if it exists and is private, but a public one was requested.
        """
        with hub_errors(repo):
            try:
                private = bool(self._api.repo_info(repo).private)
            except RepositoryNotFoundError:
                self._api.create_repo(repo, private=not public, exist_ok=True)
                return not public
        if public and private:
            fix = f"make it public there: {self._api.endpoint}/{repo}/settings; or remove --public"
            raise InputError.at(repo, "already exists and is private", fix)
        return private

    def upload(self, folder: Path, repo: str, revision: str, message: str) -> UploadResult:
        """Upload the folder as a commit on a branch, which is created if missing.

        The commit also deletes files of an earlier model that loaders would otherwise pick up.
        """
        with hub_errors(repo), _progress_bars_in_terminal():
            if revision != MAIN:
                self._api.create_branch(repo, branch=revision, exist_ok=True)
            old_commit = self._api.repo_info(repo, revision=revision).sha
            names = self._api.list_repo_files(repo, revision=revision)
            stale = [name for name in names if _selects_model(name) and not (folder / name).is_file()]
            commit = self._api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=revision,
                commit_message=message,
                delete_patterns=[glob.escape(name) for name in stale] or None,
            )
        url = f"{self._api.endpoint}/{repo}" + ("" if revision == MAIN else f"/tree/{revision}")
        return UploadResult(url, commit.oid, commit.oid != old_commit, tuple(stale))


@dataclass(frozen=True, slots=True)
class UploadResult:
    """A commit to the hub, and the model files that it removed."""

    url: str
    commit: str
    changed: bool
    """False if the hub already had these files."""
    removed: tuple[str, ...]


def _selects_model(name: str) -> bool:
    """True if a file decides which model is loaded from a repository."""
    return "/" not in name and (name in _MODEL_FILES or name.endswith(_MODEL_SUFFIXES))


@contextmanager
def _progress_bars_in_terminal() -> Iterator[None]:
    """Show the progress bars of huggingface_hub only in a terminal."""
    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def hub_errors(location: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into InputError, if the user can fix them, or WorkError."""
    try:
        yield
    except (ArtelError, KeyboardInterrupt):
        raise
    except Exception as error:
        artel_error = _as_artel_error(location, error)
        if artel_error is None:
            raise
        raise artel_error from error


def _as_artel_error(location: str, error: Exception) -> ArtelError | None:
    causes = list(_iterate_causes(error))
    if any(isinstance(cause, LocalTokenNotFoundError) for cause in causes):
        return InputError.at(location, "there is no token for the hub", _LOG_IN)
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return InputError.at("HF_HUB_OFFLINE", "is set, so the hub is not used", "unset it")
    http_error = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    if http_error is not None and http_error.response is not None:
        return _http_error(location, http_error)
    # Compare names, since huggingface_hub has changed its HTTP library.
    names = {base.__name__ for cause in causes for base in type(cause).__mro__}
    if names & {"TransportError", "ConnectionError", "TimeoutError"}:
        message = f"the hub cannot be reached: {_shorten(causes[-1])}"
        return WorkError.at(location, message, f"check the network, HF_ENDPOINT and proxies, and {_RETRY}")
    if isinstance(error, KeyError | IndexError | TypeError | AttributeError | JSONDecodeError):
        message = f"{constants.ENDPOINT} is not a Hugging Face hub ({_shorten(repr(error))})"
        return InputError.at(location, message, "set HF_ENDPOINT to the address of a hub, or unset it")
    if isinstance(error, ValueError | RuntimeError):  # from checks of responses and model cards, and from hf_xet
        return WorkError.at(location, f"the upload failed: {_shorten(error)}", _RETRY)
    return None


def _http_error(location: str, error: HfHubHTTPError) -> ArtelError:
    status = error.response.status_code
    message = _shorten(error.server_message or error.response.reason_phrase or error)
    if status == 401:
        return InputError.at(location, f"the hub does not accept the token (401): {message}", _LOG_IN)
    if status == 403:
        fix = "use a token with write access, or another OWNER"
        return InputError.at(location, f"the token has no write access there (403): {message}", fix)
    if status == 404:
        fix = "check OWNER/NAME, and the permissions of the token"
        return InputError.at(location, f"the hub has no such repository or revision (404): {message}", fix)
    if status == 409:
        return WorkError.at(location, f"the repository is being changed by another process (409): {message}", _RETRY)
    if status == 429:
        return WorkError.at(location, f"too many requests to the hub (429): {message}", f"wait, and {_RETRY}")
    if status >= 500:
        return WorkError.at(location, f"the hub failed ({status}): {message}", f"wait, and {_RETRY}")
    return InputError.at(location, f"the hub rejected the upload ({status}): {message}", "fix that, and push again")


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes, in order."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _shorten(message: Any) -> str:
    return " ".join(str(message).split())[:300] or type(message).__name__
