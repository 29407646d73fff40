"""The hosts of a run, read from flags and the environment, and the network interface that connects them."""

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

from artel.errors import InputError, Problem
from artel.preparing.progress import reporting

_PORT = 29500
_SIOCGIFADDR = 0x8915  # Linux: get the address of an interface
_UNASSIGNED_ADDRESS = "192.0.2.1"  # of TEST-NET-1 (RFC 5737): no host has it, so it goes by the default route
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # nccl takes names as prefixes, except after a =
# As in the /etc/hosts of distributions; also localhost.localdomain and so on.
_LOCALHOST = ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run. A single host needs no address and port."""

    least: int = 1
    """The run does not continue with fewer."""
    count: int = 1
    """The run does not use more."""
    rank: int | None = 0
    """Number of this host, from 0; None if the rendezvous assigns it."""
    address: str = ""
    """Address of the rendezvous: the first host, or the endpoint."""
    port: int = _PORT
    restarts: int = 0
    """Maximum number of restarts of the processes of this host after a failure."""

    @property
    def elastic(self) -> bool:
        """True if hosts may join and leave during the run."""
        return self.least < self.count

    @property
    def fixed(self) -> bool:
        """True if every host keeps its number from start to end, and nothing is restarted."""
        return self.rank is not None and not self.elastic and self.restarts == 0

    @property
    def where(self) -> str:
        """Address and port of the rendezvous, as text."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @classmethod
    def read(
        cls,
        count: str | None,
        rank: int | None = None,
        address: str | None = None,
        port: int | None = None,
        endpoint: str | None = None,
        restarts: int = 0,
    ) -> Hosts:
        """Read flags, or NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.

        `count` is a number or a range LEAST:MOST; `endpoint` is ADDRESS or ADDRESS:PORT. Raise InputError for
        invalid values.
        """
        environment = os.environ
        problems: list[Problem] = []
        least, most = _read_range(environment.get("NNODES", "1") if count is None else count, problems)
        if endpoint is None:
            rank = _read_number("NODE_RANK", "0", problems) if rank is None else rank
            address = environment.get("MASTER_ADDR", "") if address is None else address
            key = "--master-port"
            if port is None:
                key = "MASTER_PORT"
                port = _read_number("MASTER_PORT", str(_PORT), problems) if most > 1 else _PORT
            if not 0 < port < 2**16:
                problems.append(Problem(key, f"is {port}", "use a port from 1 to 65535"))
        else:
            if address is not None or port is not None:
                what = "cannot be combined with --master-addr and --master-port"
                problems.append(Problem("--rdzv-endpoint", what, "use one of the two"))
            address, port = _split_endpoint(endpoint, problems)
        hosts = cls(least, most, rank, address, port, restarts)
        if rank is not None and not 0 <= rank < most:
            problems.append(
                Problem("--node-rank", f"{rank} must be less than the number of hosts, {most}", "count from 0")
            )
        if most > 1 and not address:
            fix = "use the first host's address, or --rdzv-endpoint ADDRESS:PORT"
            problems.append(Problem("--master-addr", "is required for several hosts", fix))
        if problems:
            raise InputError(problems)
        return hosts


def _read_range(text: str, problems: list[Problem]) -> tuple[int, int]:
    """Read the minimum and maximum in `4` or `1:4`."""
    least, _, most = text.partition(":")
    try:
        counts = int(least), int(most or least)
    except ValueError:
        problems.append(Problem("--nnodes", f"{text!r} is not a number of hosts", "use 4, or 1:4 for one to four"))
        return 1, 1
    if counts[0] < 1:
        problems.append(Problem("--nnodes", f"{counts[0]} hosts are too few", "use 1 or more"))
    elif counts[0] > counts[1]:
        problems.append(Problem("--nnodes", f"{text}: the minimum is above the maximum", f"use {most}:{least}"))
    return counts


def _read_number(name: str, default: str, problems: list[Problem]) -> int:
    """Read a number in the environment."""
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        problems.append(Problem(name, f"{text!r} in the environment is not a number"))
        return 0


