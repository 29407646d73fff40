"""Two hosts that only an address joins: network namespaces with a cable between them, each with its own loopback.

The host's name leads to loopback in both, as on Debian, so that they meet only when the interface is chosen rightly.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import ENVIRONMENT, largest_difference, losses, roberta_of_2019, succeed, write_run
from support.sockets import has_ipv6, watch
from support.two_hosts import FIRST, HIDDEN, MARKS, PORT, SECOND, ip, six, two_namespaces
from support.waiting import LIMIT

pytestmark = MARKS


@pytest.fixture
def hosts():
    with two_namespaces() as names:
        yield names


def start_in(namespace, *arguments, **environment):
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "artel", *map(str, arguments)]
    clean = {key: value for key, value in ENVIRONMENT.items() if key not in HIDDEN}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=clean | environment, start_new_session=True, **pipes)


def finish(processes):
    """What each told; all of them are ended, whatever happens."""
    try:
        outputs = [process.communicate(timeout=LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)[-6000:]
    return outputs


def pids(hosts):
    """The processes of both."""
    done = [subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, timeout=30) for host in hosts]
    return [int(number) for each in done for number in each.stdout.split()]


def by_flags(hosts, run):
    """Two processes on each host, started by artel itself."""
    return [
        start_in(host, "train", run, "--nproc", 2, "--nnodes", 2, "--node-rank", rank, "--master-addr", FIRST,
                 "--master-port", PORT)
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def by_environment(hosts, *run):
    """One process on each host, started by something that only sets the variables of env://."""
    return [
        start_in(host, "train", *run, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=FIRST, MASTER_PORT=PORT)
        for rank, host in enumerate(hosts)
    ]


def by_endpoint(hosts, run):
    """One process on each host; hosts find out by themselves which is which, by a name that means loopback to one."""
    endpoint = f"first.artel:{PORT}"
    return [start_in(host, "train", run, "--nnodes", 2, "--rdzv-endpoint", endpoint) for host in hosts]


@pytest.mark.parametrize(
    ("start", "processes"), [(by_flags, 4), pytest.param(by_environment, 2, marks=pytest.mark.ci), (by_endpoint, 2)]
)
def test_two_hosts_train_as_one_process_does(tmp_path, hosts_by_name, start, processes):
    one, two = (write_run(tmp_path / f"{name}.yaml") for name in ("one", "two"))
    succeed("train", one)
    with watch(lambda: pids(hosts_by_name)) as places:
        outputs = finish(start(hosts_by_name, two))
    addresses = {address for address, _ in places}
    assert FIRST in addresses
    assert addresses <= {FIRST, SECOND, "127.0.0.1", "::1"}, places
    assert f"{processes} process" in outputs[0]
    assert largest_difference(losses(one.with_suffix("")), losses(two.with_suffix(""))) < 1e-5


@pytest.mark.long
def test_the_old_json_runs_on_two_processes_and_on_two_hosts(tmp_path, shared_data, hosts):
    """`world_size: 2` on this machine by itself, and on two by MASTER_ADDR and MASTER_PORT: one process's losses."""
    roberta_of_2019(tmp_path / "model", shared_data / "tokenizers" / "roberta-base")
    sentences = [f"the fox number {number}, who was quick, saw {number % 7} dogs, and ran" for number in range(150)]
    rows = [f'"{sentence.replace(",", "")}","{sentence}"' for sentence in sentences]
    (tmp_path / "labeled_dataset.csv").write_text("\n".join(["input,output", *rows]))
    old = json.loads((shared_data / "configs" / "masked_lm_cpu.json").read_text())
    assert old["world_size"] == 2
    old |= {"epochs": 1, "batch_size": 8, "learning_rate": 5e-3, "model_path": str(tmp_path / "model")}
    old |= {key: str(tmp_path / old[key]) for key in ("inputs_path", "outputs_path")}
    file = tmp_path / "masked_lm_cpu.json"
    file.write_text(json.dumps(old))
    folders = {name: tmp_path / name for name in ("one", "two", "hosts")}
    exact = ["train.precision=fp32", "log.every=1"]  # auto is bf16 on a CPU that has it, whose sums differ by 1e-3
    run = {name: (file, f"run={folder}", *exact) for name, folder in folders.items()}
    for name, more in (("one", ["parallel.data=1"]), ("two", [])):
        done = succeed("train", *run[name], *more)
        assert f"{2 if name == 'two' else 1} process" in done.stderr
    finish(by_environment(hosts, *run["hosts"]))
    reference = losses(folders["one"])
    assert len(reference) > 5
    assert reference[max(reference)][0] < reference[1][0]
    for name in ("two", "hosts"):
        assert largest_difference(reference, losses(folders[name])) < 1e-5


@pytest.fixture
def hosts_by_name(hosts):
    """Both know the first host as `first.artel`; it knows itself, as Debian does, as 127.0.1.1. Each has a gateway."""
    folders = [Path("/etc/netns") / host for host in hosts]  # ip netns exec lays their files over /etc
    addresses = [("127.0.1.1", SECOND), (FIRST, FIRST)]
    try:
        for host, folder, (first, gateway) in zip(hosts, folders, addresses, strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n{first} first.artel\n")
            ip("-n", host, "route", "add", "default", "via", gateway)
        yield hosts
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


CHOSEN = (
    "import os; from artel.launching.hosts import choose_interface; "
    "print(choose_interface({!r}, 9).local, os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'])"
)


@pytest.mark.parametrize("master", [FIRST, "first.artel", six(FIRST)])
def test_the_interface_of_the_cable_is_chosen(hosts_by_name, master):
    """Also where the first host's name leads to loopback on itself."""
    if ":" in master and not has_ipv6():
        pytest.skip("IPv6 is off on this machine")
    for host, address in zip(hosts_by_name, (FIRST, SECOND), strict=True):
        command = ["ip", "netns", "exec", host, sys.executable, "-c", CHOSEN.format(master)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT)
        address = six(address) if ":" in master else address
        assert done.stdout.split() == [address, f"v{host[5:]}", f"=v{host[5:]}"], done.stderr


def test_an_address_without_a_way_is_told_at_once(tmp_path, hosts):
    run = write_run(tmp_path / "run.yaml")
    process = start_in(hosts[1], "train", run, "--nnodes", 2, "--node-rank", 1, "--master-addr", "198.51.100.7")
    _, output = process.communicate(timeout=LIMIT)
    assert process.returncode == 2, output
    assert "--master-addr: cannot reach 198.51.100.7" in output
