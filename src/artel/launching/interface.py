"""By which network interface hosts meet.

gloo listens where the host's own name leads, and on Debian and Ubuntu that is loopback (127.0.1.1 in /etc/hosts): two
hosts then never find each other. The right interface is the one by which the first host is reached.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
import time
from typing import Any

from artel.errors import InputError, Problem

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_OUTSIDE = "192.0.2.1"  # of TEST-NET-1 (RFC 5737): no host has it, so the way there is the default route
# Kubernetes knows a pod's name only some seconds after the pod begins.
_NAME_SECONDS = 30


def choose_interface(master: str, port: int, flag: str = "--master-addr") -> str:
    """This host's address as the others see it; gloo is told its interface, unless GLOO_SOCKET_IFNAME already does.

    Raises InputError, naming `flag`, when there is no way to the first host.
    """
    address = _address_towards(master, port, flag)
    if _is_loopback(address) and not _means_this_host(master):
        # On the first host its own name may lead to loopback, but the other hosts do not come in there.
        address = _default_address() or address
    if not _is_loopback(address) and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = _interface_of(address)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    return address


def choose_interface_of_worker() -> None:
    """The same for a process that another launcher started, when its peers may be on other hosts."""
    environment = os.environ
    processes, here = int(environment["WORLD_SIZE"]), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if processes > here and "MASTER_ADDR" in environment:
        choose_interface(environment["MASTER_ADDR"], int(environment.get("MASTER_PORT", "29500")))


def _address_towards(host: str, port: int, flag: str = "--master-addr") -> str:
    """Where this host would send from. Connecting a datagram socket sends nothing."""
    try:
        family, kind, protocol, _, address = _resolve(host, port)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        what, fix = (
            f"there is no way to {host}: {error.strerror}",
            "give the first host's address, as the others see it",
        )
        raise InputError([Problem(flag, what, fix)]) from None


def _resolve(host: str, port: int) -> tuple[int, int, int, str, Any]:
    end = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        except socket.gaierror:
            if time.monotonic() > end:
                raise
        time.sleep(0.5)


def _default_address() -> str | None:
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
        return name == "localhost"


def _interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address; None when it cannot be told, and gloo then decides by itself."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
