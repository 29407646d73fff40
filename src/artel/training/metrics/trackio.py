"""trackio: a database on this machine; sent to a Space or a server only where its own variables name one."""

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
from artel.training.metrics.other_runs import keep_id, kept_id, send_earlier
from artel.training.metrics.tracker import Figures, Tracker, by_name
from artel.training.run_folder import RunFolder

_PROJECT = "artel"


class TrackioTracker(Tracker):
    """trackio knows a run by its name, which is the folder's with a few letters that no other run has.

    A resumed run goes on under the same name. In the database of this machine it gets all steps so far, in the place of
    what was there: the steps that are done again stand once. A Space or a server keeps what it has.
    """

    package = "trackio"
    keeps_report = True

    def __init__(self, run: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        self._is_local = not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))
        self._project = os.environ.get("TRACKIO_PROJECT") or _PROJECT
        earlier = kept_id(folder, self.package)
        self._name = earlier or f"{folder.path.name}-{secrets.token_hex(3)}"
        replaces = earlier is not None and self._is_local and folder.metrics.exists()
        with _quiet(offline=self._is_local):
            import trackio

            if replaces:
                _delete(self._project, self._name)
            # In a context of its own: a run of trackio that the user has begun stays as it is.
            self._run = copy_context().run(
                trackio.init,
                project=self._project,
                name=self._name,
                resume="allow",
                config=hide_secrets(run.model_dump(mode="json", by_alias=True)),
                embed=False,
            )
        keep_id(folder, self.package, self._name)
        self._keep(folder.config, "run-file")
        if replaces or not earlier:
            send_earlier(self, folder, step, lambda kind, number: False)

    def training(self, figures: Figures) -> None:
        self._run.log(by_name("train", figures), step=figures["step"])

    def validation(self, figures: Figures) -> None:
        self._run.log(by_name("validation", figures["validation"]), step=figures["step"])

    def tasks(self, figures: Figures) -> None:
        self._run.log(by_name("validation", figures["tasks"]), step=figures["step"])

    def samples(self, lines: list[Figures]) -> None:
        import trackio

        self._run.log({"samples": trackio.Table(data=lines)}, step=lines[0]["step"])

    def finished(self, report: Path | None) -> None:
        if report is not None:
            self._keep(report, "report")

    def hint(self) -> str:
        return f"trackio show --project {shlex.quote(self._project)}" if self._is_local else ""

    def close(self) -> None:
        with _quiet(offline=self._is_local):
            self._run.finish()

    def _keep(self, file: Path, name: str) -> None:
        self._run.log_artifact(file, name=f"{self._name}-{name}", type="run")


def _delete(project: str, name: str) -> None:
    """Remove a run from the database of this machine, where it is there."""
    import trackio

    try:
        runs = trackio.Api().runs(project)
    except ValueError:  # there is no such project: TRACKIO_DIR was another one
        return
    for run in runs:
        if run.name == name:
            run.delete()


@contextmanager
def _quiet(*, offline: bool) -> Iterator[None]:
    """trackio prints to standard output, which is for `--json`, and asks the hub for the name of a token's owner."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or offline
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
