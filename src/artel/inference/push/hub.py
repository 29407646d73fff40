"""The hub: a repository that is there, a branch, an upload. huggingface_hub does the work; its errors become ours."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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

_LOG_IN = "log in once with hf auth login, or set HF_TOKEN: https://huggingface.co/settings/tokens (of the kind write)"
_AGAIN = "run the same command again: what was uploaded is not sent again"
_DECIDES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_NAMES = ("config.json", "adapter_config.json")


class Hub:
    """The hub as the owner of the token sees it: HF_TOKEN, or what hf auth login stored. HF_ENDPOINT names another."""

    def __init__(self) -> None:
        """Raises InputError where there is no token, or it may not write; WorkError where the hub is out of reach."""
        self._api = HfApi(library_name="artel")
        if constants.HF_HUB_OFFLINE:
            raise InputError.at("HF_HUB_OFFLINE", "is set, and says not to go to the hub", "unset it")
        with hub_errors(self._api.endpoint):
            user = self._api.whoami()
            self._user = str(user["name"])
            role = user.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise InputError.at(self._api.endpoint, f"the token of {self._user} may only read", _LOG_IN)

    def full_name(self, repo: str) -> str:
        """OWNER/NAME; a name alone is one of the user's own."""
        return repo if "/" in repo else f"{self._user}/{repo}"

    def ready(self, repo: str, *, public: bool) -> bool:
        """Make the repository if there is none; whether it is private. One that is there stays as it is.

        Raises InputError where a private one is there and a public one was asked for.
        """
        with hub_errors(repo):
            try:
                private = bool(self._api.repo_info(repo).private)
            except RepositoryNotFoundError:
                self._api.create_repo(repo, private=not public, exist_ok=True)
                return not public
        if public and private:
            fix = f"make it public there: {self._api.endpoint}/{repo}/settings; or leave --public out"
            raise InputError.at(repo, "is there already, and is private", fix)
        return private

    def upload(self, folder: Path, repo: str, revision: str, message: str) -> Uploaded:
        """Upload the folder as a commit on a branch, which is made if it is not there.

        Weights and configurations of an earlier model are removed in the same commit: loaders would take them first.
        """
        with hub_errors(repo), _progress():
            if revision != MAIN:
                self._api.create_branch(repo, branch=revision, exist_ok=True)
            before = self._api.repo_info(repo, revision=revision).sha
            there = self._api.list_repo_files(repo, revision=revision)
            stale = [name for name in there if _decides(name) and not (folder / name).is_file()]
            commit = self._api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=revision,
                commit_message=message,
                delete_patterns=[glob.escape(name) for name in stale] or None,
            )
        url = f"{self._api.endpoint}/{repo}" + ("" if revision == MAIN else f"/tree/{revision}")
        return Uploaded(url, commit.oid, commit.oid != before, tuple(stale))


class Uploaded:
    """What an upload came to."""

    def __init__(self, url: str, commit: str, changed: bool, removed: tuple[str, ...]) -> None:
        self.url, self.commit, self.changed, self.removed = url, commit, changed, removed


def _decides(name: str) -> bool:
    """Whether a file of a repository decides which model is loaded from it."""
    return "/" not in name and (name in _NAMES or name.endswith(_DECIDES))


@contextmanager
def _progress() -> Iterator[None]:
    """Bars of huggingface_hub where there is a terminal to draw them on."""
    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def hub_errors(where: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one clear message: InputError for what a user can mend, else WorkError."""
    try:
        yield
    except (ArtelError, KeyboardInterrupt):
        raise
    except Exception as error:
        known = _as_artel_error(where, error)
        if known is None:
            raise
        raise known from error


def _as_artel_error(where: str, error: Exception) -> ArtelError | None:
    causes = list(_causes(error))
    if any(isinstance(cause, LocalTokenNotFoundError) for cause in causes):
        return InputError.at(where, "there is no token for the hub", _LOG_IN)
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return InputError.at("HF_HUB_OFFLINE", "is set, and says not to go to the hub", "unset it")
    refused = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    if refused is not None and refused.response is not None:
        return _refusal(where, refused)
    # By name, since huggingface_hub has changed the library that it asks by.
    names = {base.__name__ for cause in causes for base in type(cause).__mro__}
    if names & {"TransportError", "ConnectionError", "TimeoutError"}:
        what = f"the hub cannot be reached: {_in_short(causes[-1])}"
        return WorkError.at(where, what, f"check the network, HF_ENDPOINT and proxies, and {_AGAIN}")
    if isinstance(error, KeyError | IndexError | TypeError | AttributeError | JSONDecodeError):
        what = f"{constants.ENDPOINT} does not answer as a Hugging Face hub does ({_in_short(repr(error))})"
        return InputError.at(where, what, "set HF_ENDPOINT to the address of a hub, or unset it")
    if isinstance(error, ValueError | RuntimeError):  # of its checks of answers and of a card, and of hf_xet
        return WorkError.at(where, f"the upload failed: {_in_short(error)}", _AGAIN)
    return None


def _refusal(where: str, error: HfHubHTTPError) -> ArtelError:
    """The error for an answer of the hub that is no success."""
    status = error.response.status_code
    said = _in_short(error.server_message or error.response.reason_phrase or error)
    if status == 401:
        return InputError.at(where, f"the hub does not accept the token (401): {said}", _LOG_IN)
    if status == 403:
        fix = "give a token that may write there, or another OWNER"
        return InputError.at(where, f"the token may not write there (403): {said}", fix)
    if status == 404:
        fix = "check OWNER/NAME, and that the token may see it"
        return InputError.at(where, f"the hub has no such repository or revision (404): {said}", fix)
    if status == 409:
        return WorkError.at(where, f"something else changes the repository just now (409): {said}", _AGAIN)
    if status == 429:
        return WorkError.at(where, f"the hub takes no more requests for now (429): {said}", f"wait, and {_AGAIN}")
    if status >= 500:
        return WorkError.at(where, f"the hub fails ({status}): {said}", f"wait, and {_AGAIN}")
    return InputError.at(where, f"the hub refuses ({status}): {said}", "mend what it says, and push again")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from, in order."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _in_short(message: Any) -> str:
    return " ".join(str(message).split())[:300] or type(message).__name__
