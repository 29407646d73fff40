"""Rendezvous handlers for torchrun's agent that never unpickle data from outside the run.

A single host needs no rendezvous. Hosts with fixed numbers do not need torch's dynamic rendezvous, whose state is a
pickle. Hosts that may join and leave use it, over a store with signed values (`SignedStore`).
"""

from __future__ import annotations

import hmac
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from artel.parallel.process_group import serve_store

_LOOPBACK = "127.0.0.1"
_DIGEST = "sha256"
_SIGNATURE_BYTES = 32  # before each value


class ForeignValue(RendezvousStateError):
    """A value that was not written by a host with the secret."""


class SignedStore(Store):
    """`store` with values signed by `secret`. Reading raises ForeignValue if a signature is wrong.

    torch's rendezvous keeps its state as a pickle in a TCPStore, which has no password. This store writes each value
    with an HMAC of key and value, and verifies it on reading: without the secret nobody can make the launcher unpickle
    anything. Counters are plain numbers. Anyone who reaches the port can still end a run.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        super().__init__()
        self._store: Any = store  # its methods accept bytes, unlike their signatures
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        return self._verify(key, self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._verify(key, value) for key, value in zip(keys, self._store.multi_get(keys), strict=True)]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Compare and set; as in torch, an empty `expected` means that the key does not exist."""
        before = self._sign(key, expected) if expected else b""
        return self._verify(key, self._store.compare_set(key, before, self._sign(key, desired)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, *filter(None, [timeout]))

    def _sign(self, key: str, value: str | bytes) -> bytes:
        value = value.encode() if isinstance(value, str) else bytes(value)
        return self._compute_signature(key, value) + value

    def _verify(self, key: str, value: bytes) -> bytes:
        signature, value = value[:_SIGNATURE_BYTES], value[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._compute_signature(key, value)):
            raise ForeignValue(f"{key} was not written by a host of this run")
        return value

    def _compute_signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + value, _DIGEST)


class _KnownHosts(RendezvousHandler):
    """Base class if all hosts are known. The launcher serves the store of the processes."""

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
        """Do nothing: nobody reads it."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class OneHost(_KnownHosts):
    """One host, with a store on loopback. The launcher reads nothing that other processes can write."""

    def __init__(self, run_id: str, timeout: timedelta) -> None:
        super().__init__(run_id)
        self._timeout = timeout
        self._served: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Make a new store for each start of the processes: an old one has keys of earlier processes."""
        self._served = serve_store(_LOOPBACK, 0, self._timeout)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_LOOPBACK, self._served.port))


class NumberedHosts(_KnownHosts):
    """Host `rank` of `num_hosts`, with the store of the first host at `address` and `port`."""

    def __init__(self, run_id: str, store: SignedStore, rank: int, num_hosts: int, address: str, port: int) -> None:
        super().__init__(run_id)
        self._signed = store  # PrefixStore does not keep the Python object alive
        self._store: Store = PrefixStore(run_id, store)
        self._rank = rank
        self._num_hosts = num_hosts
        self._info = RendezvousStoreInfo(address, port)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, self._rank, self._num_hosts, self._info)
