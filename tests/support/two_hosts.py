"""Two hosts that only an address joins: network namespaces with a cable between them, each with its own loopback."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from support.sockets import has_ipv6

FIRST, SECOND, PORT = "10.213.77.1", "10.213.77.2", "29617"
HIDDEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
MARKS = [
    pytest.mark.processes,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and ip to part the hosts"),
]


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def six(address):
    """The IPv6 address of a host that has this IPv4 address."""
    return f"fd77::{address.rpartition('.')[2]}"


@contextmanager
def two_namespaces():
    """Names of two namespaces that reach each other as FIRST and SECOND and nothing else."""
    names = [f"artel{side}{os.getpid()}" for side in "ab"]
    cables = [f"v{name[5:]}" for name in names]
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except AssertionError as error:
                pytest.skip(f"no network namespaces here: {error}")
            made.append(name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, (FIRST, SECOND), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            if has_ipv6():
                ip("-n", name, "addr", "add", f"{six(address)}/64", "dev", cable, "nodad")
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", name], timeout=30, check=False)
