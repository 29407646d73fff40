"""Ports that are free, and the addresses at which processes listen as /proc has them: what `ss -ltnp` shows."""

import ipaddress
import socket
import struct
import threading
from contextlib import contextmanager, suppress
from pathlib import Path


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def has_ipv6() -> bool:
    """Whether this machine has it turned on."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def listening(pids):
    """{(address, port)} at which these processes listen, each by the table of its own network namespace."""
    places = set()
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            folder = Path(f"/proc/{pid}")
            held = {_inode(file) for file in (folder / "fd").iterdir()}
            rows = [row.split() for name in ("tcp", "tcp6") for row in (folder / "net" / name).read_text().splitlines()]
            places |= {_place(row[1]) for row in rows if row[3] == "0A" and row[9] in held}
    return places


def _inode(file):
    """Of the socket that a file descriptor is; else nothing."""
    with suppress(OSError):  # it is closed meanwhile
        return file.readlink().name.removeprefix("socket:[").rstrip("]")
    return None


def _place(text):
    address, _, port = text.partition(":")
    words = [struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def descendants(pid):
    """The process and all that it has started, directly or not."""
    everyone, waiting = [], [pid]
    while waiting:
        everyone.append(waiting.pop())
        with suppress(OSError):
            for thread in Path(f"/proc/{everyone[-1]}/task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
    return everyone


@contextmanager
def watch(pids_now):
    """{(address, port)} of all that listens within the block; `pids_now` is asked for the processes again and again."""
    places, done = set(), threading.Event()

    def look():
        while not done.wait(0.05):
            places.update(listening(pids_now()))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield places
    finally:
        done.set()
        watcher.join()


def outside(places):
    """Those that are not on loopback."""
    return {place for place in places if not ipaddress.ip_address(place[0]).is_loopback}
