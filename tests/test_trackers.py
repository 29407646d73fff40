"""TensorBoard, W&B, MLflow and trackio really run: what they kept is read back, also of a run that was killed."""

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import artel
from support.runs import metrics, small_disk, write_run
from support.tasks import passages
from support.trackers import (
    CLEAN,
    OF_TIME,
    expected,
    mlflow_server,
    no_way_out,
    samples,
    trackio_artifacts,
    trackio_rows,
    wandb_folders,
    wandb_metrics,
    wandb_records,
    wandb_samples,
)
from support.waiting import LIMIT

pytestmark = pytest.mark.processes

TRACKERS = ["tensorboard", "wandb", "mlflow", "trackio"]
PROMPTS = ["Once | upon", "a *time*"]
KILLS = 6
# A checkpoint of step 3 is there; steps 4 and 5 are logged, and done again.
PLUGIN = f"""
import os, signal
from pathlib import Path
from artel.registry import CALLBACKS

@CALLBACKS.register("kill_once")
class KillOnce:
    def __call__(self, run):
        if run.step == {KILLS} and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def train(folder, *words, env=None):
    command = [sys.executable, "-m", "artel", "train", "mine.yaml", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=LIMIT)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as (address, _):
        yield address


@pytest.fixture(scope="module")
def run(tmp_path_factory, server):
    """The folder of a run with all trackers that was killed in step 6, resumed from step 3, and ended."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "killing.py").write_text(PLUGIN)
    run = {
        "plugins": "killing",
        "callbacks": ["kill_once"],
        "train": {"steps": 8},
        "validate": {"every": 2, "prompts": PROMPTS, "new_tokens": 4, "tasks": [passages(folder)], "tasks_every": 4},
        "checkpoint": {"every": 3, "asynchronous": False, "best": None},
        "track": ["jsonl", *TRACKERS],
    }
    write_run(folder / "mine.yaml", **run)
    with no_way_out() as proxies:
        variables = {
            "MLFLOW_TRACKING_URI": server,
            "TRACKIO_DIR": str(folder / "trackio"),
            "NETRC": str(folder / "none"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_" + 30 * "x",  # whose owner trackio would ask the hub for
        }
        env = CLEAN | variables | proxies
        killed = train(folder, env=env)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        ids = (folder / "mine/tracker_runs.json").read_bytes()
        done = train(folder, "--json", env=env)
        assert done.returncode == 0, done.stderr
    assert "resuming from step 3 of 8" in done.stderr
    assert "failed" not in killed.stderr + done.stderr
    assert json.loads(done.stdout)["steps"] == 8  # nothing but the result is on standard output
    assert (folder / "mine/tracker_runs.json").read_bytes() == ids
    assert [line["step"] for line in metrics(folder / "mine") if "loss" in line] == list(range(1, 9))
    return folder / "mine"


def test_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    wanted = expected(run)
    assert set(events.Tags()["scalars"]) == set(wanted)
    for name, rows in wanted.items():
        kept = [(event.step, event.value) for event in events.Scalars(name)]
        assert kept == [(step, pytest.approx(value, rel=1e-6)) for step, value in rows], name  # float32
    texts = EventAccumulator(str(run / "tensorboard/text"), size_guidance={"tensors": 0}).Reload()
    (file,) = texts.Tensors("run file/text_summary")
    assert file.tensor_proto.string_val[0].decode() == f"```yaml\n{(run / 'config.yaml').read_text()}```"
    rows = []
    for event in texts.Tensors("samples/text_summary"):
        title, _, *lines = event.tensor_proto.string_val[0].decode().split("\n")
        assert title == "| prompt | text |"
        rows += [(event.step, *map(html.unescape, re.findall(r"\| (.*?) (?=\|)", line))) for line in lines]
    in_a_line = [(step, prompt, " <br> ".join(text.splitlines())) for step, prompt, text in samples(run)]
    assert rows == in_a_line


def test_wandb(run):
    (offline,) = wandb_folders(run)
    records = wandb_records(offline)
    assert wandb_metrics(records) == expected(run)
    assert wandb_samples(offline, records) == samples(run)
    (begins,) = [record["run"] for record in records if record["type"] == "run"]
    assert begins["run_id"] == json.loads((run / "tracker_runs.json").read_text())["wandb"]
    assert begins["config"]["update"]["train"]["steps"] == 8
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    newest = [artifact for artifact in artifacts if artifact["type"] == "run"][-1]
    files = {Path(file["path"]).name: Path(file["local_path"]) for file in newest["manifest"]["contents"]}
    assert files["config.yaml"].read_bytes() == (run / "config.yaml").read_bytes()
    assert 'class="state complete"' in files["report.html"].read_text()
    assert not list(offline.rglob("wandb-metadata.json"))  # it would have the command line


def test_mlflow(run, server, tmp_path):
    from mlflow import MlflowClient, artifacts

    client = MlflowClient(server)
    (its_run,) = client.search_runs([client.get_experiment_by_name("artel").experiment_id])
    assert its_run.info.run_id == json.loads((run / "tracker_runs.json").read_text())["mlflow"]
    assert (its_run.info.run_name, its_run.info.status) == ("mine", "FINISHED")
    assert its_run.data.params["train.steps"] == "8"
    wanted = expected(run)
    assert set(its_run.data.metrics) == set(wanted)
    for name, rows in wanted.items():
        kept = sorted((each.step, each.value) for each in client.get_metric_history(its_run.info.run_id, name))
        again = range(4, KILLS) if name.removeprefix("train/") in OF_TIME else ()
        assert [step for step, _ in kept] == [step for step, _ in rows], name  # each once
        assert [row for row in kept if row[0] not in again] == [row for row in rows if row[0] not in again], name
    folder = Path(artifacts.download_artifacts(run_id=its_run.info.run_id, dst_path=tmp_path, tracking_uri=server))
    table = json.loads((folder / "samples.json").read_text())
    assert (table["columns"], [tuple(row) for row in table["data"]]) == (["step", "prompt", "text"], samples(run))
    assert json.loads(its_run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]
    assert (folder / "config.yaml").read_bytes() == (run / "config.yaml").read_bytes()
    assert 'class="state complete"' in (folder / "report.html").read_text()


def test_trackio(run):
    rows = trackio_rows(run.parent / "trackio")
    name = json.loads((run / "tracker_runs.json").read_text())["trackio"]
    assert {row[0] for row in rows} == {name}
    kept = {}
    for _, step, logged in rows:
        for key, value in logged.items():
            kept.setdefault(key, []).append((step, value))
    tables = [table["_value"] for _, table in kept.pop("samples")]
    assert kept == expected(run)
    assert [(line["step"], line["prompt"], line["text"]) for table in tables for line in table] == samples(run)
    files = trackio_artifacts(run.parent / "trackio")
    assert files["config.yaml"] == (run / "config.yaml").read_bytes()
    assert b'class="state complete"' in files["report.html"]


def test_one_that_fails_never_stops_a_run_and_says_so_once(tmp_path):
    (tmp_path / "ending.py").write_text("""
import os, signal
from pathlib import Path
from artel.registry import CALLBACKS

@CALLBACKS.register("end_server")
def end_server():
    return lambda run: run.step == 3 and os.killpg(int(Path("server").read_text()), signal.SIGKILL)
""")
    (tmp_path / "a-file").touch()
    validate = {"every": 2, "prompts": PROMPTS, "new_tokens": 4}
    mine = {"plugins": "ending", "callbacks": ["end_server"], "track": ["jsonl", "wandb", "mlflow", "trackio"]}
    write_run(tmp_path / "mine.yaml", validate=validate, **mine)
    (tmp_path / "mlflow").mkdir()
    with mlflow_server(tmp_path / "mlflow") as (address, process), no_way_out() as proxies:
        (tmp_path / "server").write_text(str(process.pid))
        variables = {"WANDB_API_KEY": "wrong-key", "TRACKIO_DIR": str(tmp_path / "a-file/folder")}
        variables |= {"MLFLOW_TRACKING_URI": address, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        done = train(tmp_path, env=CLEAN | variables | proxies)
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "mine")) == 9
    for name in ("wandb", "mlflow", "trackio"):
        assert done.stderr.count(f"tracker {name} failed and is disabled") == 1, done.stderr
    assert "wrong-key" not in done.stderr


