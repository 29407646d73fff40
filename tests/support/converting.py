"""What a conversion of another tool's configuration says of its keys."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from artel.config.converters.conversion import ConvertedConfig
from artel.errors import InputError


def reported(result: ConvertedConfig) -> dict[str, str]:
    """The lines about what is not carried over, or differs, by their keys; the text was given the name `old`."""
    lines = [line for line in result.not_carried + result.differs if line.startswith("old:")]
    return {line.split(": ")[1].split(" = ")[0]: line for line in lines}


def operations(work: Callable[[], object]) -> int:
    """Number of bytecodes of artel's own code in `work`. InputError ends it."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal count
        if event == "call" and "/artel/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        with suppress(InputError):
            work()
    finally:
        sys.settrace(None)
    return count
