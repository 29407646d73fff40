"""Nobody is let in: where the processes of a run listen, and what a foreign client at their ports can do."""

import base64
import hashlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from unittest.mock import patch

import pytest
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from artel.errors import InputError, WorkError
from artel.launching.hosts import (
    _check_gloo_interface,
    _is_this_host,
    choose_interface,
    choose_process_interface,
)
from artel.launching.rendezvous import run_secret
from artel.launching.rendezvous_handlers import ForeignValue, SignedStore
from artel.parallel.process_group import process_store, serve_store
from support.messages import logged
from support.runs import ENVIRONMENT, end, start, wait_for_step, workers_of, write_run
from support.sockets import descendants, free_ports, has_ipv6, listening, outside
from support.waiting import LIMIT, wait_until_gone

SHORT = timedelta(seconds=20)
SECRET = b"0123456789abcdef"
ENDLESS = {"train": {"steps": 100_000}, "checkpoint": {"every": "never"}, "validate": {"every": "never"}}


class Evil:
    """Unpickling this writes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


def evil_state(file):
    """A state of torch's rendezvous that runs code in whoever reads it."""
    return base64.b64encode(pickle.dumps(Evil(file))).decode()


# The store of several hosts ---------------------------------------------------------------------------------------


@pytest.fixture
def store():
    return serve_store("127.0.0.1", 0, SHORT)


@pytest.fixture
def foreign(store):
    """Another client at the same port."""
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=SHORT)


def handler(store):
    parameters = RendezvousParameters("c10d", "here:1", "id", 1, 2, "127.0.0.1")
    return create_handler(store, C10dRendezvousBackend(store, "id"), parameters)


def test_a_state_that_is_not_signed_is_never_unpickled(store, foreign, tmp_path):
    torchs = handler(store)
    foreign.set("torch.rendezvous.id", evil_state(tmp_path / "ran"))
    with pytest.raises(AttributeError):  # what is unpickled is an open file, and no state
        torchs.is_closed()
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()

    for other in (foreign, SignedStore(foreign, b"another secret, as long")):
        foreign.delete_key("torch.rendezvous.id")
        ours = handler(SignedStore(store, SECRET))
        other.set("torch.rendezvous.id", evil_state(tmp_path / "ran"))
        with pytest.raises(ForeignValue, match=r"torch\.rendezvous\.id was not written by a host of this run"):
            ours.is_closed()
        with pytest.raises(ForeignValue):  # who comes now reads it too
            handler(SignedStore(foreign, SECRET))
    assert not (tmp_path / "ran").exists()


def test_hosts_that_share_the_secret_meet(store, foreign):
    one, other = handler(SignedStore(store, SECRET)), handler(SignedStore(foreign, SECRET))
    one.set_closed()
    assert other.is_closed()


def test_every_way_to_read_a_value_asks_for_its_signature(store, foreign):
    signed = SignedStore(store, SECRET)
    within = PrefixStore("run", signed)
    within.set("a", "1")
    within.set("b", b"\0\xff")
    assert (within.get("a"), within.multi_get(["a", "b"])) == (b"1", [b"1", b"\0\xff"])
    assert within.compare_set("c", "", "new") == b"new"
    assert within.compare_set("c", "other", "newer") == b"new"
    assert within.compare_set("c", "new", "newer") == b"newer"
    assert (within.add("n", 2), within.check(["a"]), within.check(["z"])) == (2, True, False)
    assert SignedStore(foreign, SECRET).get("run/a") == b"1"
    moved = foreign.get("run/b")
    for value in ("", "1", b"\0" * 32 + b"1", moved, foreign.get("run/a")[:-1] + b"2"):
        foreign.set("run/a", value)
        for read in (
            lambda: within.get("a"),
            lambda: within.multi_get(["b", "a"]),
            lambda: within.compare_set("a", "1", "2"),
        ):
            with pytest.raises(ForeignValue):
                read()


