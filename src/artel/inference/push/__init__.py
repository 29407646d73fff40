"""`artel push`: upload a run's model, or a checkpoint, with a model card to the Hugging Face hub, or to a folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from artel.inference.push.hub import Hub
from artel.inference.push.pushed_model import PushedModel, PushOptions, find_model, write_folder
from artel.messages import logger
from artel.preparing import check_overlaps
from artel.storage import new_folder, scratch_folder

__all__ = ["PushOptions", "PushResult", "push"]


@dataclass(frozen=True, slots=True)
class PushResult:
    """A pushed model on the hub, or in the folder of a dry run."""

    repo: str
    revision: str
    files: dict[str, int]
    """Size in bytes by name."""
    step: int | None = None
    private: bool = True
    url: str = ""
    """Address of its page. Empty after a dry run."""
    commit: str = ""
    folder: str = ""
    """The folder of a dry run."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def push(name: str, repo: str, options: PushOptions) -> PushResult:
    """Upload the final model or a checkpoint of the run in the folder `name`, with a model card, as one commit.

    A missing repository is created, private by default. With `dry_run` the same files are written to a folder, and
    nothing is sent. Raise InputError for a problem with the run, the options or the token. Raise WorkError if the hub
    or the network fails: calling it again resumes the upload.
    """
    options.check(repo)
    model = find_model(name, options)
    revision = options.revision or model.revision
    if options.dry_run is not None:
        return _write_dry_run(model, repo, revision, options, options.dry_run)
    hub = Hub()
    repo = hub.full_name(repo)
    private = hub.prepare_repo(repo, public=options.public)
    with scratch_folder(model.folder.path / "push") as folder:
        _log_skipped(write_folder(model, repo, options, folder, links=True))
        files = _file_sizes(folder)
        visibility = "private" if private else "public"
        logger.info(
            "uploading %s files, %s MB, to %s (%s), %s",
            len(files),
            f"{sum(files.values()) / 1e6:,.1f}",
            repo,
            visibility,
            revision,
        )
        upload = hub.upload(folder, repo, revision, _commit_message(model))
    if upload.removed:
        logger.info("removed from the hub, since they belong to an earlier model: %s", ", ".join(upload.removed))
    logger.info("%s" if upload.changed else "%s: nothing has changed since the last push", upload.url)
    return PushResult(repo, revision, files, model.step, private, upload.url, upload.commit)


def _write_dry_run(model: PushedModel, repo: str, revision: str, options: PushOptions, target: Path) -> PushResult:
    """Write the files of an upload to a new folder."""
    check_overlaps(model.run, [("--dry-run", target)])
    with new_folder(target) as folder:
        _log_skipped(write_folder(model, repo, options, folder, links=False))
        files = _file_sizes(folder)
    for file, size in files.items():
        logger.info("%s bytes  %s", f"{size:>14,}", target / file)
    logger.info("nothing was uploaded; without --dry-run these files go to %s, %s", repo, revision)
    return PushResult(repo, revision, files, model.step, not options.public, folder=str(target))


def _file_sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _log_skipped(names: list[str]) -> None:
    if names:
        logger.info("not uploaded, since artel did not write it: %s", ", ".join(names))


def _commit_message(model: PushedModel) -> str:
    step = f" of step {model.step:,}" if model.step is not None else ""
    return f"{'Model' if model.checkpoint is None else 'Checkpoint'}{step}, pushed by artel"
