"""Preferences: a prompt with a better and a worse answer, or (unpaired) with one answer that is good or bad.

The fields of a row determine its form:
- `chosen` and `rejected`, each a text, a message or messages. Several messages, and texts written as
  "Human: … Assistant: …", are full conversations: their common beginning is the prompt. Otherwise the prompt is in
  `prompt` (a text or messages), `messages`, `conversations`, or `instruction` and `input`.
- `output: [chosen, rejected]` (alpaca).
- `completion` and `label` (true or false); without `completion`, the last of the messages is the answer.

Paired rows may have a `margin`, the difference in reward (Touvron et al. 2023, "Llama 2", 3.2.2).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from artel.config import SourceConfig
from artel.text.formats.chat import call_function, import_function, read_row_records
from artel.text.formats.format import Format
from artel.text.formats.jsonl import SUFFIXES, describe_fields, has_lines
from artel.text.formats.parquet import SUFFIX, check_parquet_rows
from artel.text.formats.tool_rows import extract_tools
from artel.text.formats.turns import RowReader, Turn, check_prompt, wrap_message
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Message, Preference, Record, Rejected, Tools

PROMPT_FIELDS = {
    "messages": ("prompt", "messages"),
    "sharegpt": ("conversations", "conversation"),
    "alpaca": ("instruction",),
}
_ALL_PROMPT_FIELDS = tuple(name for names in PROMPT_FIELDS.values() for name in names)
_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ \t]*")


def read_preferences(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per row."""
    reader = PreferenceReader(file.source)
    return read_row_records(file, lambda row: [("", reader.preference(row))])


class PreferenceReader:
    """Turns rows of one source into preferences. All methods raise BadRecord for an invalid row."""

    def __init__(self, source: SourceConfig) -> None:
        self._rows = RowReader(source)
        self._converter = source.converter
        self._function = import_function(source.converter, "converter") if ":" in source.converter else None
        self._prompt_fields = PROMPT_FIELDS.get(source.converter, _ALL_PROMPT_FIELDS)

    def preference(self, row: Any) -> Preference:
        """Return the preference of a row. A user function returns a row in one of the forms."""
        row = self._rows.rename_fields(row)
        if self._function is not None:
            row = call_function(self._function, self._converter, row)
            if not isinstance(row, dict):
                fix = "return {prompt, chosen, rejected} or {prompt, completion, label}"
                raise BadRecord("no_field", f"{self._converter} returned {type(row).__name__}; {fix}")
        output = row.get("output")
        if isinstance(output, list) and len(output) == 2 and "chosen" not in row:
            row = row | {"chosen": output[0], "rejected": output[1]}
        if row.get("chosen") is not None and row.get("rejected") is not None:
            return self._read_paired(row)
        if row.get("label") is not None:
            return self._read_unpaired(row)
        fix = "name them in the source: mapping: {chosen: NAME, rejected: NAME} or {completion: NAME, label: NAME}"
        raise BadRecord(
            "no_field", f"has neither chosen and rejected nor a label (it has: {describe_fields(row)}); {fix}"
        )

    def _read_paired(self, row: dict[str, Any]) -> Preference:
        chosen, rejected = self._read_answer(row, "chosen"), self._read_answer(row, "rejected")
        if len(chosen) == len(rejected) == 1:
            prompt = self._read_prompt(row)
        else:  # full conversations
            common = _find_common_beginning(chosen, rejected)
            prompt = [*self._rows.messages(self._rows.system(row)), *common]
            chosen, rejected = chosen[len(common) :], rejected[len(common) :]
        better, worse = _require_single_answer(chosen, "chosen"), _require_single_answer(rejected, "rejected")
        prompt, tools, _ = extract_tools(prompt, self._rows.tools(row))
        better, worse = _extract_calls(better, tools), _extract_calls(worse, tools)
        if _comparison_key(better) == _comparison_key(worse):
            raise BadRecord("equal_answers", "chosen and rejected are the same; remove the row")
        return Preference(check_prompt(prompt), better, worse, tools, _parse_margin(row))

    def _read_unpaired(self, row: dict[str, Any]) -> Preference:
        label = row["label"]
        if label not in (True, False):  # 1 and 0 are equal to these
            fix = "write true for a good answer and false for a bad one"
            raise BadRecord("bad_label", f"label is {repr(label)[:80]}; {fix}")
        prompt = self._read_prompt(row)
        if row.get("completion") is not None:
            answer = _require_single_answer(self._read_answer(row, "completion"), "completion")
        elif prompt and prompt[-1].role == "assistant":
            answer = prompt.pop()
        else:
            fix = "write completion, or end the messages with the answer"
            raise BadRecord("no_answer", f"has a label and no answer (it has: {describe_fields(row)}); {fix}")
        prompt, tools, _ = extract_tools(prompt, self._rows.tools(row))
        answer = _extract_calls(answer, tools)
        return Preference(check_prompt(prompt), answer if label else None, None if label else answer, tools)

    def _read_answer(self, row: dict[str, Any], name: str) -> list[Message]:
        turns = _parse_transcript(row[name]) or self._read_turns(row[name], name, "assistant")
        messages = self._rows.messages(turns, f"{name}: ")
        if not messages:
            raise BadRecord("no_answer", f"{name} is empty; write an answer, or remove the row")
        return messages

    def _read_prompt(self, row: dict[str, Any]) -> list[Message]:
        name = next((name for name in self._prompt_fields if row.get(name) is not None), None)
        if name is None:
            field_name = self._rows.mapping.get("prompt", self._prompt_fields[0])
            fix = "name it in the source: mapping: {prompt: NAME}"
            raise BadRecord(
                "no_prompt", f"has no prompt: no field {field_name!r} (it has: {describe_fields(row)}); {fix}"
            )
        if name == "instruction":
            return self._rows.messages(self._rows.question(row), "prompt: ")
        return self._rows.messages([*self._rows.system(row), *self._read_turns(row[name], name, "user")], "prompt: ")

    def _read_turns(self, value: Any, name: str, role: str) -> list[Turn]:
        """Return the turns of a field. A text is one turn of `role`."""
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        return self._rows.turns(wrap_message(value), name)