def _split_endpoint(endpoint: str, problems: list[Problem]) -> tuple[str, int]:
    """Split `host`, `host:29500` or `[fe80::1]:29500` into address and port."""
    address, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        address, port = endpoint, str(_PORT)
    if address and port.isdecimal() and 0 < int(port) < 2**16:
        return address.strip("[]"), int(port)
    fix = "use ADDRESS:PORT, e.g. node1:29500"
    problems.append(Problem("--rdzv-endpoint", f"{endpoint!r} is not an address and port", fix))
    return "", _PORT


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of a rendezvous, as seen by this host."""

    local: str
    """Address where this host listens for other hosts."""
    master: str
    """Address of the first host, as reached from this one."""


def choose_interface(master: str, port: int, flag: str = "--master-addr") -> Addresses:
    """Return the addresses of this host and of `master`. Set the interface of gloo and nccl, unless it is set.

    The interface is the one that reaches the first host. By default gloo listens at the address of the host's own name,
    which on Debian and Ubuntu is loopback (127.0.1.1 in /etc/hosts), so that two hosts never find each other. nccl uses
    any interface except loopback, even if all processes are on one host.

    Raise InputError, with `flag`, if the first host cannot be reached, and for an interface that gloo cannot use.
    """
    local = _address_towards(master, port, flag)
    if is_loopback(local):
        if _is_this_host(master):
            use_loopback()
            return Addresses(local, master)
        # On the first host its own name may be loopback, where the other hosts cannot connect.
        local = master = _preferred_address() or local
    _check_gloo_interface()
    interface = None if is_loopback(local) else _find_interface(local)
    if interface:
        os.environ.setdefault(_GLOO, interface)
        os.environ.setdefault(_NCCL, f"={interface}")
    return Addresses(local, master)


def use_loopback() -> None:
    """Make gloo and nccl of this process listen on loopback only, and override the environment."""
    name = "lo" if sys.platform == "linux" else "lo0"
    os.environ |= {_GLOO: name, _NCCL: f"={name}"}


def choose_process_interface() -> None:
    """Choose the interface of a process of a run: loopback on one host, else the one that reaches the first host.

    A single process needs it too, because DeepSpeed makes a process group. Set MASTER_ADDR to an address where rank 0
    can listen and other ranks reach it, unless the launcher serves the store. Raise InputError if the first host cannot
    be reached.
    """
    environment = os.environ
    is_single_host = int(environment.get("WORLD_SIZE", "1")) == int(environment.get("LOCAL_WORLD_SIZE", "1"))
    addresses = Addresses("127.0.0.1", "127.0.0.1")
    if is_single_host:
        use_loopback()
    elif "MASTER_ADDR" in environment:
        addresses = choose_interface(environment["MASTER_ADDR"], int(environment.get("MASTER_PORT", "29500")))
    if "MASTER_ADDR" in environment and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        environment["MASTER_ADDR"] = addresses.local if environment.get("RANK", "0") == "0" else addresses.master


def _address_towards(host: str, port: int, flag: str = "--master-addr") -> str:
    """Return the address that this host would send from. Connecting a datagram socket sends nothing."""
    try:
        family, kind, protocol, _, address = _resolve_address(host, port)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name, such as a..b
        reason = error.strerror if isinstance(error, OSError) else error
        what, fix = f"cannot reach {host}: {reason}", "use an address of the first host that the others can reach"
        raise InputError.at(flag, what, fix) from None


def resolve_seconds() -> float:
    """Return how long to wait until the name of the first host resolves.

    In Kubernetes a pod has a name only once it is scheduled, which takes as long as hosts wait for one another.
    """
    return 900.0 if "KUBERNETES_SERVICE_HOST" in os.environ else 30.0


def _resolve_address(host: str, port: int) -> tuple[int, int, int, str, Any]:
    deadline = time.monotonic() + resolve_seconds()
    with reporting(lambda: f"waiting until the name of the first host resolves: {host}"):
        while True:
            try:
                return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            except socket.gaierror:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)


def _preferred_address() -> str | None:
    """Return the address of the user's interface for gloo, or of the default route."""
    chosen = os.environ.get(_GLOO, "").partition(",")[0]
    if chosen and (address := _interface_address(chosen)):
        return address
    try:
        return _address_towards(_UNASSIGNED_ADDRESS, 9)
    except InputError:
        return None


def _check_gloo_interface() -> None:
    """Raise InputError if the environment names interfaces that gloo cannot use, which would end every process."""
    names = os.environ.get(_GLOO, "")
    usable = [name for _, name in socket.if_nameindex() if _interface_address(name) or _has_ipv6(name)]
    unknown = [name for name in names.split(",") if name not in usable]
    if names and unknown and sys.platform == "linux":
        what = f"names {unknown[0]!r}, which is not an interface of this host with an address"
        between_hosts = [name for name in usable if name != "lo"] or usable
        fix = (
            f"set it to {' or '.join(between_hosts)} (only nccl accepts prefixes, ^ and =); or unset it to use the "
            "interface that reaches the first host"
        )
        raise InputError.at(_GLOO, what, fix)


def _has_ipv6(interface: str) -> bool:
    file = Path("/proc/net/if_inet6")
    return file.exists() and interface in file.read_text(encoding="ascii").split()


def is_loopback(address: str) -> bool:
    """True for a loopback address; False for other addresses, and for names."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_this_host(name: str) -> bool:
    """True for loopback: several "hosts" on one machine."""
    return is_loopback(name) or name.partition(".")[0] in _LOCALHOST


def _find_interface(address: str) -> str | None:
    """Return the interface with this address. None if it is unknown; gloo then decides."""
    if sys.platform != "linux":
        return None
    if ":" in address:
        digits = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
        entries = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        return next((entry[5] for entry in entries if entry[0] == digits), None)
    return next((name for _, name in socket.if_nameindex() if _interface_address(name) == address), None)


def _interface_address(interface: str) -> str | None:
    """Return the IPv4 address of an interface. None if it has none or does not exist."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            response = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
        return socket.inet_ntoa(response[20:24])
