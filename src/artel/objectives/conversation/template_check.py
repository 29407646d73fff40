"""Checks how a chat template renders the conversations of a run, before the first step.

A model that never learns the end of a turn does not stop after its answer: that is an error. A model whose training
prompts differ from those in chat learns to answer the former: that is only a note, because many templates omit the
thoughts of earlier turns, and their models were trained that way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from artel.errors import InputError
from artel.messages import Phrase
from artel.objectives.conversation.frame import Difference
from artel.printable import escape_lines
from artel.text import Conversation, Document, ToolCall, Tools
from artel.tokens import StoreSplit, Tokenizer
from artel.tokens.tokenizer.chat_template import TemplateRejection, TurnEnd, markers_before_calls, render

_MAX_QUOTED = 100
"""Maximum number of characters of a template's line in a message."""
_MEANINGS = {
    "thought": "its reasoning, or the tags around it, are dropped once another question follows, so the turn is "
    "trained without them",
    "prompt": "the text before it changes once the conversation continues: in chat the model sees another prompt than "
    "in training",
    "opening": "the generation prompt begins a thought that the turn does not have: the turn is learned after a "
    "shorter prompt than in chat",
    "unlearned": "an answer changes once the conversation continues, so only the last turn of each conversation is "
    "a target",
    "tokens": "the tokenizer joins the end of a prompt and the beginning of its answer, or an answer and what follows, "
    "so apply_chat_template gives other tokens for the whole conversation. Each answer is learned as chat writes it, "
    "after the tokens of its prompt. A generation prompt that ends in a space is the usual cause",
}


