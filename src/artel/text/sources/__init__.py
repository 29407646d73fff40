"""Where text comes from: files, globs, folders, URLs; one small module a format."""

from artel.text.sources.find import all_sources, check_sources, local_files
from artel.text.sources.names import is_url
from artel.text.sources.read import read_source

__all__ = ["all_sources", "check_sources", "is_url", "local_files", "read_source"]