def test_the_secret_is_its_owners_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("ARTEL_SECRET", raising=False)
    said = logged()
    file = tmp_path / "run" / ".secret"
    secret = run_secret(file, True, 1)
    assert len(secret) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == [".secret"]
    assert {run_secret(file, leads, 1) for leads in (True, False)} == {secret}
    file.chmod(0o640)
    with pytest.raises(InputError, match=r"other users can read(.|\n)*export the same ARTEL_SECRET"):
        run_secret(file, True, 1)
    with pytest.raises(InputError, match="has not written this secret"):
        run_secret(tmp_path / "elsewhere", False, 0)
    monkeypatch.setenv("ARTEL_SECRET", "a secret of the cluster's own")
    assert run_secret(tmp_path / "elsewhere", False, 0) == b"a secret of the cluster's own"
    monkeypatch.setenv("ARTEL_SECRET", "short")
    with pytest.raises(InputError, match="has 5 bytes, which can be guessed"):
        run_secret(file, True, 1)
    monkeypatch.delenv("ARTEL_SECRET")
    file.chmod(0o600)
    file.write_bytes(b"\n")
    with pytest.raises(InputError, match=r"\.secret: has 0 bytes, which can be guessed"):
        run_secret(file, True, 1)
    assert said == []


def test_what_listens_is_seen():
    """What the other tests stand on."""
    if not has_ipv6():
        pytest.skip("IPv6 is off on this machine")
    with socket.socket() as one, socket.socket(socket.AF_INET6) as other:
        for each, address in ((one, "127.0.0.1"), (other, "::")):
            each.bind((address, 0))
            each.listen()
        places = {("127.0.0.1", one.getsockname()[1]), ("::", other.getsockname()[1])}
        seen = listening([os.getpid()])
    assert places <= seen
    assert ("::", next(port for address, port in places if address == "::")) in outside(seen)


ONE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "this.host", "MASTER_PORT": "29500"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces have other names elsewhere")
@pytest.mark.parametrize(
    ("environment", "changes"),
    [
        (ONE, LOOPBACK | {"MASTER_ADDR": "127.0.0.1"}),
        (ONE | {"RANK": "1", "GLOO_SOCKET_IFNAME": "eth0"}, LOOPBACK | {"MASTER_ADDR": "127.0.0.1"}),
        (ONE | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, LOOPBACK),  # torchrun's store stays where it is
        (ONE | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, LOOPBACK),  # "hosts" on one machine
        ({"RANK": "0", "WORLD_SIZE": "1"}, LOOPBACK),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, LOOPBACK),  # alone, where DeepSpeed wants a process group all the same
    ],
)
def test_processes_of_one_host_are_told_loopback(environment, changes):
    with patch.dict(os.environ, environment, clear=True):
        choose_process_interface()
        assert dict(os.environ) == environment | changes


def test_names_of_loopback_are_not_those_of_the_host():
    names = ("127.0.0.1", "::1", "localhost", "localhost.localdomain", "ip6-localhost", "localhost4.localdomain4")
    assert all(map(_is_this_host, names))
    assert not any(map(_is_this_host, ("192.0.2.1", "node1", "localhosts", "node1.localhost.org")))


@pytest.mark.parametrize("name", ["a..b", f"{'a' * 64}.b"])
def test_no_name_of_a_host_is_told(name):
    with pytest.raises(InputError, match=f"--master-addr: cannot reach {name}: "):
        choose_interface(name, 29500)


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces have other names elsewhere")
@pytest.mark.parametrize("value", ["^lo,docker", "no-such0", "=lo", "127.0.0.1", "lo,no-such0", "lo,"])
def test_an_interface_that_gloo_cannot_use_is_refused(value):
    """Each process ended with an error of gloo's, which read as a fault of artel; nccl takes some of these."""
    with (
        patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": value}),
        pytest.raises(InputError, match="GLOO_SOCKET_IFNAME: names '") as refused,
    ):
        _check_gloo_interface()
    assert "which is not an interface of this host" in refused.value.problems[0].what
    for usable in ("", "lo", "lo,lo"):
        with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": usable}):
            _check_gloo_interface()


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_where_processes_meet_is_said_or_asked_for(missing):
    environment = {name: value for name, value in ONE.items() if name != missing}
    with patch.dict(os.environ, environment, clear=True), pytest.raises(InputError, match=f"{missing}: is not set"):
        process_store(0, SHORT)


