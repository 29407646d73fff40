"""Where the launchers of a run's hosts meet: a small store that one of them holds; that one also leads the run."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from artel.errors import InputError, Problem, WorkError
from artel.launching.hosts import Hosts
from artel.launching.interface import choose_interface

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousHandler

# A host may be started long before the one that holds the store, and queues of clusters are slow.
_MEET_SECONDS = 900
# An answer of the store may take this long: the network may be away for minutes, and the run then goes on.
_ANSWER_SECONDS = 300
# torchrun waits 30 s for more hosts once the least number is there; hosts started by one script differ by less.
_LAST_CALL_SECONDS = 15


@dataclass(slots=True)
class Meeting:
    """This host's part in the meeting of all."""

    hosts: Hosts
    leads: bool
    """Whether this host holds the run's lock, prepares the text and compares the run file before others start."""
    _held: TCPStore | None = None

    @classmethod
    def of(cls, hosts: Hosts) -> Meeting:
        """Hold the store if this is the host to do so. Raises InputError when it cannot, or has no way to the other."""
        if hosts.count == 1:
            return cls(hosts, True, _serve("localhost", 0))
        choose_interface(hosts.address, hosts.port, _flag(hosts))
        if hosts.fixed:
            return cls(hosts, hosts.rank == 0)
        if hosts.rank not in (None, 0) or (hosts.rank is None and not _is_of_this_machine(hosts.address)):
            return cls(hosts, False)
        try:
            return cls(hosts, True, _serve(hosts.address, hosts.port))
        except OSError as error:
            if hosts.rank is None and error.errno == errno.EADDRINUSE:  # another "host" of this same machine has it
                return cls(hosts, False)
            what, fix = f"cannot listen there: {error.strerror}", "give a free port of the first host"
            raise InputError([Problem(hosts.where, what, fix)]) from None

    def handler(self, run_id: str) -> RendezvousHandler:
        """What torchrun's agent finds its peers by; waits for the host that holds the store. Raises WorkError."""
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
        from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

        hosts = self.hosts
        limits: dict[str, Any] = {"timeout": _MEET_SECONDS, "join_timeout": _MEET_SECONDS}
        limits |= {"last_call_timeout": _LAST_CALL_SECONDS, "rank": hosts.rank}
        backend = "static" if self.is_static else "c10d"
        parameters = RendezvousParameters(
            backend, hosts.where, run_id, hosts.least, hosts.count, self.local_address, **limits
        )
        if self.is_static:
            return create_rdzv_handler(parameters)
        # The processes get a store of their own at each start. torchrun's way, to share the agents' one, leaves them
        # the keys of those before them, and after the loss of the first host an address where nobody is any more.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        store = self._held or _reach(hosts)
        return create_handler(store, C10dRendezvousBackend(store, run_id), parameters)

    @property
    def is_static(self) -> bool:
        return self.hosts.count > 1 and self.hosts.fixed

    @property
    def local_address(self) -> str:
        """Where the others reach this host."""
        hosts = self.hosts
        return "localhost" if hosts.count == 1 else choose_interface(hosts.address, hosts.port, _flag(hosts))


def _flag(hosts: Hosts) -> str:
    return "--master-addr" if hosts.rank is not None else "--rdzv-endpoint"


def _serve(address: str, port: int) -> TCPStore:
    """A store that this process holds. Raises OSError when the port is taken."""
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

    if port:
        with socket.socket() as probe:  # torch tells a taken port only in words
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    try:
        return TCPStore(address, port, is_master=True, timeout=timedelta(seconds=_ANSWER_SECONDS))
    except DistNetworkError as error:
        raise OSError(errno.EADDRINUSE, str(error).splitlines()[0]) from None


def _reach(hosts: Hosts) -> TCPStore:
    """The store that another host holds, as soon as that host is there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    end = time.monotonic() + _MEET_SECONDS
    while True:
        with suppress(OSError), socket.create_connection((hosts.address, hosts.port), timeout=5):
            break
        if time.monotonic() > end:
            what = f"no artel has answered there for {_MEET_SECONDS // 60} minutes"
            fix = "start it on the host of that address; where that host does not know the address for its own " \
                  "(a service, a proxy), give it --node-rank 0"  # fmt: skip
            raise WorkError([Problem(hosts.where, what, fix)])
        time.sleep(0.5)
    return TCPStore(hosts.address, hosts.port, is_master=False, timeout=timedelta(seconds=_ANSWER_SECONDS))


def _is_of_this_machine(address: str) -> bool:
    """Whether this machine has the address: only then can it be listened at."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False
