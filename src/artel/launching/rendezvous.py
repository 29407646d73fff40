"""The rendezvous of a run's hosts: a small store on one of them, which also leads the run."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artel.errors import InputError, WorkError
from artel.launching.hosts import Addresses, Hosts, choose_interface
from artel.messages import logger
from artel.preparing.progress import reporting
from artel.storage import disk_errors

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from artel.launching.rendezvous_handlers import SignedStore
    from artel.training.run_folder import RunFolder

SECRET_VARIABLE = "ARTEL_SECRET"
_MIN_SECRET_BYTES = 16  # anyone who reaches the port can try secrets against a signature without limit
_SECRET_FIX = f"export the same {SECRET_VARIABLE} on every host"
_SILENT_SECONDS = 10
# A host may start long before the one with the store, because queues of clusters are slow.
_RENDEZVOUS_SECONDS = 900
# The longest wait for an answer of the store: a network may fail for minutes, and the run then continues.
_ANSWER_SECONDS = 300
# torchrun waits 30 s for more hosts after the minimum has come; hosts started by one script come within less.
_LAST_CALL_SECONDS = 15


@dataclass(slots=True)
class Rendezvous:
    """The rendezvous, as seen by this host."""

    hosts: Hosts
    leads: bool
    """True for the host that holds the run's lock, prepares the text and compares the run file before others start."""
    _addresses: Addresses | None = None
    _store: TCPStore | None = None

    @classmethod
    def open(cls, hosts: Hosts) -> Rendezvous:
        """Serve the store if this is its host. Raise InputError if that fails, or if that host cannot be reached."""
        if hosts.count == 1:
            return cls(hosts, True)
        flag = "--master-addr" if hosts.rank is not None else "--rdzv-endpoint"
        addresses = choose_interface(hosts.address, hosts.port, flag)
        if hosts.rank not in (None, 0) or (hosts.rank is None and not _is_local(hosts.address)):
            return cls(hosts, False, addresses)
        from artel.parallel.process_group import serve_store

        try:
            store = serve_store(addresses.local, hosts.port, timedelta(seconds=_ANSWER_SECONDS))
        except OSError as error:
            if hosts.rank is None and error.errno == errno.EADDRINUSE:  # another "host" on this machine serves it
                return cls(hosts, False, addresses)
            what, fix = f"cannot listen there: {error.strerror}", "use a free port of the first host"
            raise InputError.at(hosts.where, what, fix) from None
        return cls(hosts, True, addresses, store)

    def handler(self, folder: RunFolder) -> RendezvousHandler:
        """Return the rendezvous handler for torchrun's agent, after waiting for the host with the store.

        The path of the run's `folder` separates two runs that use the same address by mistake. Raise InputError if the
        hosts share no secret, WorkError if the other host does not come.
        """
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        from artel.launching.rendezvous_handlers import NumberedHosts, OneHost

        hosts, addresses = self.hosts, self._addresses
        run_id = _run_id(folder)
        if addresses is None:
            return OneHost(run_id, timedelta(seconds=_ANSWER_SECONDS))
        store = self._signed_store(addresses, folder)
        if hosts.fixed:
            rank = hosts.rank or 0
            address = addresses.master if rank else addresses.local
            return NumberedHosts(run_id, store, rank, hosts.count, address, hosts.port)
        # The processes get a new store at each start. torchrun would share the agents' store, which has keys of earlier
        # processes, and which is gone if the first host is lost.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        limits: dict[str, Any] = {"timeout": _RENDEZVOUS_SECONDS, "join_timeout": _RENDEZVOUS_SECONDS}
        limits |= {"last_call_timeout": _LAST_CALL_SECONDS, "rank": hosts.rank}
        parameters = RendezvousParameters(
            "c10d", hosts.where, run_id, hosts.least, hosts.count, addresses.local, **limits
        )
        return create_handler(store, C10dRendezvousBackend(store, run_id), parameters)

    def _signed_store(self, addresses: Addresses, folder: RunFolder) -> SignedStore:
        from artel.launching.rendezvous_handlers import SignedStore

        if self._store is not None:
            store = self._store
        else:
            with reporting(lambda: f"waiting for the first host to answer at {self.hosts.where}"):
                store = _connect_store(self.hosts, addresses.master)
        if self.hosts.fixed:  # the first values come from hosts that may be late
            store.set_timeout(timedelta(seconds=_RENDEZVOUS_SECONDS))
        return SignedStore(store, run_secret(folder.secret, self.leads, _RENDEZVOUS_SECONDS))

    @property
    def local_address(self) -> str:
        """The address where other hosts reach this one."""
        return "localhost" if self._addresses is None else self._addresses.local


