"""The store at which the processes of a run find each other: it listens at one address, and at no other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from artel.errors import InputError, Problem, WorkError


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that this process holds, at `address` alone; port 0 takes a free one. Raises OSError.

    torch's own way to make one listens on every interface of the host.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()  # torch does so again, and longer; here a port that another has just taken is an OSError
        port = listener.getsockname()[1]
        return TCPStore(address, port, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def process_store(rank: int, timeout: timedelta) -> Store:
    """The store of a run's processes, at MASTER_ADDR and MASTER_PORT: held by the launcher, else by rank 0.

    Raises InputError where the environment does not say where, WorkError where rank 0 cannot listen there.
    """
    environment = os.environ
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        what, fix = "is not set by what has started this process", "export it: where the process of rank 0 listens"
        raise InputError([Problem(name, what, fix) for name in missing])
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            return serve_store(address, port, timeout)
        except OSError as error:
            what, fix = f"cannot listen there: {error.strerror}", "set MASTER_PORT to a free port of the first host"
            raise WorkError.at(f"{address}:{port}", what, fix) from None
    return TCPStore(address, port, is_master=False, timeout=timeout)
