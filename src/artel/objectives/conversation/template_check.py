"""What a chat template makes of a run's conversations, checked before the first step.

A model that never learns the end of a turn writes on after its answer; one whose answers stand in training behind
another prompt than in chat learns to answer that one. The first is refused, the second is told: many templates leave
out the thoughts of earlier turns, and their models were trained so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from artel.errors import InputError
from artel.objectives.conversation.frame import Difference
from artel.printable import in_lines
from artel.text import Conversation, Document, ToolCall, Tools
from artel.tokens import StoreSplit, Tokenizer
from artel.tokens.tokenizer.chat_template import TemplateRefuses, TurnEnd, marks_before_calls, render

_SHOWN = 100
"""Characters of a template's line in a message."""
_MEANING = {
    "thought": "its thought, or the tags of one, is left out once another question follows, and it is learned without",
    "prompt": "what stands before it is written otherwise once the conversation goes on: in chat the model sees "
    "another prompt than in training",
    "opening": "the generation prompt goes on (with the beginning of a thought) where the turn does not; the turn is "
    "learned from its content on, behind a shorter prompt than in chat",
    "unlearned": "an answer that is not the last is written otherwise than the model writes it: only the last turn of "
    "each conversation is learned",
    "tokens": "the tokenizer joins the end of a prompt and the beginning of its answer, or an answer and what follows, "
    "so apply_chat_template gives other tokens for the whole conversation. Each answer is learned as chat writes it, "
    "after the tokens of its prompt. A generation prompt that ends in a space is the usual cause",
}


