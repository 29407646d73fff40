"""A real Slurm of two nodes on this machine: its daemons listen on loopback only, and end with the block."""

import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

from support.sockets import free_ports
from support.waiting import wait_until

LIMIT = 60
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue", "runuser")
# It would start the jobs of the tests wherever they are run, and says what is missing where they are not.
MISSING = "" if os.getuid() == 0 else "needs root"
MISSING = MISSING or ", ".join(program for program in PROGRAMS if shutil.which(program) is None)

CONFIGURATION = """
ClusterName=artel
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=300
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=16000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=16000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=1:00:00 State=UP
"""


@contextmanager
def two_nodes(folder: Path):
    """The environment in which sbatch finds the cluster."""
    for name in ("munge", "state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, ports=free_ports(3)))
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for path in (folder / "munge", key):
        shutil.chown(path, "munge", "munge")
    # Only by root are folders above pytest's own to be passed.
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge/socket",
              f"--pid-file={folder}/munge/pid", f"--seed-file={folder}/munge/seed", "--num-threads=2"]  # fmt: skip
    shutil.chown(key, "root", "root")
    shutil.chown(folder / "munge", "root", "root")
    daemons = []
    log = (folder / "daemons.log").open("ab")

    def start(*command):
        daemons.append(subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log,
                                        start_new_session=True))  # fmt: skip

    try:
        start(*munged)
        wait_for(lambda: (folder / "munge" / "socket").exists(), folder)
        start("slurmctld", "-D", "-i")
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node)
        wait_for(lambda: states(environment) == {"idle"}, folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        log.close()


def states(environment):
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, timeout=LIMIT,
                          env={**os.environ, **environment})  # fmt: skip
    return set(done.stdout.split())


def wait_for(condition, folder):
    def logs():
        return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in folder.glob("*.log"))

    wait_until(condition, logs)
