"""All that is tried on a real Ray of two nodes, in one process, in a network namespace that only it is in.

unshare --net python cluster_ray.py FOLDER TEXTS      writes FOLDER/results.json
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.waiting import LIMIT, wait_until

HEAD, NODES = "10.213.78.1", ["10.213.78.2", "10.213.78.3"]


def lay_network():
    """The nodes' addresses, and a way out: Ray asks from which address that leads."""
    addresses = [f"addr add {address}/24 dev lo" for address in (HEAD, *NODES)]
    for command in ["link set lo up", *addresses, f"route add default dev lo src {HEAD}"]:
        subprocess.run(["ip", *command.split()], check=True, timeout=30)


def main(folder: Path, texts: Path):
    lay_network()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "ARTEL_CACHE": str(folder / "cache")}
    results = {}

    from artel.errors import ArtelError
    from artel.preparing import prepare
    from support.cluster_runs import KILLED_ONCE, converted, every_stage, written
    from support.stores import tree

    def error_of(run):
        try:
            prepare(run)
        except ArtelError as error:
            return f"{type(error).__name__} {error}"
        return ""

    def run_of(name, **more):
        return every_stage(texts, folder / name, engine="ray", **more)

    results["no_cluster"] = error_of(run_of("whole"))

    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": HEAD, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=1, node_ip_address=address) for address in NODES]
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        results["whole"] = tree(prepare(run_of("whole")).folder)
        results["workspace_left"] = [str(path) for path in (folder / "whole").rglob("jobs")]

        (folder / "killing").mkdir()
        os.chdir(folder / "killing")  # where the converter lies
        run = converted(folder / "killing", KILLED_ONCE, 4, "stores", engine="ray")
        results["killed_task"] = error_of(run)
        results["killed_task_then"] = prepare(run).open().train.documents

        # The starter is ended by SIGKILL after a few parts, then started again; then a node goes, too.
        file = written(run_of("killed", part=2000), folder / "killed.yaml")
        command = [sys.executable, "-m", "artel", "prepare", str(file)]
        parts = folder / "killed" / "stores"
        first = subprocess.Popen(command, start_new_session=True)
        wait_for_parts(parts, 5, first)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        results["parts_when_killed"] = len(finished(parts))
        second = subprocess.Popen(command, start_new_session=True, stderr=(folder / "second.log").open("wb"))
        try:
            wait_for_parts(parts, results["parts_when_killed"] + 10, second)
            results["parts_when_node_went"] = len(finished(parts))
            cluster.remove_node(nodes[1], allow_graceful=False)
            results["status"] = second.wait(LIMIT)
        finally:
            if second.poll() is None:
                os.killpg(second.pid, signal.SIGKILL)
        results["second"] = (folder / "second.log").read_text()[-3000:]
        results["killed"] = [tree(store.parent) for store in parts.glob("*/manifest.json")]
    finally:
        (folder / "results.json").write_text(json.dumps(results))
        ray.shutdown()
        cluster.shutdown()


def finished(parts: Path):
    return [*parts.glob("*.parts/text/0*")]


def wait_for_parts(parts: Path, count: int, process):
    wait_until(lambda: len(finished(parts)) >= count or process.poll() is not None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
