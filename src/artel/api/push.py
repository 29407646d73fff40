"""Push the model of a run to the Hugging Face hub, like the command `artel push`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from artel.api.process import leaves_process_unchanged

if TYPE_CHECKING:
    from artel.inference.push import PushResult


@leaves_process_unchanged(with_torch=True, prints=True)
def push(
    run: str | os.PathLike[str],
    repo: str,
    *,
    public: bool = False,
    step: int | str | None = None,
    revision: str | None = None,
    license: str | None = None,
    languages: Sequence[str] = (),
    base_model: str | None = None,
    dry_run: str | os.PathLike[str] | None = None,
) -> PushResult:
    """Upload the model of a run to the Hugging Face hub, with a model card made from the run: `artel push`.

    The token is HF_TOKEN or the one stored by `hf auth login`. An interrupted upload resumes.

    Args:
        run: the folder of a run.
        repo: OWNER/NAME, or NAME for a repository of your own. It is created if it does not exist.
        public: make a new repository public. By default it is private.
        step: push a checkpoint instead of the final model: a step number, "latest" or "best".
        revision: the branch. Default: main, or step-N for a checkpoint.
        license: the model's licence, as the hub names it: "apache-2.0".
        languages: language codes of the model: ("ru",). Default: those of `data.clean.languages`.
        base_model: hub id of the base model, if the run knows only its folder.
        dry_run: a new folder. The files are written there and nothing is uploaded.

    Returns:
        The upload: `repo`, `revision`, `url`, `commit`, `private`, `files` with their sizes in bytes, `step`, and
        `folder` for a dry run.

    Raise InputError for a wrong run, option or token, WorkError if the hub or the network fails.
    """
    from artel.launching.quiet_libraries import quiet_libraries

    quiet_libraries()
    from artel.inference.push import PushOptions
    from artel.inference.push import push as upload

    folder = None if dry_run is None else Path(dry_run)
    step_name = "" if step is None else str(step)
    options = PushOptions(public, step_name, revision or "", license or "", tuple(languages), base_model or "", folder)
    return upload(os.fspath(run), repo, options)