def _run_id(folder: RunFolder) -> str:
    """Return an id of the run for torch: a digest, because torch uses it in file names and a path has slashes."""
    return hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:16]


def _connect_store(hosts: Hosts, address: str) -> TCPStore:
    """Connect to the store of another host as soon as it answers."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + _RENDEZVOUS_SECONDS
    while True:
        with suppress(OSError), socket.create_connection((address, hosts.port), timeout=5):
            break
        if time.monotonic() > deadline:
            what = f"no answer for {_RENDEZVOUS_SECONDS // 60} minutes"
            fix = (
                "start artel on the host of that address; if that host does not know the address as its own (service, "
                "proxy), start it with --node-rank 0; if its name resolves to 127.0.1.1 there, use an address instead"
            )
            raise WorkError.at(hosts.where, what, fix)
        time.sleep(0.5)
    return TCPStore(address, hosts.port, is_master=False, timeout=timedelta(seconds=_ANSWER_SECONDS))


def _is_local(address: str) -> bool:
    """True if this machine has the address and can listen there."""
    try:
        resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, socket_address in resolved:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(socket_address)
            return True
    return False


def run_secret(file: Path, leads: bool, timeout: float) -> bytes:
    """Return ARTEL_SECRET, or the content of `file` in the folder that all hosts share. It is never on a command line.

    With the secret, hosts accept nothing from others. The leading host writes the file once; the others wait for it, at
    most `timeout` seconds, and log that. Raise InputError if the secret is short, missing, or readable by others;
    WorkError for errors of the disk.
    """
    text = os.environ.get(SECRET_VARIABLE)
    if text is not None:
        return _check_secret(text.encode("utf-8", "surrogateescape"), SECRET_VARIABLE)
    with disk_errors(file):
        if leads and not file.exists():
            _write_secret(file)
        _await_secret(file, timeout)
        if file.stat().st_mode & 0o077:
            fix = f"remove it, and restart all hosts; if the disk has no file owners, {_SECRET_FIX}"
            raise InputError.at(str(file), "other users can read this secret", fix)
        return _check_secret(file.read_bytes(), str(file))


def _check_secret(secret: bytes, location: str) -> bytes:
    if len(secret.strip()) < _MIN_SECRET_BYTES:
        fix = f"use {_MIN_SECRET_BYTES} or more, e.g. from: openssl rand -hex 32"
        raise InputError.at(location, f"has {len(secret.strip())} bytes, which can be guessed", fix)
    return secret


def _write_secret(file: Path) -> None:
    """Write the file atomically, never readable by others."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(secrets.token_hex(32).encode())
        os.fsync(stream.fileno())
    unfinished.replace(file)


def _await_secret(file: Path, timeout: float) -> None:
    start = time.monotonic()
    has_logged = False
    while not file.exists():
        waited = time.monotonic() - start
        if waited > timeout:
            what = f"the first host has not written this secret in {timeout / 60:.0f} minutes"
            fix = f"share the run's folder between hosts, under the same path; or {_SECRET_FIX}"
            raise InputError.at(str(file), what, fix)
        if waited > _SILENT_SECONDS and not has_logged:
            logger.info("waiting for the first host to write %s", file)
            has_logged = True
        time.sleep(0.2)
