"""The tools whose configurations artel converts, and errors for other tools."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from artel.config.converters.conversion import ConvertedConfig
from artel.errors import InputError, Problem
from artel.registry import TOOLS


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool whose configurations `artel config convert` reads. Registered in `artel.registry.TOOLS`."""

    name: str
    recognizes: Callable[[str], bool]
    """True if a text, even an invalid one, belongs to this tool. The first tool that recognizes it converts it."""
    convert: Callable[[str, str], ConvertedConfig]
    """(text, name of its file for messages) → the run file. Raise InputError with all problems."""
    never_a_run_file: bool = False
    """True if a recognized text cannot be a run file. Other commands then advise to convert it."""
    is_fallback: bool = False
    """True if it is tried last, on texts that no other tool recognizes."""


# Commands of other tools in shell scripts: (first word, tool, True if its YAML can be converted).
_COMMANDS = (
    (r"llamafactory-cli|lmf|\S*llamafactory[./]\S*|\S*src/train\.py", "LLaMA-Factory", True),
    (r"axolotl|\S*axolotl\.cli\.\w+|scripts/finetune\.py", "axolotl", True),
    (r"swift|megatron", "ms-swift", False),
    (r"trl", "TRL", False),
    (r"tune", "torchtune", False),
)
_SUBCOMMANDS = r"train|preprocess|sft|pt|rlhf|dpo|kto|grpo|reward|run|finetune"
_FIX_UNSUPPORTED = "create a run file with artel new, which asks four questions"
_TORCHTUNE = re.compile(r"(?:^[ \t]*|[{,]\s*)_component_\s*:", re.MULTILINE)
_YAML = re.compile(r"\S+\.(?:ya?ml|json)$")


def convert(text: str, location: str) -> ConvertedConfig:
    """Convert a configuration of another tool. Raise InputError with all problems.

    `location`: name of its file, for messages.
    """
    check_supported(text, location)
    *tools, fallback = _list_tools()
    tool = next((tool for tool in tools if tool.recognizes(text)), None)
    if tool is None:
        _check_commands(text, location)
    return (tool or fallback).convert(text, location)


def detect_tool(text: str) -> str:
    """Return the name of the tool that a configuration belongs to, or "" for a run file."""
    return next((tool.name for tool in _list_tools() if tool.never_a_run_file and tool.recognizes(text)), "")


def check_supported(text: str, location: str) -> None:
    """Raise InputError if the text is a configuration of a tool that artel does not convert."""
    if _TORCHTUNE.search(text):
        what = "is a configuration of torchtune, which is no longer developed; artel does not convert it"
        raise InputError.at(location, what, _FIX_UNSUPPORTED)


def _check_commands(text: str, location: str) -> None:
    """Raise InputError if the text is a shell script that runs another tool. Say which file to convert."""
    problems: list[Problem] = []
    words: list[str] = []
    first_line = 1
    for line_number, line in enumerate([*text.splitlines(), ""], 1):
        words += line.removesuffix("\\").split()
        if not line.endswith("\\"):
            if words and not words[0].startswith("#"):
                problems += _command_problems(words, f"{location}:{first_line}")
            words = []
            first_line = line_number + 1
    if problems:
        raise InputError(problems)


def _command_problems(words: list[str], location: str) -> list[Problem]:
    """Return the problem of a command that runs another tool, or an empty list."""
    for pattern, tool, converts in _COMMANDS:
        index = next((index for index, word in enumerate(words) if re.fullmatch(pattern, word)), None)
        if index is None:
            continue
        is_script = "." in words[index]
        if not is_script and not re.fullmatch(_SUBCOMMANDS, "".join(words[index + 1 : index + 2])):
            continue  # a chat or an export, or another program of that name
        what = f"runs {tool} ({' '.join(words[index : index + 1 if is_script else index + 2])})"
        if not converts:
            return [Problem(location, f"{what}, whose configurations artel does not convert", _FIX_UNSUPPORTED)]
        file = next((word for word in words[index + 1 :] if _YAML.fullmatch(word)), "")
        if file:
            options = [word for word in words[index + 1 :] if word.startswith("--")]
            first_step = f", after adding {', '.join(options)} to it as keys" if options else ""
            fix = f"convert its configuration file{first_step}: artel config convert {file}"
            return [Problem(location, what, fix)]
        example = "key: value, without the dashes"
        return [Problem(location, what, f"write its options to a YAML file ({example}) and convert that")]
    return []


def _list_tools() -> list[Tool]:
    return sorted((TOOLS[name] for name in TOOLS.names), key=lambda tool: tool.is_fallback)
