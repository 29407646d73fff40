"""Which hosts and processes a run has, as flags and the variables of srun, an MPI, torchrun or deepspeed say it."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from artel.errors import InputError
from artel.launching.hosts import Hosts, resolve_seconds
from artel.launching.launcher_environment import check_counts, check_worker, count_node_tasks, first_host, read_launcher
from support.runs import ENVIRONMENT, largest_difference, losses, refused, succeed, write_run
from support.sockets import free_ports
from support.waiting import LIMIT

# Which hosts --------------------------------------------------------------------------------------------------------


def test_hosts_by_flags_and_by_environment(monkeypatch):
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    alone = Hosts.read(None)
    assert (alone.least, alone.count, alone.rank, alone.fixed) == (1, 1, 0, True)
    elastic = Hosts.read("1:4", endpoint="node1:4000")
    assert (elastic.least, elastic.count, elastic.rank, elastic.where) == (1, 4, None, "node1:4000")
    assert elastic.elastic
    assert not elastic.fixed
    assert Hosts.read("2", endpoint="[fe80::1]:4000").where == "[fe80::1]:4000"
    assert Hosts.read("2", endpoint="node1").where == "node1:29500"
    assert not Hosts.read("2", 1, "node1", restarts=1).fixed
    for name, value in (("NNODES", "3"), ("NODE_RANK", "2"), ("MASTER_ADDR", "node1"), ("MASTER_PORT", "5")):
        monkeypatch.setenv(name, value)
    assert Hosts.read(None) == Hosts(3, 3, 2, "node1", 5)
    assert Hosts.read("2", endpoint="node2:7") == Hosts(2, 2, None, "node2", 7)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"count": "two"}, "--nnodes: 'two' is not a number of hosts"),
        ({"count": "0"}, "--nnodes: 0 hosts"),
        ({"count": "4:1", "address": "a"}, "use 1:4"),
        ({"count": "2"}, "--master-addr: is required"),
        ({"count": "2", "rank": 2, "address": "a"}, "--node-rank: 2 must be less"),
        ({"count": "2", "endpoint": "a:b"}, "--rdzv-endpoint: 'a:b' is not an address and port"),
        ({"count": "2", "endpoint": "a:1", "address": "a"}, "--rdzv-endpoint: cannot be combined"),
        ({"count": "2", "address": "a", "port": 99999}, "--master-port: is 99999"),
        ({"count": "2", "address": "a", "port": 0}, "--master-port: is 0"),
    ],
)
def test_hosts_that_cannot_be(monkeypatch, asked, message):
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError) as error:
        Hosts.read(**asked)
    assert message in str(error.value)


def test_a_port_of_the_environment_is_checked_where_hosts_meet(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "99999")
    with pytest.raises(InputError, match="MASTER_PORT: is 99999"):
        Hosts.read("2", 1, "node1")
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:80")  # of a service named "master" in Kubernetes
    assert Hosts.read("1", 0).count == 1


def test_a_pod_waits_longer_for_the_name_of_the_first(monkeypatch):
    """Its status would be 2, wrong input, which ends a job; but the first pod may only wait for a node."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert resolve_seconds() == 30
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert resolve_seconds() == 900


def test_evaluate_refuses_what_no_launcher_sets(tmp_path):
    done = refused("evaluate", "runs/none", cwd=tmp_path, env={"WORLD_SIZE": "abc"})
    assert "WORLD_SIZE: is 'abc', not a number" in done.stderr


# What others have started -------------------------------------------------------------------------------------------


def read(nproc=None, **environment):
    """What read_launcher makes of such an environment: what it adds."""
    with patch.dict(os.environ, environment, clear=True):
        read_launcher(nproc)
        return {name: value for name, value in os.environ.items() if name not in environment}


STEP = {"SLURM_JOB_ID": "70001", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4,3",
        "SLURM_STEP_NODELIST": "gpu[007-008]"}  # fmt: skip


def test_tasks_of_srun_are_processes():
    ranks = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert read(**STEP) == {**ranks, "MASTER_ADDR": "gpu007", "MASTER_PORT": str(15000 + 70001 % 16000)}
    assert read(**STEP, MASTER_ADDR="10.0.0.1", MASTER_PORT="7") == ranks
    assert read(**STEP, CUDA_VISIBLE_DEVICES="3")["LOCAL_RANK"] == "0"  # it sees only its own
    assert read(**STEP, CUDA_VISIBLE_DEVICES="0,1,2")["LOCAL_RANK"] == "1"


