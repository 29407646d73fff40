"""`artel push`: the model of a run, or a checkpoint, and its model card to the hub, or into a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from artel.inference.push.hub import Hub
from artel.inference.push.model import PushedModel, find_model, write_folder
from artel.inference.push.options import PushOptions
from artel.preparing import refuse_overlaps
from artel.storage import new_folder, scratch_folder

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pushed:
    """What lies on the hub now, or in the folder of a dry run."""

    repo: str
    revision: str
    files: dict[str, int]
    """Bytes by name."""
    step: int | None = None
    private: bool = True
    url: str = ""
    """Of its page; empty where nothing was sent."""
    commit: str = ""
    folder: str = ""
    """Of a dry run."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def push(name: str, repo: str, options: PushOptions, tell: Tell) -> Pushed:
    """Upload the final model of the run in the folder `name`, or a checkpoint, with a model card: a commit on a branch.

    A repository that is not there is made, private unless the options say otherwise. With `dry_run` the same files are
    written to a folder, and nothing is sent. Raises InputError for what is wrong with the run, the options and the
    token, WorkError where the hub or the network fails; the same call again goes on where it ended.
    """
    options.check(repo)
    model = find_model(name, options)
    revision = options.revision or model.revision
    if options.dry_run is not None:
        return _write(model, repo, revision, options, options.dry_run, tell)
    hub = Hub()
    repo = hub.full_name(repo)
    private = hub.ready(repo, public=options.public)
    with scratch_folder(model.folder.path / "push") as folder:
        _tell_left_out(write_folder(model, repo, options, folder, links=True), tell)
        files = _sizes(folder)
        whose = "private" if private else "public"
        tell(f"uploading {len(files)} files, {sum(files.values()) / 1e6:,.1f} MB, to {repo} ({whose}), {revision}")
        done = hub.upload(folder, repo, revision, options.message or _message(model))
    if done.removed:
        tell(f"removed there, being of an earlier model: {', '.join(done.removed)}")
    tell(f"{done.url}" if done.changed else f"{done.url}: nothing has changed since it was pushed last")
    return Pushed(repo, revision, files, model.step, private, done.url, done.commit)


def _write(model: PushedModel, repo: str, revision: str, options: PushOptions, into: Path, tell: Tell) -> Pushed:
    """Write what would be uploaded to a new folder."""
    refuse_overlaps(model.run, [("--dry-run", into)])
    with new_folder(into) as folder:
        _tell_left_out(write_folder(model, repo, options, folder, links=False), tell)
        files = _sizes(folder)
    for file, size in files.items():
        tell(f"{size:>14,} bytes  {into / file}")
    tell(f"nothing was sent; without --dry-run these files are uploaded to {repo}, {revision}")
    return Pushed(repo, revision, files, model.step, not options.public, folder=str(into))


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _tell_left_out(names: list[str], tell: Tell) -> None:
    if names:
        tell(f"left out, since artel did not write it: {', '.join(names)}")


def _message(model: PushedModel) -> str:
    at = f" of step {model.step:,}" if model.step is not None else ""
    return f"{'Model' if model.checkpoint is None else 'Checkpoint'}{at}, pushed by artel"
