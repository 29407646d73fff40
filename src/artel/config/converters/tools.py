"""The tools whose configurations artel reads, and the words that name those it does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from artel.config.converters.conversion import Converted
from artel.errors import InputError, Problem
from artel.registry import TOOLS


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool whose configurations `artel config convert` reads. Registered in `artel.registry.TOOLS`."""

    name: str
    recognizes: Callable[[str], bool]
    """True if a text is of this tool, also if it is broken. The first tool that recognizes it converts it."""
    convert: Callable[[str, str], Converted]
    """(text, name of its file for messages) → the run file. Raises InputError with all problems."""
    is_no_run_file: bool = False
    """True if what it recognizes cannot be a run file: other commands then say to convert it."""
    takes_any: bool = False
    """True if it is tried last, on a text that no other tool recognizes."""


# Commands of other tools in a shell script: how each begins, the tool, and True if its YAML can be converted.
_COMMANDS = (
    (r"llamafactory-cli|lmf|\S*llamafactory[./]\S*|\S*src/train\.py", "LLaMA-Factory", True),
    (r"axolotl|\S*axolotl\.cli\.\w+|scripts/finetune\.py", "axolotl", True),
    (r"swift|megatron", "ms-swift", False),
    (r"trl", "TRL", False),
    (r"tune", "torchtune", False),
)
_VERBS = r"train|preprocess|sft|pt|rlhf|dpo|kto|grpo|reward|run|finetune"
_BY_HAND = "write a run file with artel new, which asks four questions"
_TORCHTUNE = re.compile(r"(?:^[ \t]*|[{,]\s*)_component_\s*:", re.MULTILINE)
_YAML = re.compile(r"\S+\.(?:ya?ml|json)$")


def convert(text: str, place: str) -> Converted:
    """A configuration of another tool as a run file. `place` names its file. Raises InputError with all problems."""
    refuse_unsupported(text, place)
    *tools, plain_cfg = _tools()
    tool = next((tool for tool in tools if tool.recognizes(text)), None)
    if tool is None:
        _refuse_commands(text, place)
    return (tool or plain_cfg).convert(text, place)


def tool_of(text: str) -> str:
    """The tool whose configuration, and no run file, the text is; empty where there is none."""
    return next((tool.name for tool in _tools() if tool.is_no_run_file and tool.recognizes(text)), "")


def refuse_unsupported(text: str, place: str) -> None:
    """Raise InputError for the YAML of a tool that is not converted."""
    if _TORCHTUNE.search(text):
        what = "is a configuration of torchtune, which is no longer developed; artel does not convert it"
        raise InputError.at(place, what, _BY_HAND)


def _refuse_commands(text: str, place: str) -> None:
    """Raise InputError for a shell script with commands of other tools: name the tool, and the file to give."""
    problems: list[Problem] = []
    words: list[str] = []
    first = 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        words += line.removesuffix("\\").split()
        if not line.endswith("\\"):
            if words and not words[0].startswith("#"):
                problems += _of_command(words, f"{place}:{first}")
            words, first = [], number + 1
    if problems:
        raise InputError(problems)


def _of_command(words: list[str], where: str) -> list[Problem]:
    for pattern, tool, converts in _COMMANDS:
        at = next((number for number, word in enumerate(words) if re.fullmatch(pattern, word)), None)
        if at is None:
            continue
        is_script = "." in words[at]
        if not is_script and not re.fullmatch(_VERBS, "".join(words[at + 1 : at + 2])):
            continue  # a chat or an export, or another program of that name
        what = f"runs {tool} ({' '.join(words[at : at + 1 if is_script else at + 2])})"
        if not converts:
            return [Problem(where, f"{what}, whose configurations artel does not convert", _BY_HAND)]
        file = next((word for word in words[at + 1 :] if _YAML.fullmatch(word)), "")
        if file:
            added = [word for word in words[at + 1 :] if word.startswith("--")]
            beside = f", after writing {', '.join(added)} into it as keys" if added else ""
            return [Problem(where, what, f"convert the file that it names{beside}: artel config convert {file}")]
        example = "key: value, without the dashes"
        return [Problem(where, what, f"write its options into a YAML file ({example}), and convert that")]
    return []


def _tools() -> list[Tool]:
    return sorted((TOOLS[name] for name in TOOLS.names), key=lambda tool: tool.takes_any)