def _parse_margin(row: dict[str, Any]) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        fix = "write a number (of a reward's units), or remove it"
        raise BadRecord("bad_margin", f"margin is {repr(margin)[:80]}; {fix}")
    return float(margin)


def _comparison_key(answer: Message) -> tuple[object, ...]:
    return answer.content.rstrip(), answer.thought, answer.tool_calls


def _extract_calls(answer: Message, tools: Tools) -> Message:
    return extract_tools([answer], tools)[0][0]


def _parse_transcript(text: Any) -> list[Turn]:
    """Return the turns of a text like "Human: … Assistant: …" (Anthropic HH); empty for other texts."""
    if not isinstance(text, str) or not text.lstrip("\n").startswith("Human:"):
        return []
    _, *turns = _SPEAKER.split(text.lstrip("\n"))  # roles at even indices, contents at odd ones
    return [{"role": role.lower(), "content": content} for role, content in zip(turns[::2], turns[1::2], strict=True)]


def _find_common_beginning(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Return the common beginning of two conversations. Their last messages, the answers, never belong to it."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return [left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _require_single_answer(answer: list[Message], name: str) -> Message:
    if len(answer) != 1 or answer[0].role != "assistant":
        roles = ", ".join(message.role for message in answer) or "nothing"
        fix = "cut both conversations off after the first answer in which they differ"
        raise BadRecord("no_single_answer", f"{name} is {roles} after the prompt, not one answer; {fix}")
    return answer[0]


PREFERENCE = Format(
    read=read_preferences,
    yields=("preferences",),
    suffixes=(*SUFFIXES, SUFFIX),
    converters=tuple(PROMPT_FIELDS),
    has_lines=has_lines,
    check=check_parquet_rows,
)