def test_tasks_of_srun_are_hosts_with_nproc():
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    variables = read(4, **step)
    assert variables == {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": variables["MASTER_PORT"],
    }
    with pytest.raises(InputError, match="7 tasks on 2 hosts, and each would start 4 processes"):
        read(4, **STEP)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # a batch script
        {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun within a task
        {"NNODES": "2"},
    ],
)
def test_not_every_variable_of_slurm_means_tasks(changes):
    assert read(**{**STEP, **changes}) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1,3-5],m7", "n1"), ("gpu[007-012,20]", "gpu007"), ("r[1-2]n[3-4]", "r1n3")],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": "x", "LOCAL_RANK": "-1"}, ["RANK: is 'x', not a number", "LOCAL_RANK: is '-1', not a number"]),
        ({"RANK": "2"}, ["RANK: is 2, but must be less than WORLD_SIZE, 2"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["RANK: is 0, but must be less than WORLD_SIZE, 0"]),
        ({"MASTER_PORT": "99999"}, ["MASTER_PORT: is 99999, not a port from 1 to 65535"]),
        ({"MASTER_ADDR": "\nFORGED"}, ["MASTER_ADDR: is '\\nFORGED', not a name or address of a host"]),
        ({"MASTER_PORT": "tcp://10.0.0.1:80"}, ["MASTER_PORT: is 'tcp://10.0.0.1:80', not a number"]),
        # of a service named "master" in Kubernetes
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "tcp://10.0.0.1:80"}, []),
        ({"RANK": None}, ["WORLD_SIZE: is 2, but RANK is not set"]),
        ({"RANK": None, "WORLD_SIZE": "0"}, ["WORLD_SIZE: is 0, but RANK is not set"]),
        ({"RANK": None, "WORLD_SIZE": "1"}, []),
        ({"WORLD_SIZE": None}, ["RANK: is 1, but WORLD_SIZE is not set"]),
        ({"SLURM_JOB_ID": "job"}, ["SLURM_JOB_ID: is 'job', not a number"]),
        ({"MASTER_ADDR": "fe80::1%eth0", "MASTER_PORT": "29500"}, []),
    ],
)
def test_variables_that_no_launcher_sets(changes, says):
    environment = {"RANK": "1", "WORLD_SIZE": "2", **changes}
    environment = {name: value for name, value in environment.items() if value is not None}
    with patch.dict(os.environ, environment, clear=True):
        try:
            check_worker()
            said = []
        except InputError as error:
            said = error.problems
    assert [f"{problem.where}: {problem.what}" for problem in said] == says


def test_tasks_of_a_node():
    assert [count_node_tasks("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    with pytest.raises(InputError, match="SLURM_STEP_TASKS_PER_NODE"):
        count_node_tasks("4(x2),3", 3)


def test_processes_of_an_mpi():
    open_mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in
                (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))}  # fmt: skip
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read(**open_mpi, MASTER_ADDR="a", MASTER_PORT="1") == ranks
    with pytest.raises(InputError, match="does not say which is the first"):
        read(**open_mpi)
    intel = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert read(**intel)["MASTER_ADDR"] == "127.0.0.1"
    assert read(PMI_RANK="0", PMI_SIZE="1") == {}


# Pods ---------------------------------------------------------------------------------------------------------------

# What Kubeflow sets in the second of two pods: the training operator for a PyTorchJob, the trainer for a TrainJob.
PYTORCH_JOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "1",
               "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456", "PET_NNODES": "2", "PET_NODE_RANK": "1",
               "PET_NPROC_PER_NODE": "2"}  # fmt: skip
TRAIN_JOB = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "29400",
             "PET_MASTER_ADDR": "job-node-0-0.job", "JOB_COMPLETION_INDEX": "1"}  # fmt: skip
HOSTS = {"nnodes": "2", "node_rank": 1}


def options(nproc=None, **environment):
    """The options that read_launcher gives, and which of RANK and WORLD_SIZE are left."""
    with patch.dict(os.environ, environment, clear=True):
        return read_launcher(nproc), {"RANK", "WORLD_SIZE"} & set(os.environ)


def test_pods_of_kubeflow_are_hosts():
    job = HOSTS | {"master_addr": "job-master-0", "master_port": 23456}
    assert options(**PYTORCH_JOB) == (job | {"nproc": 2}, set())
    assert options(2, **PYTORCH_JOB) == (job, set())
    by_cores = options(**PYTORCH_JOB | {"PET_NPROC_PER_NODE": "cpu"})[0]
    assert by_cores["nproc"] == len(os.sched_getaffinity(0))
    train_job = HOSTS | {"master_addr": "job-node-0-0.job", "master_port": 29400, "nproc": 2}
    assert options(**TRAIN_JOB) == (train_job, set())
    del (numbered := dict(TRAIN_JOB))["PET_NODE_RANK"]
    assert options(**numbered) == (train_job, set())


