"""Functions that a model may call, described in a JSON file or defined in a Python file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from artel.errors import InputError
from artel.plugins import describe_exception, import_user_file
from artel.storage import check_regular, user_path
from artel.text.records import ToolCall, Tools


class CallFailed(Exception):
    """A call of a function failed. The message is the reason."""

    @property
    def result(self) -> str:
        """The result that the model reads."""
        return f"error: {self}"


class ToolFunctions:
    """Functions that a model may call. Those from a Python file can be run."""

    def __init__(self, tools: Tools, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.tools = tools
        self._functions = functions

    @property
    def can_run(self) -> bool:
        """True if the functions come from a Python file."""
        return bool(self._functions)

    def run(self, call: ToolCall) -> str:
        """Run a call. Return text unchanged, other values as JSON, and an error as a sentence for the model."""
        try:
            return self.call(call)
        except CallFailed as failure:
            return failure.result
        except MemoryError:
            return "error: out of memory"

    def call(self, call: ToolCall) -> str:
        """Run a call. Return text unchanged, other values as JSON. Raise CallFailed or MemoryError if it fails."""
        function = self._functions.get(call.name)
        if function is None:
            raise CallFailed(f"there is no function {call.name}; the functions are {', '.join(self._functions)}")
        try:
            value = function(**call.arguments)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # the user's function, with arguments from a model
            raise CallFailed(describe_exception(error)) from None


def read_functions(file: str, key: str = "--tools") -> ToolFunctions:
    """Read the functions of a .json file (like OpenAI's `tools`) or a .py file, which is run.

    Raise InputError if the file is missing or invalid, or defines no function. `key` names the file in the error.
    """
    path = _check_file(file, key)
    if path.suffix != ".py":
        return ToolFunctions(_read_json(path), {})
    functions = _import_functions(path)
    return ToolFunctions(tuple(_describe(name, function, path) for name, function in functions.items()), functions)


def import_functions(file: str, key: str) -> ToolFunctions:
    """Read the functions of a .py file, without their descriptions, which need torch. Raises like `read_functions`."""
    return ToolFunctions((), _import_functions(_check_file(file, key)))


def _check_file(file: str, key: str) -> Path:
    path = user_path(file, key)
    check_regular(path)
    if not path.is_file():
        raise InputError.at(key, f"there is no file {file}", "use a .json or .py file")
    return path


def _read_json(path: Path) -> Tools:
    fix = 'write [{"name": "get_weather", "description": "…", "parameters": {"type": "object", "properties": {…}}}]'
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError.at(str(path), f"is not JSON: {error}", fix) from None
    if not isinstance(entries, list) or not entries:
        raise InputError.at(str(path), "is not a list of functions", fix)
    tools = []
    for index, entry in enumerate(entries):
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError.at(str(path), f"entry {index + 1} has no name: {str(entry)[:80]}", fix)
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _import_functions(path: Path) -> dict[str, Callable[..., Any]]:
    module = import_user_file(path)
    functions: dict[str, Callable[..., Any]] = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    for name, function in functions.items():
        if inspect.iscoroutinefunction(function):
            raise InputError.at(str(path), f"{name} is a coroutine function", "write def instead of async def")
    if not functions:
        raise InputError.at(str(path), "defines no function", "add one: def get_weather(city: str) -> str: …")
    return functions


def _describe(name: str, function: Callable[..., Any], path: Path) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # imports torch

    try:
        description: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # transformers' own exceptions for docstrings and types
        line = inspect.getsourcelines(function)[1]
        fix = "each argument needs a type, and a line in the docstring: `Args:` and below it `city: The city.`"
        message = f"{name} cannot be described to a model: {' '.join(str(error).split())}"
        raise InputError.at(f"{path}:{line}", message, fix) from None
    return description
