"""The network interface at which the processes of a run listen: loopback on one host, else the one between hosts.

gloo listens at the address of the host's own name, which on Debian and Ubuntu is loopback (127.0.1.1 in /etc/hosts):
two hosts then never find each other. The right interface is the one that reaches the first host. nccl uses any
interface except loopback, also where all processes are on one host.
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
_OUTSIDE = "192.0.2.1"  # of TEST-NET-1 (RFC 5737): no host has it, so it goes by the default route
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # nccl takes names as prefixes, except after a =
# As in the /etc/hosts of distributions; also localhost.localdomain and so on.
_LOCALHOST = ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
_NAME_SECONDS = 30  # Kubernetes resolves a pod's name only some seconds after its start


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of the rendezvous, as this host sees them."""

    own: str
    """Of this host, as the others reach it: it listens there."""
    master: str
    """Of the first host, as this one reaches it: on the first host its own name may be loopback."""


def choose_interface(master: str, port: int, flag: str = "--master-addr") -> Addresses:
    """The addresses of this host and of `master`; sets the interface of gloo and nccl, unless the environment does.

    Raises InputError, with `flag`, where the first host cannot be reached, and for an interface that gloo cannot use.
    """
    own = _address_towards(master, port, flag)
    if _is_loopback(own):
        if _means_this_host(master):
            use_loopback()
            return Addresses(own, master)
        # On the first host its own name may be loopback, where the other hosts cannot connect.
        own = master = _preferred_address() or own
    _check_interface_of_gloo()
    interface = None if _is_loopback(own) else _interface_of(own)
    if interface:
        os.environ.setdefault(_GLOO, interface)
        os.environ.setdefault(_NCCL, f"={interface}")
    return Addresses(own, master)


def use_loopback() -> None:
    """Make gloo and nccl of this process listen on loopback only, whatever the cluster's environment says."""
    name = "lo" if sys.platform == "linux" else "lo0"
    os.environ |= {_GLOO: name, _NCCL: f"={name}"}


def choose_interface_of_process() -> None:
    """For a process of a run: loopback where all are on this host, else the interface that reaches the first host.

    A single process needs it too: DeepSpeed makes a process group.

    MASTER_ADDR becomes an address at which rank 0 can listen, and which the others of its host reach. A store that the
    launcher already serves stays where it is. Raises InputError where the first host cannot be reached.
    """
    environment = os.environ
    processes, on_host = int(environment.get("WORLD_SIZE", "1")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    addresses = Addresses("127.0.0.1", "127.0.0.1")
    if processes == on_host:
        use_loopback()
    elif "MASTER_ADDR" in environment:
        addresses = choose_interface(environment["MASTER_ADDR"], int(environment.get("MASTER_PORT", "29500")))
    if "MASTER_ADDR" in environment and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        environment["MASTER_ADDR"] = addresses.own if environment.get("RANK", "0") == "0" else addresses.master


def _address_towards(host: str, port: int, flag: str = "--master-addr") -> str:
    """The address from which this host would send. Connecting a datagram socket sends nothing."""
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
    """The address of the interface that the user has set for gloo, or of the default route."""
    chosen = os.environ.get(_GLOO, "").partition(",")[0]
    if chosen and (address := _address_of(chosen)):
        return address
    try:
        return _address_towards(_OUTSIDE, 9)
    except InputError:
        return None


def _check_interface_of_gloo() -> None:
    """Raise InputError where the environment names interfaces that gloo cannot use: it would end every process."""
    chosen = os.environ.get(_GLOO, "")
    usable = [name for _, name in socket.if_nameindex() if _address_of(name) or _has_ipv6(name)]
    unknown = [name for name in chosen.split(",") if name not in usable]
    if chosen and unknown and sys.platform == "linux":
        what = f"names {unknown[0]!r}, which is no interface of this host with an address"
        between_hosts = [name for name in usable if name != "lo"] or usable
        fix = (
            f"write {' or '.join(between_hosts)}, exactly (only nccl takes prefixes, ^ and =); or unset it, and the "
            "interface that reaches the first host is used"
        )
        raise InputError.at(_GLOO, what, fix)


def _has_ipv6(interface: str) -> bool:
    file = Path("/proc/net/if_inet6")
    return file.exists() and interface in file.read_text(encoding="ascii").split()


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _means_this_host(name: str) -> bool:
    """True for loopback: several "hosts" on one machine."""
    try:
        return _is_loopback(name)
    except ValueError:
        return name.partition(".")[0] in _LOCALHOST


def _interface_of(address: str) -> str | None:
    """The interface with this address; None where it is unknown, and gloo then decides."""
    if sys.platform != "linux":
        return None
    if ":" in address:
        plain = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        return next((row[5] for row in rows if row[0] == plain), None)
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None where it has none or does not exist."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()))
        except OSError:
            return None
        return socket.inet_ntoa(answer[20:24])
