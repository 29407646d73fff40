"""Weights & Biases: RUN/wandb, sent to its server only if an account is set up."""

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
from artel.training.metrics.tracker import Metrics, Tracker, add_prefix, save_id, saved_id, send_earlier
from artel.training.run_folder import RunFolder

_PROJECT = "artel"
_MIN_FREE_BYTES = 1 << 16
"""Free bytes below which the disk counts as full."""
_INIT_TIMEOUT, _FINISH_TIMEOUT = 30.0, 60.0
"""Seconds that a run waits for W&B's server at its start and its end. `wandb sync` sends what is missing."""


class WandbTracker(Tracker):
    """Logs to W&B: offline without a key, and without asking for one. W&B's own variables (WANDB_…) apply.

    A resumed run continues the same W&B run, and its server ignores steps that are repeated. Offline, a new folder gets
    all steps so far and replaces the earlier ones.
    """

    package = "wandb"
    wants_report = True

    def __init__(self, config: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # otherwise wandb sends its errors to its developers
        import wandb

        logging.getLogger("wandb").setLevel(logging.CRITICAL)  # on a full disk it logs a traceback per line
        run_id = os.environ.get("WANDB_RUN_ID") or saved_id(folder, self.package) or secrets.token_hex(8)
        is_online = (os.environ.get("WANDB_MODE") or "online") == "online"
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            project=_default_unless_set("WANDB_PROJECT", _PROJECT),
            name=_default_unless_set("WANDB_NAME", folder.path.name),
            dir=_default_unless_set("WANDB_DIR", str(folder.path.resolve())),
            mode="offline" if is_online and not _has_key() else None,
            config=hide_secrets(config.model_dump(mode="json", by_alias=True)),
            settings=wandb.Settings(**_build_settings()),
        )
        save_id(folder, self.package, run_id)
        self._is_offline = self._run.offline
        self._url = None if self._is_offline else self._run.url
        self._wandb_folder = Path(self._run.dir).parent
        self._replaces = self._is_offline and folder.metrics.exists()
        self._first_step = self._run.step
        """First step that W&B does not have yet. Only an online run knows the server's last step."""
        self._is_done = False
        self._files: list[Path] = []
        self._log_file(folder.config)
        send_earlier(self, folder, step, lambda kind, line_step: line_step < self._first_step)

    def log_training(self, metrics: Metrics) -> None:
        self._log(add_prefix("train", metrics), metrics["step"])

    def log_validation(self, metrics: Metrics) -> None:
        self._log(add_prefix("validation", metrics["validation"]), metrics["step"])

    def log_tasks(self, metrics: Metrics) -> None:
        self._log(add_prefix("validation", metrics["tasks"]), metrics["step"])

    def log_samples(self, lines: list[Metrics]) -> None:
        import wandb

        rows = [[line["step"], line["prompt"], line["text"]] for line in lines]
        self._log({"samples": wandb.Table(columns=["step", "prompt", "text"], data=rows)}, lines[0]["step"])

    def on_finish(self, report: Path | None) -> None:
        self._is_done = True
        if report is not None:
            self._log_file(report)

    def hint(self) -> str:
        return f"wandb sync {shlex.quote(str(self._wandb_folder))}" if self._is_offline else self._url or ""

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._is_done else 1)
        if self._replaces:
            for earlier in self._wandb_folder.parent.glob(f"offline-run-*-{self._run.id}"):
                if earlier != self._wandb_folder:
                    shutil.rmtree(earlier)

    def _log(self, metrics: dict[str, Any], step: int) -> None:
        if step < self._first_step:
            return
        if shutil.disk_usage(self._wandb_folder).free < _MIN_FREE_BYTES:  # wandb's writing process does not report it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._wandb_folder))
        self._run.log(metrics, step=step)

    def _log_file(self, file: Path) -> None:
        """Log a new version of the run's artifact that includes `file`. W&B reads the copies later."""
        import wandb

        copies = self._wandb_folder / "artel"
        copies.mkdir(exist_ok=True)
        self._files.append(Path(shutil.copy(file, copies)))
        artifact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for copy in self._files:
            artifact.add_file(str(copy), policy="immutable")
        self._run.log_artifact(artifact)


def _build_settings() -> dict[str, Any]:
    settings: dict[str, Any] = {
        "silent": True,
        "console": "off",  # do not capture the terminal's output
        "reinit": "create_new",  # do not change a W&B run started by the user
        "disable_git": True,
        "x_disable_meta": True,  # metadata has the command line, including secrets
    }
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings["init_timeout"] = _INIT_TIMEOUT
    if "WANDB_FINISH_TIMEOUT" not in os.environ:
        settings |= {"finish_timeout": _FINISH_TIMEOUT, "finish_timeout_raises": True}
    return settings


def _default_unless_set(variable: str, value: str) -> str | None:
    """Return `value`, or None if the variable is set: an argument of `wandb.init` would override it."""
    return None if os.environ.get(variable) else value


def _has_key() -> bool:
    """True if an account is set up, by variables or by `wandb login`."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
