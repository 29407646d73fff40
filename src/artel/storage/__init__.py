"""Reading and writing: downloads, atomic writes, checksums, locks, S3 and the hub."""

from artel.storage.atomic import (
    check_new,
    check_new_file,
    discard,
    new_folder,
    remove_leftovers,
    replace_link,
    scratch_folder,
    write_file,
    write_output,
)
from artel.storage.bus_errors import MappedFiles, bus_error_handler, report_bus_errors
from artel.storage.http.download import Download, fetch
from artel.storage.json_api import TOO_MANY_REQUESTS, ApiFailure, request_json
from artel.storage.locations import (
    cache_folder,
    check_cache,
    disk_errors,
    folder_problem,
    rows_folder,
    state_folder,
    user_path,
)
from artel.storage.locks import lock
from artel.storage.regular_files import check_regular, check_regular_in, checksum, describe_file_type
from artel.storage.remote.access import is_remote
from artel.storage.remote.files import RemoteFile, fetch_remote, list_remote
from artel.storage.remote.folders import (
    exists,
    finished_folders,
    pull_folder,
    push_folder,
    read_bytes,
    remove_remote_folder,
    write_bytes,
)

__all__ = [
    "TOO_MANY_REQUESTS",
    "ApiFailure",
    "Download",
    "MappedFiles",
    "RemoteFile",
    "bus_error_handler",
    "cache_folder",
    "check_cache",
    "check_new",
    "check_new_file",
    "check_regular",
    "check_regular_in",
    "checksum",
    "describe_file_type",
    "discard",
    "disk_errors",
    "exists",
    "fetch",
    "fetch_remote",
    "finished_folders",
    "folder_problem",
    "is_remote",
    "list_remote",
    "lock",
    "new_folder",
    "pull_folder",
    "push_folder",
    "read_bytes",
    "remove_leftovers",
    "remove_remote_folder",
    "replace_link",
    "report_bus_errors",
    "request_json",
    "rows_folder",
    "scratch_folder",
    "state_folder",
    "user_path",
    "write_bytes",
    "write_file",
    "write_output",
]
