"""Weights & Biases: RUN/wandb, sent to its server only where an account is set up."""

from __future__ import annotations

import errno
import logging
import netrc
import os
import secrets
import shlex
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from artel.config import RunConfig
from artel.secrets import hide_secrets
from artel.training.metrics.other_runs import keep_id, kept_id, send_earlier
from artel.training.metrics.tracker import Figures, Tracker, by_name
from artel.training.run_folder import RunFolder

_PROJECT = "artel"
_LEAST_ROOM = 1 << 16
"""Bytes of a disk that is not yet full."""
_SECONDS_TO_BEGIN, _SECONDS_TO_FINISH = 30.0, 60.0
"""How long a run waits for W&B's server at its beginning and its end; `wandb sync` sends the rest."""


class WandbTracker(Tracker):
    """Offline without a key: never a prompt, never a wait for an account. W&B's own variables (WANDB_…) hold.

    A resumed run goes on with the same run of W&B. Its server keeps what it has and drops the steps that are done
    again. Offline there is no server: the new folder gets all steps so far, and takes the place of those before.
    """

    package = "wandb"
    keeps_report = True

    def __init__(self, run: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to the makers of wandb, of its own errors
        import wandb

        logging.getLogger("wandb").setLevel(logging.CRITICAL)  # on a full disk each line of its log is a traceback
        its_id = os.environ.get("WANDB_RUN_ID") or kept_id(folder, self.package) or secrets.token_hex(8)
        is_online = (os.environ.get("WANDB_MODE") or "online") == "online"
        self._run = wandb.init(
            id=its_id,
            resume="allow",
            project=_unless_set("WANDB_PROJECT", _PROJECT),
            name=_unless_set("WANDB_NAME", folder.path.name),
            dir=_unless_set("WANDB_DIR", str(folder.path.resolve())),
            mode="offline" if is_online and not _has_key() else None,
            config=hide_secrets(run.model_dump(mode="json", by_alias=True)),
            settings=wandb.Settings(**_settings()),
        )
        keep_id(folder, self.package, its_id)
        self._is_offline = self._run.offline
        self._url = None if self._is_offline else self._run.url
        self._own_folder = Path(self._run.dir).parent
        self._replaces = self._is_offline and folder.metrics.exists()
        self._begins = self._run.step
        """The first step that W&B has not: its server's last one is known to an online run alone."""
        self._is_done = False
        self._files: list[Path] = []
        self._keep(folder.config)
        send_earlier(self, folder, step, lambda kind, number: number < self._begins)

    def training(self, figures: Figures) -> None:
        self._log(by_name("train", figures), figures["step"])

    def validation(self, figures: Figures) -> None:
        self._log(by_name("validation", figures["validation"]), figures["step"])

    def tasks(self, figures: Figures) -> None:
        self._log(by_name("validation", figures["tasks"]), figures["step"])

    def samples(self, lines: list[Figures]) -> None:
        import wandb

        rows = [[line["step"], line["prompt"], line["text"]] for line in lines]
        self._log({"samples": wandb.Table(columns=["step", "prompt", "text"], data=rows)}, lines[0]["step"])

    def finished(self, report: Path | None) -> None:
        self._is_done = True
        if report is not None:
            self._keep(report)

    def hint(self) -> str:
        return f"wandb sync {shlex.quote(str(self._own_folder))}" if self._is_offline else self._url or ""

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._is_done else 1)
        if self._replaces:
            for earlier in self._own_folder.parent.glob(f"offline-run-*-{self._run.id}"):
                if earlier != self._own_folder:
                    shutil.rmtree(earlier)

    def _log(self, figures: dict[str, Any], step: int) -> None:
        if step < self._begins:
            return
        if shutil.disk_usage(self._own_folder).free < _LEAST_ROOM:  # the process that writes does not tell
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._own_folder))
        self._run.log(figures, step=step)

    def _keep(self, file: Path) -> None:
        """A version of the run's artifact with one file more; W&B reads the files later, from its own folder."""
        import wandb

        own = self._own_folder / "artel"
        own.mkdir(exist_ok=True)
        self._files.append(Path(shutil.copy(file, own)))
        artifact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for each in self._files:
            artifact.add_file(str(each), policy="immutable")
        self._run.log_artifact(artifact)


def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = {
        "silent": True,
        "console": "off",  # what a run prints is not taken from the terminal
        "reinit": "create_new",  # a run of W&B that the user has begun stays as it is
        "disable_git": True,
        "x_disable_meta": True,  # it has the command line, with what is secret in it
    }
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings["init_timeout"] = _SECONDS_TO_BEGIN
    if "WANDB_FINISH_TIMEOUT" not in os.environ:
        settings |= {"finish_timeout": _SECONDS_TO_FINISH, "finish_timeout_raises": True}
    return settings


def _unless_set(variable: str, value: str) -> str | None:
    """An argument of `wandb.init` would go before the variable."""
    return None if os.environ.get(variable) else value


def _has_key() -> bool:
    """Whether an account is set up, by variables or by `wandb login`."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