def test_a_full_disk_is_said_once_by_each_and_without_a_traceback(tmp_path):
    write_run(tmp_path / "mine.yaml", train={"steps": 2})
    assert train(tmp_path).returncode == 0  # its folder is artel's now, and one in it may be a link
    write_run(tmp_path / "mine.yaml", track=["jsonl", "tensorboard", "wandb", "trackio"])
    with small_disk(tmp_path / "disk", "200k") as disk:
        for name in ("tensorboard", "wandb", "trackio"):
            (disk / name).mkdir()
        (tmp_path / "mine/tensorboard").symlink_to(disk / "tensorboard")
        (disk / "rest").write_bytes(bytes(shutil.disk_usage(disk).free - 4096))
        variables = {"WANDB_DIR": str(disk / "wandb"), "TRACKIO_DIR": str(disk / "trackio")}
        done = train(tmp_path, env=CLEAN | variables)
    assert done.returncode == 0, done.stderr
    for name in ("tensorboard", "wandb", "trackio"):
        assert done.stderr.count(f"tracker {name} failed and is disabled") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_one_without_its_package_is_refused_with_the_line_that_installs_it(tmp_path):
    """In an interpreter that sees the installed packages but for those of the trackers."""
    installed, seen = Path(sysconfig.get_path("purelib")), tmp_path / "packages"
    seen.mkdir()
    for path in installed.iterdir():
        if not path.name.startswith(tuple(TRACKERS)):
            (seen / path.name).symlink_to(path)
    write_run(tmp_path / "mine.yaml", track=["jsonl", *TRACKERS])
    path = os.pathsep.join([str(Path(artel.__file__).parents[1]), str(seen)])
    command = [sys.executable, "-S", "-m", "artel", "train", "mine.yaml"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=CLEAN | {"PYTHONPATH": path}, timeout=LIMIT
    )
    assert done.returncode == 2, done.stderr
    for name in TRACKERS:
        assert f"track: {name}: needs the package {name}, which is not installed" in done.stderr
        assert f"pip install 'artel-lm[{name}]'" in done.stderr
    assert not (tmp_path / "stores").exists()