def test_a_port_that_is_taken_is_told(store):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    with (
        patch.dict(os.environ, ONE | place, clear=True),
        pytest.raises(WorkError, match="cannot listen there: Address"),
    ):
        process_store(0, SHORT)


# While a run trains -----------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("processes", [2, 4])
def test_one_host_listens_on_loopback_alone_and_takes_nothing_from_there(tmp_path, processes):
    """Also after a restart, and where a profile of the cluster names other interfaces."""
    run = write_run(tmp_path / "run.yaml", **ENDLESS)
    others = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    command = [sys.executable, "-m", "artel", "train", str(run), "--nproc", str(processes), "--max-restarts", "1"]
    launcher = subprocess.Popen(
        command, env=ENVIRONMENT | others, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        for step in (2, 4):
            wait_for_step(launcher, tmp_path / "run", step)
            places = listening(descendants(launcher.pid))
            assert len(places) > processes, places  # the store, and gloo of each
            assert outside(places) == set()
            [(address, port)] = listening([launcher.pid])
            attack(address, port, tmp_path)
            if step == 2:
                workers = workers_of(launcher)
                os.kill(next(iter(workers.values())), signal.SIGKILL)
                wait_until_gone(workers.values())
                before = count_logged(tmp_path / "run")  # nothing but what is started anew adds to it
                wait_for_step(launcher, tmp_path / "run", before + 2)
        launcher.send_signal(signal.SIGTERM)
        _, output = launcher.communicate(timeout=LIMIT)
    finally:
        end(launcher)
    assert launcher.returncode == 130, output
    assert not (tmp_path / "ran").exists()
    assert len(re.findall(r"process \d on \S+: was killed by SIGKILL; restarting from the last", output)) == 1
    assert "torch/distributed" not in output  # its own log of the same, for those who know its code


def count_logged(folder):
    return (folder / "metrics.jsonl").read_bytes().count(b'"loss"')


def attack(address, port, folder):
    """Write code to run under each key that torch's agents read, and over all that is there."""
    client = TCPStore(address, port, is_master=False, timeout=SHORT)
    run = str(folder / "run")
    of_agents = ("torch.rendezvous.{}", "{}/torchelastic/role_info/0", "{}/torchelastic/assigned_ranks/0")
    names = [run, hashlib.sha256(os.fsencode(run)).hexdigest()[:16]]
    keys = [key.format(name) for name in names for key in of_agents]
    for key in {*keys, *client.list_keys()}:
        client.set(key, evil_state(folder / "ran"))


@pytest.mark.processes
def test_a_foreign_client_can_end_a_run_of_several_hosts_and_no_more(tmp_path):
    """Two launchers meet on this machine; somebody at their port writes what torch would unpickle."""
    run = write_run(tmp_path / "run.yaml", **ENDLESS)
    [port] = free_ports(1)
    both = [start("train", run, "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}") for _ in range(2)]
    try:
        wait_for_step(both[0], tmp_path / "run", 2)
        assert (tmp_path / "run" / ".secret").stat().st_mode & 0o777 == 0o600
        places = set.union(*(listening(descendants(process.pid)) for process in both))
        assert ("127.0.0.1", port) in places
        assert outside(places) == set()
        attack("127.0.0.1", port, tmp_path)
        outputs = [process.communicate(timeout=LIMIT)[1] for process in both]
    finally:
        for process in both:
            end(process)
    assert [process.returncode for process in both] == [1, 1], outputs
    assert not (tmp_path / "ran").exists()
    for text in outputs:
        assert f"artel: 127.0.0.1:{port}: another program has written to the store of this run's hosts" in text, text
        assert "Traceback" not in text
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))  # what was trained is saved