def learned_turns(ids: np.ndarray, learned: np.ndarray, ends: TurnEnd, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """The runs of learned tokens, each up to an end of a turn: (tokens, the end as text, empty where it has none).

    Args:
        ids, learned: int64 and bool, (tokens,).
    """
    turns: list[tuple[int, str]] = []
    run: list[int] = []
    for token, is_learned in zip(ids.tolist(), learned.tolist(), strict=True):
        if is_learned:
            run.append(token)
        if run and (not is_learned or token in ends.ids):
            turns.append((len(run), _end_of(run, ends, tokenizer)))
            run = []
    return [*turns, (len(run), _end_of(run, ends, tokenizer))] if run else turns


def _end_of(run: list[int], ends: TurnEnd, tokenizer: Tokenizer) -> str:
    if run[-1] in ends.ids:
        return tokenizer.decode(run[-1:])
    text = tokenizer.decode(run).rstrip() if ends.texts else ""
    return next((end.strip() for end in ends.texts if text.endswith(end.strip())), "")


def check_targets(split: StoreSplit, ends: TurnEnd, tokenizer: Tokenizer, template: str, name: str) -> None:
    """Raise InputError for a split in which nothing is learned, or never the end of a turn that generation stops at.

    Args:
        name: the template, for people.
    """
    shown: tuple[str, np.ndarray, np.ndarray] | None = None
    for number in range(split.samples):
        sample = split.sample(number)
        if sample.flags is None or not sample.flags.any():
            continue
        if any(end for _, end in learned_turns(sample.ids, sample.flags > 0, ends, tokenizer)):
            return
        shown = shown or (split.origin(number), sample.ids, sample.flags)
    if split.samples == 0:
        return
    if shown is None:
        what = f"no token of the {split.samples:,} training samples is a target; the first is {split.origin(0)}"
        raise InputError.at("chat.train_on", what, "write assistant, and see artel data show")
    origin, ids, flags = shown
    after = int(np.flatnonzero(flags)[-1]) + 1
    follows = tokenizer.decode(ids[after : after + 1].tolist())
    stops = " or ".join(repr(end) for end in (*tokenizer.hf.convert_ids_to_tokens(sorted(ends.ids)), *ends.texts))
    what = f"no end of a turn is learned, and the model would write on after its answers. In {origin} "
    what += f"{in_lines(follows)!r} follows the answer" if follows else "nothing follows the answer"
    what += f", and generation stops at {stops}{_line_of(tokenizer, template, follows, name)}"
    fix = "end answers there with eos_token, or write chat.template: chatml, or let the last turn be learned"
    raise InputError.at("chat.template", what, fix)


def _line_of(tokenizer: Tokenizer, template: str, text: str, name: str) -> str:
    """The line of a template that writes `text` after an answer, in words; empty where none can be told.

    It is the line that, changed to write a mark instead, writes the mark there.
    """
    contents = (("user", "\ue000"), ("assistant", "\ue001"), ("user", "\ue002"))
    conversation = [{"role": role, "content": content} for role, content in contents]
    lines = template.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not text.strip() or text.strip() not in line:
            continue
        changed = [*lines[:number], line.replace(text.strip(), "\ue003"), *lines[number + 1 :]]
        with suppress(TemplateRefuses):
            after = render(tokenizer, "".join(changed), conversation, False).partition("\ue001")[2]
            if after.lstrip().startswith("\ue003"):
                shown = line.strip()
                shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
                return f"; {name}:{number + 1} writes it: {shown}"
    return ""


def difference_notes(differences: Iterable[tuple[str, Sequence[Difference]]]) -> list[str]:
    """A sentence for each way in which conversations differ from what the model sees when it answers.

    Args:
        differences: (`file:line`, differences) of each conversation that was looked at.
    """
    first: dict[str, tuple[str, int]] = {}
    counts: dict[str, int] = {}
    looked_at = 0
    for origin, of_one in differences:
        looked_at += 1
        for difference in of_one:
            first.setdefault(difference.kind, (origin, difference.turn))
            counts[difference.kind] = counts.get(difference.kind, 0) + 1
    return [
        f"the chat template, in {counts[kind]:,} of the first {looked_at:,} conversations (first in {origin}, "
        f"turn {turn} of the assistant): {_MEANING[kind]}"
        for kind, (origin, turn) in first.items()
    ]


def end_notes(ends: TurnEnd, tokenizer: Tokenizer, template: str, model: str | None) -> Iterator[str]:
    """Sentences about ends of turns that are no tokens, and ends that cut calls off.

    Args:
        model: the folder of the pretrained model, if there is one.
    """
    if ends.texts:
        yield (
            f"the chat template ends a turn with {ends.texts[0]!r}, which is no token of the tokenizer: artel stops "
            "there, and programs that stop at tokens do not"
        )
    file = Path(model or "", "generation_config.json")
    known = _saved_ends(file) if model is not None and file.is_file() else set()
    inner = {*tokenizer.hf.convert_tokens_to_ids(sorted(marks_before_calls(tokenizer, template)))}
    if cutting := sorted(inner & (ends.ids | known)):
        yield (
            f"generation stops at {_named(tokenizer, cutting)}, and the chat template writes it between what an answer "
            "says and what it then calls: the call would not be written; let the tokenizer's eos_token, and "
            "eos_token_id in generation_config.json, be what ends the whole turn"
        )


def _saved_ends(file: Path) -> set[int]:
    """The end tokens in a generation_config.json; none where it cannot be read, which the check of the model says."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return set()
    return {number for number in (saved if isinstance(saved, list) else [saved]) if isinstance(number, int)}


def _named(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return " or ".join(map(repr, tokenizer.hf.convert_ids_to_tokens(ids)))


def call_notes(documents: Iterable[Document]) -> list[str]:
    """A sentence about the calls of conversations that do not fit their declared parameters; none where all do.

    Turns that are not learned may call what they like.
    """
    looked_at = calls = unfit = 0
    first = ""
    for document in documents:
        looked_at += 1
        conversation = document.record.fields
        assert isinstance(conversation, Conversation)
        learned = (message for message in conversation.messages if message.trained is not False)
        for call in (call for message in learned for call in message.tool_calls):
            calls += 1
            if wrong := misfit(call, conversation.tools):
                unfit += 1
                first = first or f"{document.record.origin}: {wrong}"
    if not unfit:
        return []
    count = f"{unfit:,} of {calls:,} calls in the first {looked_at:,} conversations"
    return [f"{count} do not fit the parameters that their tool declares, the first {first}"]


def misfit(call: ToolCall, tools: Tools) -> str:
    """How the arguments of a call differ from its function's parameters: those that are required and lack, and those
    that the function does not list. Empty where there is no difference, or no list of parameters.
    """
    declared = [tool["function"] for tool in tools if tool.get("function", {}).get("name") == call.name]
    schema: Any = declared[0].get("parameters") if declared else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not (isinstance(properties, dict) and properties):
        return ""
    required = schema.get("required")
    lacking = [str(name) for name in (required if isinstance(required, list) else []) if name not in call.arguments]
    unknown = [] if schema.get("additionalProperties") else [name for name in call.arguments if name not in properties]
    differs = [f"lacks {', '.join(lacking)}"] if lacking else []
    differs += [f"has {', '.join(unknown)}, which it does not declare"] if unknown else []
    return f"{call.name} {' and '.join(differs)}" if differs else ""