def learned_turns(ids: np.ndarray, learned: np.ndarray, ends: TurnEnd, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Return the runs of learned tokens up to an end of turn: (number of tokens, text of the end or "").

    Args:
        ids, learned: int64 and bool, (tokens,).
    """
    turns: list[tuple[int, str]] = []
    run: list[int] = []
    for token, is_learned in zip(ids.tolist(), learned.tolist(), strict=True):
        if is_learned:
            run.append(token)
        if run and (not is_learned or token in ends.ids):
            turns.append((len(run), _end_text(run, ends, tokenizer)))
            run = []
    return [*turns, (len(run), _end_text(run, ends, tokenizer))] if run else turns


def _end_text(run: list[int], ends: TurnEnd, tokenizer: Tokenizer) -> str:
    if run[-1] in ends.ids:
        return tokenizer.decode(run[-1:])
    text = tokenizer.decode(run).rstrip() if ends.texts else ""
    return next((end.strip() for end in ends.texts if text.endswith(end.strip())), "")


def check_targets(split: StoreSplit, ends: TurnEnd, tokenizer: Tokenizer, template: str, name: str) -> None:
    """Raise InputError if a split has no learned token, or no learned end of turn.

    Args:
        name: name of the template in messages.
    """
    example: tuple[str, np.ndarray, np.ndarray] | None = None
    for index in range(split.samples):
        sample = split.sample(index)
        if sample.flags is None or not sample.flags.any():
            continue
        if any(end for _, end in learned_turns(sample.ids, sample.flags > 0, ends, tokenizer)):
            return
        example = example or (split.origin(index), sample.ids, sample.flags)
    if split.samples == 0:
        return
    if example is None:
        what = f"no token of the {split.samples:,} training samples is a target; the first is {split.origin(0)}"
        raise InputError.at("chat.train_on", what, "set assistant, and check with artel data show")
    origin, ids, flags = example
    next_index = int(np.flatnonzero(flags)[-1]) + 1
    next_text = tokenizer.decode(ids[next_index : next_index + 1].tolist())
    stops = " or ".join(repr(end) for end in (*tokenizer.hf.convert_ids_to_tokens(sorted(ends.ids)), *ends.texts))
    what = f"no end of a turn is a target, so the model would not learn to stop. In {origin} "
    what += f"{escape_lines(next_text)!r} follows the answer" if next_text else "nothing follows the answer"
    what += f", but generation stops at {stops}{_describe_line(tokenizer, template, next_text, name)}"
    fix = "end answers there with eos_token, set chat.template: chatml, or make the last turn a target"
    raise InputError.at("chat.template", what, fix)


def _describe_line(tokenizer: Tokenizer, template: str, text: str, name: str) -> str:
    """Return a clause that quotes the template's line that writes `text` after an answer; empty if it is not found.

    The line is found by replacing the text with a mark: then the mark follows the answer.
    """
    contents = (("user", "\ue000"), ("assistant", "\ue001"), ("user", "\ue002"))
    conversation = [{"role": role, "content": content} for role, content in contents]
    lines = template.splitlines(keepends=True)
    for index, line in enumerate(lines):
        if not text.strip() or text.strip() not in line:
            continue
        changed_lines = [*lines[:index], line.replace(text.strip(), "\ue003"), *lines[index + 1 :]]
        with suppress(TemplateRejection):
            after = render(tokenizer, "".join(changed_lines), conversation, False).partition("\ue001")[2]
            if after.lstrip().startswith("\ue003"):
                quoted = line.strip()
                quoted = quoted if len(quoted) <= _MAX_QUOTED else f"{quoted[:_MAX_QUOTED]}…"
                return f"; {name}:{index + 1} writes it: {quoted}"
    return ""


def difference_notes(differences: Iterable[tuple[str, Sequence[Difference]]]) -> list[str]:
    """Return a note for each kind of difference between training and inference.

    Args:
        differences: (`file:line`, differences) of each conversation.
    """
    first: dict[str, tuple[str, int]] = {}
    counts: dict[str, int] = {}
    total = 0
    for origin, conversation_differences in differences:
        total += 1
        for difference in conversation_differences:
            first.setdefault(difference.kind, (origin, difference.turn))
            counts[difference.kind] = counts.get(difference.kind, 0) + 1
    what = (
        "the chat template, in {count:,} of the first {total:,} conversations (first in {origin}, turn {turn} of the "
        "assistant): {meaning}"
    )
    return [
        Phrase(what, count=counts[kind], total=total, origin=origin, turn=turn, meaning=Phrase(_MEANINGS[kind]))
        for kind, (origin, turn) in first.items()
    ]


def end_notes(ends: TurnEnd, tokenizer: Tokenizer, template: str, model: str | None) -> Iterator[str]:
    """Yield notes about ends of turns that are not tokens, and about ends that cut off calls.

    Args:
        model: folder of the pretrained model, or None.
    """
    if ends.texts:
        yield Phrase(
            "the chat template ends a turn with {end!r}, which is not a token of the tokenizer: artel stops there, but "
            "programs that stop at tokens do not",
            end=ends.texts[0],
        )
    file = Path(model or "", "generation_config.json")
    saved = _saved_ends(file) if model is not None and file.is_file() else set()
    before_calls = {*tokenizer.hf.convert_tokens_to_ids(sorted(markers_before_calls(tokenizer, template)))}
    if cutting := sorted(before_calls & (ends.ids | saved)):
        yield Phrase(
            "generation stops at {ends: or }, but the chat template writes it between the text of an answer and its "
            "tool call, so the call would be cut off; make the tokenizer's eos_token, and eos_token_id in "
            "generation_config.json, be what ends the whole turn",
            ends=[*map(repr, tokenizer.hf.convert_ids_to_tokens(cutting))],
        )


def _saved_ends(file: Path) -> set[int]:
    """Return the end tokens in a generation_config.json; none if it is damaged, which is reported elsewhere."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return set()
    return {token_id for token_id in (saved if isinstance(saved, list) else [saved]) if isinstance(token_id, int)}


def call_notes(documents: Iterable[Document]) -> list[str]:
    """Return a note about learned calls that do not fit their declared parameters; [] if all fit.

    This is not an error: published datasets have such calls, and the schema may be wrong.
    """
    num_conversations = num_calls = num_mismatches = 0
    first: dict[str, str] = {}
    for document in documents:
        num_conversations += 1
        conversation = document.record.fields
        assert isinstance(conversation, Conversation)
        trained = (message for message in conversation.messages if message.trained is not False)
        for call in (call for message in trained for call in message.tool_calls):
            num_calls += 1
            if mismatch := argument_mismatch(call, conversation.tools):
                num_mismatches += 1
                first = first or {"origin": document.record.origin, "wrong": mismatch}
    if not num_mismatches:
        return []
    what = (
        "{count:,} of {calls:,} calls in the first {total:,} conversations do not fit the parameters that their tool "
        "declares, the first {origin}: {wrong}"
    )
    return [Phrase(what, count=num_mismatches, calls=num_calls, total=num_conversations, **first)]


def argument_mismatch(call: ToolCall, tools: Tools) -> Phrase | None:
    """Return the difference between a call's arguments and the function's parameters (missing, unknown), or None."""
    declared = [tool["function"] for tool in tools if tool.get("function", {}).get("name") == call.name]
    schema: Any = declared[0].get("parameters") if declared else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not (isinstance(properties, dict) and properties):
        return None
    required = schema.get("required")
    missing = [str(name) for name in (required if isinstance(required, list) else []) if name not in call.arguments]
    unknown = [] if schema.get("additionalProperties") else [name for name in call.arguments if name not in properties]
    differences = [Phrase("lacks {names}", names=missing)] if missing else []
    differences += [Phrase("has undeclared parameters: {names}", names=unknown)] if unknown else []
    return Phrase("{tool} {differs: and }", tool=call.name, differs=differences) if differences else None
