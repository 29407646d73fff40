"""At which network interface the processes of a run listen: loopback on one host, else the one that hosts meet by.

gloo listens where the host's own name leads, and on Debian and Ubuntu that is loopback (127.0.1.1 in /etc/hosts): two
hosts then never find each other. The right interface is the one by which the first host is reached. nccl by itself
takes any interface but loopback, also where all processes are on one host.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artel.errors import InputError

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_OUTSIDE = "192.0.2.1"  # of TEST-NET-1 (RFC 5737): no host has it, so the way there is the default route
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # nccl takes names as prefixes, but for those after a =
# As distributions write them into /etc/hosts; localhost.localdomain and the like too.
_LOCALHOST = ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
# Kubernetes knows a pod's name only some seconds after the pod begins.
_NAME_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where hosts meet, as this one sees it."""

    own: str
    """Of this host, as the others reach it: what it listens at."""
    master: str
    """Of the first host, as this one reaches it: a name may lead to loopback on the host whose name it is."""


def choose_interface(master: str, port: int, flag: str = "--master-addr") -> Addresses:
    """The addresses of this host and of `master`; gloo and nccl are told the interface, unless the environment does.

    Raises InputError, naming `flag`, when there is no way to the first host.
    """
    own = _address_towards(master, port, flag)
    if _is_loopback(own):
        if _means_this_host(master):
            use_loopback()
            return Addresses(own, master)
        # On the first host its own name may lead to loopback, but the other hosts do not come in there.
        own = master = _preferred_address() or own
    interface = None if _is_loopback(own) else _interface_of(own)
    if interface:
        os.environ.setdefault(_GLOO, interface)
        os.environ.setdefault(_NCCL, f"={interface}")
    return Addresses(own, master)


def use_loopback() -> None:
    """gloo and nccl of this process listen on loopback alone, whatever a profile of the cluster says."""
    name = "lo" if sys.platform == "linux" else "lo0"
    os.environ |= {_GLOO: name, _NCCL: f"={name}"}


def choose_interface_of_process() -> None:
    """For a process of a run: loopback where all are on this host, else the interface by which the first is reached.

    Also for one that is alone: DeepSpeed wants a process group all the same.

    MASTER_ADDR becomes an address that rank 0 can listen at, and that the others of its host reach. A store that the
    launcher already holds stays where it is. Raises InputError when there is no way to the first host.
    """
    environment = os.environ
    processes, here = int(environment.get("WORLD_SIZE", "1")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    addresses = Addresses("127.0.0.1", "127.0.0.1")
    if processes == here:
        use_loopback()
    elif "MASTER_ADDR" in environment:
        addresses = choose_interface(environment["MASTER_ADDR"], int(environment.get("MASTER_PORT", "29500")))
    if "MASTER_ADDR" in environment and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        environment["MASTER_ADDR"] = addresses.own if environment.get("RANK", "0") == "0" else addresses.master


def _address_towards(host: str, port: int, flag: str = "--master-addr") -> str:
    """Where this host would send from. Connecting a datagram socket sends nothing."""
    try:
        family, kind, protocol, _, address = _resolve(host, port)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that a host can have, as a..b
        reason = error.strerror if isinstance(error, OSError) else error
        what, fix = f"there is no way to {host}: {reason}", "give the first host's address, as the others see it"
        raise InputError.at(flag, what, fix) from None


def _resolve(host: str, port: int) -> tuple[int, int, int, str, Any]:
    end = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        except socket.gaierror:
            if time.monotonic() > end:
                raise
        time.sleep(0.5)


def _preferred_address() -> str | None:
    """Of the interface that the user has chosen for gloo, else of the one that the default route goes by."""
    chosen = os.environ.get(_GLOO, "").partition(",")[0]
    if chosen and (address := _address_of(chosen)):
        return address
    try:
        return _address_towards(_OUTSIDE, 9)
    except InputError:
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _means_this_host(name: str) -> bool:
    """Whether loopback is meant: several "hosts" on one machine."""
    try:
        return _is_loopback(name)
    except ValueError:
        return name.partition(".")[0] in _LOCALHOST


def _interface_of(address: str) -> str | None:
    """The interface that has this address; None when it cannot be told, and gloo then decides by itself."""
    if sys.platform != "linux":
        return None
    if ":" in address:
        plain = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        return next((row[5] for row in rows if row[0] == plain), None)
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None for one without, or that does not exist."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()))
        except OSError:
            return None
        return socket.inet_ntoa(answer[20:24])
