"""MLflow: the server or the store that its own variables name (MLFLOW_TRACKING_URI), else mlflow.db beside mlruns."""

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
from artel.training.metrics.other_runs import keep_id, kept_id, read_samples, send_earlier
from artel.training.metrics.tracker import Figures, Tracker, by_name
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
    # A server that is gone is given up after half a minute, not after four: the start and the end of a run wait for it.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
_METRICS_A_REQUEST = 1000  # no server takes more


class MlflowTracker(Tracker):
    """Training does not wait for the server: a thread sends, all that waits in one request.

    A resumed run goes on with the same run of MLflow. MLflow keeps every value that it gets, so that a step that is
    done again is not sent again.
    """

    package = "mlflow"
    keeps_report = True

    def __init__(self, run: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client, self._folder = MlflowClient(), folder
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._failure: Exception | None = None
        self._waiting: list[Metric] = []
        self._is_done = False
        earlier = _earlier_run(self._client, kept_id(folder, self.package))
        its_run = earlier or _begin_run(self._client, folder.path.name, run)
        self._id, self._experiment = its_run.info.run_id, its_run.info.experiment_id
        keep_id(folder, self.package, self._id)
        self._has = set(_steps(self._client, its_run)) if earlier else set()
        if earlier:
            self._client.update_run(self._id, status="RUNNING")
        self._client.set_tag(self._id, "mlflow.loggedArtifacts", _table_tag(_SAMPLES))
        self._submit(self._client.log_artifact, self._id, str(folder.config))
        send_earlier(self, folder, step, lambda kind, number: (kind, number) in self._has)

    def training(self, figures: Figures) -> None:
        self._log("training", by_name("train", figures), figures["step"])

    def validation(self, figures: Figures) -> None:
        self._log("validation", by_name("validation", figures["validation"]), figures["step"])

    def tasks(self, figures: Figures) -> None:
        self._log("tasks", by_name("validation", figures["tasks"]), figures["step"])

    def samples(self, lines: list[Figures]) -> None:
        """One table of all samples so far, which is written anew."""
        rows = [[line["step"], line["prompt"], line["text"]] for line in read_samples(self._folder)]
        self._submit(self._client.log_dict, self._id, {"columns": ["step", "prompt", "text"], "data": rows}, _SAMPLES)

    def finished(self, report: Path | None) -> None:
        self._is_done = True
        if report is not None:
            self._submit(self._client.log_artifact, self._id, str(report)).result()

    def hint(self) -> str:
        address = self._client.tracking_uri
        if not address.startswith("http"):
            return ""  # `mlflow ui` is of the whole package, which may not be there
        return hide_secrets(f"{address.rstrip('/')}/#/experiments/{self._experiment}/runs/{self._id}")

    def close(self) -> None:
        self._submit(self._client.set_terminated, self._id, "FINISHED" if self._is_done else "KILLED")
        self._worker.shutdown()
        self._raise_failure()

    def _log(self, kind: str, figures: Figures, step: int) -> None:
        from mlflow.entities import Metric

        if (kind, step) in self._has:
            return
        now = int(1000 * time.time())
        self._waiting += [Metric(name, value, now, step) for name, value in figures.items()]
        self._submit(self._send_waiting)

    def _send_waiting(self) -> None:
        """Send what has come meanwhile. A later call may then find nothing."""
        while self._waiting:
            first = self._waiting[:_METRICS_A_REQUEST]
            self._client.log_batch(self._id, first)
            del self._waiting[: len(first)]

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[None]:
        self._raise_failure()
        return self._worker.submit(self._do, function, *arguments)

    def _do(self, function: Callable[..., Any], *arguments: Any) -> None:
        """In the thread. After a failure nothing more is sent: a request to a server that is gone takes long."""
        if self._failure is None:
            try:
                function(*arguments)
            except Exception as error:
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _earlier_run(client: MlflowClient, its_id: str | None) -> Run | None:
    """The run of an earlier start; None where there is none, or another server or store was named since."""
    from mlflow.exceptions import MlflowException

    if its_id is None:
        return None
    try:
        return client.get_run(its_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _begin_run(client: MlflowClient, name: str, run: RunConfig) -> Run:
    from mlflow.entities import Param

    experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or _experiment(
        client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
    )
    its_run = client.create_run(experiment, run_name=name)
    config = hide_secrets(run.model_dump(mode="json", by_alias=True))
    params = [Param(key, value) for key, value in _flat(config)]
    for first in range(0, len(params), 100):  # a request takes 100
        client.log_batch(its_run.info.run_id, params=params[first : first + 100])
    return its_run


def _experiment(client: MlflowClient, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:  # another run has just begun it
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as text."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else orjson.dumps(value).decode()


def _steps(client: MlflowClient, run: Run) -> Iterator[tuple[str, int]]:
    """What MLflow has of a run: kinds and steps. A step's metrics were sent together, so that one of them tells."""
    for kind, pattern in (("training", "train/.*"), ("validation", "validation/[^/]*"), ("tasks", "validation/.*/.*")):
        names = [name for name in run.data.metrics if re.fullmatch(pattern, name)]
        if names:
            yield from ((kind, metric.step) for metric in client.get_metric_history(run.info.run_id, names[0]))


def _table_tag(file: str) -> str:
    """MLflow shows artifacts that this tag names as tables."""
    return orjson.dumps([{"path": file, "type": "table"}]).decode()
