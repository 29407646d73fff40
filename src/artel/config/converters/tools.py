"""The tools whose configurations artel reads."""

from __future__ import annotations

from artel.config.converters.keys import Converted
from artel.config.converters.tool import Tool
from artel.registry import TOOLS


def convert(text: str, place: str) -> Converted:
    """A configuration of another tool as a run file. `place` names its file. Raises InputError with all problems."""
    return next(tool for tool in _tools() if tool.recognizes(text)).convert(text, place)


def tool_of(text: str) -> str:
    """The tool whose configuration, and no run file, the text is; empty where there is none."""
    return next((tool.name for tool in _tools() if tool.is_no_run_file and tool.recognizes(text)), "")


def _tools() -> list[Tool]:
    return [TOOLS[name] for name in TOOLS.names]