def test_an_elastic_job_meets_at_its_endpoint():
    elastic = {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_BACKEND": "c10d",
               "PET_MAX_RESTARTS": "3", "PET_NPROC_PER_NODE": "1", "RANK": "0", "WORLD_SIZE": "3"}  # fmt: skip
    expected = {"nnodes": "1:3", "rdzv_endpoint": "job-worker-0:23456", "max_restarts": 3, "nproc": 1}
    assert options(**elastic) == (expected, set())
    with pytest.raises(InputError, match="PET_RDZV_BACKEND: is etcd"):
        options(**elastic | {"PET_RDZV_BACKEND": "etcd"})


@pytest.mark.parametrize("name", ["PET_NODE_RANK", "PET_MASTER_PORT", "PET_NPROC_PER_NODE"])
def test_a_variable_of_a_pod_that_is_no_number_is_named(name):
    with pytest.raises(InputError, match=f"{name}: is 'x'"):
        options(**PYTORCH_JOB | {name: "x"})


def test_a_process_of_torchrun_in_such_a_pod_stays_one():
    worker = PYTORCH_JOB | {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert options(**worker) == ({}, {"RANK", "WORLD_SIZE"})


def test_tasks_of_an_mpi_are_hosts_with_nproc():
    """An MPIJob with one slot a pod, and --nproc."""
    task = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "job-worker-0", "MASTER_PORT": "7"}  # fmt: skip
    assert read(2, **task) == {"NNODES": "2", "NODE_RANK": "1"}
    assert read(1, **task)["RANK"] == "1"
    with pytest.raises(InputError, match="MPI has started 2 tasks on this host, and each would start 2 processes"):
        read(2, **task | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "job-worker-0"}
    assert read(2, **hydra) == {"NNODES": "2", "NODE_RANK": "1", "MASTER_PORT": "29500"}


def test_ranks_that_may_count_hosts_or_processes_are_refused_with_nproc():
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    with patch.dict(os.environ, pod, clear=True):
        with pytest.raises(InputError, match=r"--nnodes 2 --node-rank 0 --nproc 2; if processes, remove --nproc"):
            check_counts(2)
        check_counts(None)
        check_counts(1)
        os.environ["LOCAL_RANK"] = "0"
        check_counts(2)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.ci
@pytest.mark.parametrize(
    ("environment", "options", "told"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, (), "process 0 waits for the other processes (2 in all)"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}, (), "for the other hosts (2 in all)"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, (), "waiting for the first host to answer at 127.0.0.1:"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("--nnodes=2", "--node-rank=1", "--nproc=2"), "waiting for the first host"),
    ],
)  # fmt: skip
def test_a_host_that_waits_says_for_what(tmp_path, environment, options, told):
    (port,) = free_ports(1)
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "artel", "train", str(write_run(tmp_path / "run.yaml")), *options]
    with subprocess.Popen(
        command, env=ENVIRONMENT | meets | environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stderr is not None
            said = next((line for line in process.stderr if told in line), "nothing")
            process.terminate()
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert "(10 s)" in said


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("job", [PYTORCH_JOB, TRAIN_JOB], ids=["PyTorchJob", "TrainJob"])
def test_two_pods_of_kubeflow_train_as_one_process_does(tmp_path, job):
    """Each pod has what its operator sets, and the same command; only the address is that of this machine."""
    one, two = (write_run(tmp_path / f"{name}.yaml", train={"steps": 2}) for name in ("one", "two"))
    succeed("train", one)
    (port,) = free_ports(1)
    here = {name: "127.0.0.1" if name.endswith("ADDR") else str(port) for name in job if "MASTER" in name}
    here |= {"PET_NPROC_PER_NODE": "1"} | ({"WORLD_SIZE": "2"} if "WORLD_SIZE" in job else {})
    command = [sys.executable, "-m", "artel", "train", str(two)]
    numbers = [name for name in ("RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX") if name in job]
    pods = [
        subprocess.Popen(
            command,
            env=ENVIRONMENT | job | here | dict.fromkeys(numbers, str(index)),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [pod.communicate(timeout=LIMIT)[1] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert "2 processes" in said[0]
    assert largest_difference(losses(tmp_path / "one"), losses(tmp_path / "two")) < 1e-5
