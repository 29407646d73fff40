"""MLflow: the server or store named by MLFLOW_TRACKING_URI, by default mlflow.db next to mlruns."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from artel.config import RunConfig
from artel.secrets import hide_secrets
from artel.training.metrics.tracker import Metrics, Tracker, add_prefix, read_samples, save_id, saved_id, send_earlier
from artel.training.run_folder import RunFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

_EXPERIMENT = "artel"
_SAMPLES = "samples.json"
_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Give up on an unreachable server after half a minute, not four: the start and the end of a run wait for it.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
_METRICS_PER_REQUEST = 1000  # no server accepts more


class MlflowTracker(Tracker):
    """Sends all pending metrics in one request, from a thread, so that training does not wait for the server.

    A resumed run continues the same MLflow run. MLflow keeps every value it gets, so repeated steps are not sent again.
    """

    package = "mlflow"
    wants_report = True

    def __init__(self, config: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client, self._folder = MlflowClient(), folder
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._failure: Exception | None = None
        self._pending: list[Metric] = []
        self._is_done = False
        earlier = _find_earlier_run(self._client, saved_id(folder, self.package))
        run = earlier or _start_run(self._client, folder.path.name, config)
        self._id, self._experiment = run.info.run_id, run.info.experiment_id
        save_id(folder, self.package, self._id)
        self._sent = set(_iterate_sent_steps(self._client, run)) if earlier else set()
        if earlier:
            self._client.update_run(self._id, status="RUNNING")
        # MLflow shows artifacts named in this tag as tables.
        tables = orjson.dumps([{"path": _SAMPLES, "type": "table"}]).decode()
        self._client.set_tag(self._id, "mlflow.loggedArtifacts", tables)
        self._submit(self._client.log_artifact, self._id, str(folder.config))
        send_earlier(self, folder, step, lambda kind, line_step: (kind, line_step) in self._sent)

    def log_training(self, metrics: Metrics) -> None:
        self._log("training", add_prefix("train", metrics), metrics["step"])

    def log_validation(self, metrics: Metrics) -> None:
        self._log("validation", add_prefix("validation", metrics["validation"]), metrics["step"])

    def log_tasks(self, metrics: Metrics) -> None:
        self._log("tasks", add_prefix("validation", metrics["tasks"]), metrics["step"])

    def log_samples(self, lines: list[Metrics]) -> None:
        """Write the table of all samples so far again."""
        rows = [[line["step"], line["prompt"], line["text"]] for line in read_samples(self._folder)]
        self._submit(self._client.log_dict, self._id, {"columns": ["step", "prompt", "text"], "data": rows}, _SAMPLES)

    def on_finish(self, report: Path | None) -> None:
        self._is_done = True
        if report is not None:
            self._submit(self._client.log_artifact, self._id, str(report)).result()

    def hint(self) -> str:
        address = self._client.tracking_uri
        if not address.startswith("http"):
            return ""  # `mlflow ui` needs the full mlflow package, which may be missing
        return hide_secrets(f"{address.rstrip('/')}/#/experiments/{self._experiment}/runs/{self._id}")

    def close(self) -> None:
        self._submit(self._client.set_terminated, self._id, "FINISHED" if self._is_done else "KILLED")
        self._worker.shutdown()
        self._raise_failure()

    def _log(self, kind: str, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        if (kind, step) in self._sent:
            return
        now = int(1000 * time.time())
        self._pending += [Metric(name, value, now, step) for name, value in metrics.items()]
        self._submit(self._send_pending)

    def _send_pending(self) -> None:
        """Send all pending metrics. Does nothing if an earlier call has sent them."""
        while self._pending:
            chunk = self._pending[:_METRICS_PER_REQUEST]
            self._client.log_batch(self._id, chunk)
            del self._pending[: len(chunk)]

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[None]:
        self._raise_failure()
        return self._worker.submit(self._call_in_thread, function, *arguments)

    def _call_in_thread(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run in the thread. Send nothing more after a failure: a request to an unreachable server takes long."""
        if self._failure is None:
            try:
                function(*arguments)
            except Exception as error:
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _find_earlier_run(client: MlflowClient, run_id: str | None) -> Run | None:
    """Return the MLflow run of an earlier start, or None if this store has none."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _start_run(client: MlflowClient, name: str, config: RunConfig) -> Run:
    from mlflow.entities import Param

    experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or _find_experiment(
        client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
    )
    run = client.create_run(experiment, run_name=name)
    values = hide_secrets(config.model_dump(mode="json", by_alias=True))
    params = [Param(key, value) for key, value in _flatten(values)]
    for start in range(0, len(params), 100):  # at most 100 per request
        client.log_batch(run.info.run_id, params=params[start : start + 100])
    return run


def _find_experiment(client: MlflowClient, name: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return experiment.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:  # another run has just created it
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return experiment.experiment_id


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and their values as text."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else orjson.dumps(value).decode()


def _iterate_sent_steps(client: MlflowClient, run: Run) -> Iterator[tuple[str, int]]:
    """Yield (kind, step) of all metrics in MLflow. One metric per kind is enough, since a step is sent as a whole."""
    for kind, pattern in (("training", "train/.*"), ("validation", "validation/[^/]*"), ("tasks", "validation/.*/.*")):
        names = [name for name in run.data.metrics if re.fullmatch(pattern, name)]
        if names:
            yield from ((kind, metric.step) for metric in client.get_metric_history(run.info.run_id, names[0]))
