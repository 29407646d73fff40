"""trackio: a database on this machine, or a Space or server if trackio's environment variables name one."""

from __future__ import annotations

import io
import os
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import copy_context
from pathlib import Path

from artel.config import RunConfig
from artel.secrets import hide_secrets
from artel.training.metrics.tracker import Metrics, Tracker, add_prefix, save_id, saved_id, send_earlier
from artel.training.run_folder import RunFolder

_PROJECT = "artel"


class TrackioTracker(Tracker):
    """trackio identifies a run by name: the folder's, plus a few random letters.

    A resumed run keeps its name. In the local database all steps so far replace the earlier ones, so repeated steps
    appear once. A Space or a server keeps what it has.
    """

    package = "trackio"
    wants_report = True

    def __init__(self, config: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        self._is_local = not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))
        self._project = os.environ.get("TRACKIO_PROJECT") or _PROJECT
        earlier = saved_id(folder, self.package)
        self._name = earlier or f"{folder.path.name}-{secrets.token_hex(3)}"
        replaces = earlier is not None and self._is_local and folder.metrics.exists()
        with _suppress_output(offline=self._is_local):
            import trackio

            if replaces:
                _delete(self._project, self._name)
            # In a separate context, so that a trackio run started by the user is not changed.
            self._run = copy_context().run(
                trackio.init,
                project=self._project,
                name=self._name,
                resume="allow",
                config=hide_secrets(config.model_dump(mode="json", by_alias=True)),
                embed=False,
            )
        save_id(folder, self.package, self._name)
        self._log_file(folder.config, "run-file")
        if replaces or not earlier:
            send_earlier(self, folder, step, lambda kind, line_step: False)

    def log_training(self, metrics: Metrics) -> None:
        self._run.log(add_prefix("train", metrics), step=metrics["step"])

    def log_validation(self, metrics: Metrics) -> None:
        self._run.log(add_prefix("validation", metrics["validation"]), step=metrics["step"])

    def log_tasks(self, metrics: Metrics) -> None:
        self._run.log(add_prefix("validation", metrics["tasks"]), step=metrics["step"])

    def log_samples(self, lines: list[Metrics]) -> None:
        import trackio

        self._run.log({"samples": trackio.Table(data=lines)}, step=lines[0]["step"])

    def on_finish(self, report: Path | None) -> None:
        if report is not None:
            self._log_file(report, "report")

    def hint(self) -> str:
        return f"trackio show --project {shlex.quote(self._project)}" if self._is_local else ""

    def close(self) -> None:
        with _suppress_output(offline=self._is_local):
            self._run.finish()

    def _log_file(self, file: Path, name: str) -> None:
        self._run.log_artifact(file, name=f"{self._name}-{name}", type="run")


def _delete(project: str, name: str) -> None:
    """Remove a run from the local database, if it is there."""
    import trackio

    try:
        runs = trackio.Api().runs(project)
    except ValueError:  # no such project: TRACKIO_DIR has changed
        return
    for run in runs:
        if run.name == name:
            run.delete()


@contextmanager
def _suppress_output(*, offline: bool) -> Iterator[None]:
    """Keep trackio from printing to standard output (reserved for `--json`), and from asking the hub about a token."""
    from huggingface_hub import constants

    original = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = original or offline
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        constants.HF_HUB_OFFLINE = original
