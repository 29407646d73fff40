"""The rendezvous of a run's hosts: a small store on one of them, which also leads the run."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from artel.errors import InputError, WorkError
from artel.launching.hosts import Hosts
from artel.launching.interface import Addresses, choose_interface
from artel.launching.run_secret import run_secret
from artel.preparing.progress import reporting

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from artel.launching.signed_store import SignedStore
    from artel.training.run_folder import RunFolder

# A host may start long before the one with the store, and the queues of clusters are slow.
_MEET_SECONDS = 900
# The longest wait for an answer of the store: a network may fail for minutes, and the run then continues.
_ANSWER_SECONDS = 300
# torchrun waits 30 s for more hosts after the minimum has come; hosts started by one script come within less.
_LAST_CALL_SECONDS = 15


@dataclass(slots=True)
class Meeting:
    """The part of this host in the rendezvous."""

    hosts: Hosts
    leads: bool
    """True for the host that holds the run's lock, prepares the text and compares the run file before others start."""
    _addresses: Addresses | None = None
    _store: TCPStore | None = None

    @classmethod
    def of(cls, hosts: Hosts) -> Meeting:
        """Serve the store if this is its host. Raises InputError where it cannot, or cannot reach that host."""
        if hosts.count == 1:
            return cls(hosts, True)
        addresses = choose_interface(hosts.address, hosts.port, _flag(hosts))
        if hosts.rank not in (None, 0) or (hosts.rank is None and not _is_of_this_machine(hosts.address)):
            return cls(hosts, False, addresses)
        from artel.parallel.process_group import serve_store

        try:
            store = serve_store(addresses.own, hosts.port, timedelta(seconds=_ANSWER_SECONDS))
        except OSError as error:
            if hosts.rank is None and error.errno == errno.EADDRINUSE:  # another "host" on this machine serves it
                return cls(hosts, False, addresses)
            what, fix = f"cannot listen there: {error.strerror}", "give a free port of the first host"
            raise InputError.at(hosts.where, what, fix) from None
        return cls(hosts, True, addresses, store)

    def handler(self, folder: RunFolder, announce: Callable[[str], None]) -> RendezvousHandler:
        """The rendezvous handler for torchrun's agent; waits for the host with the store.

        The path of the run's `folder` separates two runs that use the same address by mistake.
        Raises InputError where hosts share no secret, WorkError where the other host does not come.
        """
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        from artel.launching.rendezvous import NumberedHosts, OneHost

        hosts, addresses, run_id = self.hosts, self._addresses, _run_id(folder)
        if addresses is None:
            return OneHost(run_id, timedelta(seconds=_ANSWER_SECONDS))
        store = self._signed_store(addresses, folder, announce)
        if hosts.fixed:
            rank = hosts.rank or 0
            address = addresses.master if rank else addresses.own
            return NumberedHosts(run_id, store, rank, hosts.count, address, hosts.port)
        # The processes get a new store at each start. torchrun would share the agents' store, with the keys of earlier
        # processes in it, and after the loss of the first host with an address where nobody listens.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        limits: dict[str, Any] = {"timeout": _MEET_SECONDS, "join_timeout": _MEET_SECONDS}
        limits |= {"last_call_timeout": _LAST_CALL_SECONDS, "rank": hosts.rank}
        parameters = RendezvousParameters(
            "c10d", hosts.where, run_id, hosts.least, hosts.count, addresses.own, **limits
        )
        return create_handler(store, C10dRendezvousBackend(store, run_id), parameters)

    def _signed_store(self, addresses: Addresses, folder: RunFolder, announce: Callable[[str], None]) -> SignedStore:
        from artel.launching.signed_store import SignedStore

        if self._store is not None:
            store = self._store
        else:
            with reporting(announce, lambda: f"this host waits for the first one to answer at {self.hosts.where}"):
                store = _reach(self.hosts, addresses.master)
        if self.hosts.fixed:  # the first values come from hosts that may be late
            store.set_timeout(timedelta(seconds=_MEET_SECONDS))
        return SignedStore(store, run_secret(folder.secret, self.leads, _MEET_SECONDS, announce))

    @property
    def local_address(self) -> str:
        """The address at which the others reach this host."""
        return "localhost" if self._addresses is None else self._addresses.own


def _run_id(folder: RunFolder) -> str:
    """torch's name for the run: a digest, because torch uses it in file names and a path has slashes."""
    return hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:16]


def _flag(hosts: Hosts) -> str:
    return "--master-addr" if hosts.rank is not None else "--rdzv-endpoint"


def _reach(hosts: Hosts, address: str) -> TCPStore:
    """The store of another host, as soon as that host answers."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    end = time.monotonic() + _MEET_SECONDS
    while True:
        with suppress(OSError), socket.create_connection((address, hosts.port), timeout=5):
            break
        if time.monotonic() > end:
            what = f"no artel has answered there for {_MEET_SECONDS // 60} minutes"
            fix = (
                "start it on the host of that address; where that host does not know the address for its own "
                "(a service, a proxy), give it --node-rank 0, and where its own name means 127.0.1.1 to it, write "
                "an address in place of the name"
            )
            raise WorkError.at(hosts.where, what, fix)
        time.sleep(0.5)
    return TCPStore(address, hosts.port, is_master=False, timeout=timedelta(seconds=_ANSWER_SECONDS))


def _is_of_this_machine(address: str) -> bool:
    """True where this machine has the address, and can listen there."""
    try:
        resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in resolved:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False
