"""Rendezvous handlers for torchrun's agent that unpickle nothing from others.

A single host has nobody to find. Hosts with fixed numbers do not need torch's dynamic rendezvous, whose state is a
pickle. Hosts that may join and leave use it, over a store whose values are signed (signed_store.py).
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from artel.launching.signed_store import SignedStore
from artel.parallel.process_group import serve_store

_LOOPBACK = "127.0.0.1"


class _KnownHosts(RendezvousHandler):
    """All hosts are known beforehand, and the launcher serves the store of the processes."""

    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return "artel"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to do: nobody reads it."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class OneHost(_KnownHosts):
    """The processes of one host meet on loopback; the launcher reads nothing that other processes can write."""

    def __init__(self, run_id: str, timeout: timedelta) -> None:
        super().__init__(run_id)
        self._timeout = timeout
        self._served: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store for each start of the processes: an old one has the keys of earlier processes."""
        self._served = serve_store(_LOOPBACK, 0, self._timeout)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_LOOPBACK, self._served.port))


class NumberedHosts(_KnownHosts):
    """Host `rank` of `count`, at the store of the first host, which it reaches at `address` and `port`."""

    def __init__(self, run_id: str, store: SignedStore, rank: int, count: int, address: str, port: int) -> None:
        super().__init__(run_id)
        self._signed = store  # PrefixStore does not keep the Python object alive
        self._store: Store = PrefixStore(run_id, store)
        self._rank, self._count, self._info = rank, count, RendezvousStoreInfo(address, port)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, self._rank, self._count, self._info)
