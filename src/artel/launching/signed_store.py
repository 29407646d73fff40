"""A store with signed values: only values that a host of the run has written are read.

torch's rendezvous keeps its state as a pickle in a TCPStore, which has no password. This store writes each value with
an HMAC of key and value, and verifies it on reading: without the secret nobody can make the launcher unpickle anything.
Counters are plain numbers. Whoever reaches the port can still end a run.
"""

from __future__ import annotations

import hmac
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

_DIGEST = "sha256"
_LENGTH = 32  # bytes of a signature, before the value


class ForeignValue(RendezvousStateError):
    """A value was not written by a host that knows the secret."""


class SignedStore(Store):
    """`store`, with values signed by `secret`. Its readers raise ForeignValue."""

    def __init__(self, store: Store, secret: bytes) -> None:
        super().__init__()
        self._store: Any = store  # its methods accept bytes, which their signatures do not say
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        return self._verified(key, self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._verified(key, value) for key, value in zip(keys, self._store.multi_get(keys), strict=True)]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """As in torch: an empty `expected` means that there is no such key."""
        before = self._signed(key, expected) if expected else b""
        return self._verified(key, self._store.compare_set(key, before, self._signed(key, desired)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, *filter(None, [timeout]))

    def _signed(self, key: str, value: str | bytes) -> bytes:
        value = value.encode() if isinstance(value, str) else bytes(value)
        return self._signature(key, value) + value

    def _verified(self, key: str, value: bytes) -> bytes:
        signature, value = value[:_LENGTH], value[_LENGTH:]
        if not hmac.compare_digest(signature, self._signature(key, value)):
            raise ForeignValue(f"{key} was not written by a host of this run")
        return value

    def _signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + value, _DIGEST)
