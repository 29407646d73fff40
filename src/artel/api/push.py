"""A run's model on the Hugging Face hub: the verb of the same name, in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from artel.api.process import Tell, leaves_process_unchanged, tell

if TYPE_CHECKING:
    from artel.inference.push import Pushed


@leaves_process_unchanged(with_torch=True)
def push(
    run: str | os.PathLike[str],
    repo: str,
    *,
    public: bool = False,
    step: int | str | None = None,
    revision: str | None = None,
    message: str | None = None,
    license: str | None = None,
    languages: Sequence[str] = (),
    base_model: str | None = None,
    dry_run: str | os.PathLike[str] | None = None,
    tell: Tell = tell,
) -> Pushed:
    """Upload the model of a run to the Hugging Face hub, with a model card made from the run: `artel push`.

    The token is HF_TOKEN, or what `hf auth login` stored. An upload that was cut goes on where it ended.

    Args:
        run: the folder of a run.
        repo: OWNER/NAME; NAME alone is one of your own. It is made if it is not there.
        public: make the new repository public; it is private without this.
        step: a checkpoint in place of the final model: the number of its step, "latest" or "best".
        revision: the branch; by default main, or step-N of a checkpoint.
        message: of the commit.
        license: of the model, as the hub names it: "apache-2.0".
        languages: codes of what the model writes: ("ru",). By default those of `data.clean.languages`.
        base_model: the hub id of the model that training began with, where the run knows a folder only.
        dry_run: a new folder to write what would be uploaded into; nothing is sent.
        tell: is called with each message for people, a line of text.

    Returns:
        What lies there now: `repo`, `revision`, `url`, `commit`, `private`, `files` with their bytes, `step`; `folder`
        of a dry run.

    Raises InputError for what is wrong with the run, the options and the token, WorkError where the hub or the network
    fails.
    """
    from artel.launching.quiet_libraries import quiet_libraries

    quiet_libraries()
    from artel.inference.push import PushOptions
    from artel.inference.push import push as upload

    folder = None if dry_run is None else Path(dry_run)
    at = "" if step is None else str(step)
    options = PushOptions(
        public, at, revision or "", message or "", license or "", tuple(languages), base_model or "", folder
    )
    return upload(os.fspath(run), repo, options, tell)
