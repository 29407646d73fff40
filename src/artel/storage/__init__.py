"""Reading and writing anywhere: downloads, whole-or-absent writes, checksums, locks."""

from artel.storage.atomic import new_folder, point, remove_leftovers, write_file
from artel.storage.checksums import checksum
from artel.storage.fetch import Fetched, fetch
from artel.storage.locks import lock
from artel.storage.places import cache_folder, disk_errors
from artel.storage.remote import RemoteFile, fetch_remote, is_remote, list_remote

__all__ = [
    "Fetched",
    "RemoteFile",
    "cache_folder",
    "checksum",
    "disk_errors",
    "fetch",
    "fetch_remote",
    "is_remote",
    "list_remote",
    "lock",
    "new_folder",
    "point",
    "remove_leftovers",
    "write_file",
]
