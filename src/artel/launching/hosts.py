"""The hosts of a run, from flags and the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from artel.errors import InputError, Problem

_PORT = 29500


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run. A single host needs no address and port."""

    least: int = 1
    """The run does not continue with fewer."""
    count: int = 1
    """The run does not use more."""
    rank: int | None = 0
    """The number of this host, from 0; None: the rendezvous assigns it."""
    address: str = ""
    """Of the host where they meet: the first one, or the rendezvous endpoint."""
    port: int = _PORT
    restarts: int = 0
    """How often the processes of this host are restarted after a failure."""

    @property
    def elastic(self) -> bool:
        """True where hosts may join and leave during the run."""
        return self.least < self.count

    @property
    def fixed(self) -> bool:
        """True where every host keeps its number from start to end, and nothing is restarted."""
        return self.rank is not None and not self.elastic and self.restarts == 0

    @property
    def where(self) -> str:
        """Address and port where they meet, as text."""
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

        `count` is a number or a range LEAST:MOST; `endpoint` is ADDRESS or ADDRESS:PORT. Raises InputError.
        """
        environment = os.environ
        problems: list[Problem] = []
        least, most = _range(environment.get("NNODES", "1") if count is None else count, problems)
        if endpoint is None:
            rank = _number("NODE_RANK", "0", problems) if rank is None else rank
            address = environment.get("MASTER_ADDR", "") if address is None else address
            place = "--master-port"
            if port is None:
                place = "MASTER_PORT"
                port = _number("MASTER_PORT", str(_PORT), problems) if most > 1 else _PORT
            if not 0 < port < 2**16:
                problems.append(Problem(place, f"is {port}", "write a port: 1 to 65535"))
        else:
            if address is not None or port is not None:
                problems.append(
                    Problem(
                        "--rdzv-endpoint",
                        "says where hosts meet, and so do --master-addr and --master-port",
                        "give one of them",
                    )
                )
            address, port = _address(endpoint, problems)
        hosts = cls(least, most, rank, address, port, restarts)
        if rank is not None and not 0 <= rank < most:
            problems.append(Problem("--node-rank", f"{rank} is not a host of {most}", "count from 0"))
        if most > 1 and not address:
            fix = "give the first host's address, or --rdzv-endpoint ADDRESS:PORT"
            problems.append(Problem("--master-addr", "is needed for several hosts", fix))
        if problems:
            raise InputError(problems)
        return hosts


def _range(text: str, problems: list[Problem]) -> tuple[int, int]:
    """The minimum and maximum in `4` or `1:4`."""
    least, _, most = text.partition(":")
    try:
        counts = int(least), int(most or least)
    except ValueError:
        problems.append(Problem("--nnodes", f"{text!r} is not a number of hosts", "write 4, or 1:4 for one to four"))
        return 1, 1
    if counts[0] < 1:
        problems.append(Problem("--nnodes", f"{counts[0]} hosts cannot run anything", "write 1 or more"))
    elif counts[0] > counts[1]:
        problems.append(Problem("--nnodes", f"{text} has more at least than at most", f"write {most}:{least}"))
    return counts


def _number(name: str, usual: str, problems: list[Problem]) -> int:
    """A number in the environment."""
    text = os.environ.get(name, usual)
    try:
        return int(text)
    except ValueError:
        problems.append(Problem(name, f"{text!r} in the environment is not a number"))
        return 0


def _address(endpoint: str, problems: list[Problem]) -> tuple[str, int]:
    """Address and port of `host`, `host:29500` or `[fe80::1]:29500`."""
    address, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        address, port = endpoint, str(_PORT)
    if address and port.isdecimal() and 0 < int(port) < 2**16:
        return address.strip("[]"), int(port)
    fix = "write ADDRESS:PORT, as node1:29500"
    problems.append(Problem("--rdzv-endpoint", f"{endpoint!r} is not an address and port", fix))
    return "", _PORT
