"""How the launchers of a run's hosts find each other, as torchrun's agent asks for it: nothing foreign is unpickled.

One host has nobody to find. Hosts that have their numbers from the start need none of torch's dynamic rendezvous, whose
state is a pickle. Hosts that may come and go have it, over a store whose values are signed (signed_store.py).
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from artel.launching.signed_store import SignedStore
from artel.parallel.tcp_store import serve_store

_LOOPBACK = "127.0.0.1"


class _KnownHosts(RendezvousHandler):
    """All hosts are known beforehand, and the launcher holds the store of the processes."""

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
        """There is nobody to be told."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class OneHost(_KnownHosts):
    """The processes of one host meet on loopback; the launcher reads nothing that another process can write."""

    def __init__(self, run_id: str, timeout: timedelta) -> None:
        super().__init__(run_id)
        self._timeout = timeout
        self._served: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """A store of their own for the processes of each start: in an old one are the keys of those before them."""
        self._served = serve_store(_LOOPBACK, 0, self._timeout)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_LOOPBACK, self._served.port))


class NumberedHosts(_KnownHosts):
    """Host `rank` of `count` at the store of the first one, which it reaches at `address` and `port`."""

    def __init__(self, run_id: str, store: SignedStore, rank: int, count: int, address: str, port: int) -> None:
        super().__init__(run_id)
        self._signed = store  # PrefixStore does not keep what Python has of it
        self._store: Store = PrefixStore(run_id, store)
        self._rank, self._count, self._info = rank, count, RendezvousStoreInfo(address, port)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, self._rank, self._count, self._info)
