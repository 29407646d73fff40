"""What trackers kept of a run, read back by their own packages, and what they should have kept."""

import json
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path

from support.runs import ENVIRONMENT, kill, metrics
from support.waiting import LIMIT, wait_until

OF_TIME = ("tokens_per_second", "seconds", "memory_gib")
"""Figures of a step that differ when it is done again."""
CLEAN = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By `train/loss`, `validation/loss` …: the steps and values of metrics.jsonl, in order."""
    found = defaultdict(list)
    for line in metrics(folder):
        judged = next((line[kind] for kind in ("validation", "tasks") if kind in line), None)
        group = "train" if judged is None else "validation"
        for name, value in (line if judged is None else judged).items():
            if name != "step":
                found[f"{group}/{name}"].append((line["step"], value))
    return dict(found)


def samples(folder: Path) -> list[tuple[int, str, str]]:
    lines = map(json.loads, (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["prompt"], line["text"]) for line in lines]


# W&B: its own program prints the records of a run's file ------------------------------


def wandb_folders(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def wandb_records(offline: Path) -> list[dict]:
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", offline]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, timeout=LIMIT, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def wandb_metrics(records: list[dict]) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict(list)
    for record in records:
        if record["type"] == "history":
            item = record["history"]["item"]
            for name, value in item.items():
                if name.startswith(("train/", "validation/")):
                    found[name].append((item["_step"], value))
    return dict(found)


def wandb_samples(offline: Path, records: list[dict]) -> list[tuple[int, str, str]]:
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    tables = [
        json.loads((offline / "files" / item["samples.path"]).read_text()) for item in items if "samples.path" in item
    ]
    assert all(table["columns"] == ["step", "prompt", "text"] for table in tables)
    return [tuple(row) for table in tables for row in table["data"]]


# MLflow: a real server on the loopback -------------------------------------------------


@contextmanager
def mlflow_server(folder: Path):
    """Its address and its process; its database and its artifacts lie in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
               "--artifacts-destination", str(folder / "artifacts")]  # fmt: skip
    output = (folder / "server.txt").open("wb")
    environment = CLEAN | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"

    def answers():
        assert process.poll() is None, (folder / "server.txt").read_text()
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=LIMIT):
            return True

    try:
        wait_until(answers, (folder / "server.txt").read_text)
        yield address, process
    finally:
        kill(process)
        output.close()


# trackio: its database ------------------------------------------------------------------


def trackio_rows(folder: Path) -> list[tuple[str, int, dict]]:
    """(run, step, what was logged) in the order of logging, of the project artel."""
    with sqlite3.connect(folder / "artel.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    return [(run, step, json.loads(metrics)) for run, step, metrics in rows]


def trackio_artifacts(folder: Path) -> dict[str, bytes]:
    """The files that artifacts of the project artel hold, by their names."""
    with sqlite3.connect(folder / "artel.db") as database:
        manifests = database.execute("SELECT manifest FROM artifact_versions ORDER BY id").fetchall()
    entries = [entry for (manifest,) in manifests for entry in json.loads(manifest)]
    blobs = {file.name: file for file in (folder / "artifacts/artel/blobs").rglob("*") if file.is_file()}
    return {entry["path"]: blobs[entry["digest"]].read_bytes() for entry in entries}


# Who goes out ---------------------------------------------------------------------------


@contextmanager
def no_way_out():
    """Variables that lead every request to another host to a proxy here; fails if one comes."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
        yield dict.fromkeys(names, address) | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        proxy.settimeout(0)
        with suppress(BlockingIOError):
            connection, _ = proxy.accept()
            raise AssertionError(f"a request left this machine: {connection.recv(1000)!r}")
