"""Conversations to ids, and flags of learned tokens, by a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from artel.errors import InputError
from artel.objectives.conversation.assistant_mask import TurnLocator
from artel.objectives.conversation.frame import ConversationError, Difference, RenderedConversation
from artel.text import Message, Tools
from artel.tokens import Sample, Tokenizer
from artel.tokens.tokenizer.tokenizer import Encoding

_CONTEXT_TOKENS = 16
"""Last tokens of a prompt that are encoded again. With whole prompts, time would grow as turns²."""


class ConversationWriter:
    """Turns conversations into ids and flags by one template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """Raise InputError if the assistant's turns cannot be located in rendered text."""
        self._tokenizer = tokenizer
        self._turns = TurnLocator(tokenizer, template)
        self._control = tokenizer.control_tokens
        try:
            self._turns.write([Message("user", "a"), Message("assistant", "b")])
        except ConversationError as unfit:
            raise InputError.at("chat.template", str(unfit), "use another: chatml, or a Jinja file") from None

    def check_tools(self, messages: Sequence[Message], tools: Tools, origin: str) -> None:
        """Raise InputError if the template does not write a conversation's tools, calls or results."""
        unsupported_content = self._turns.unsupported_content(messages, tools)
        if unsupported_content:
            what = f"the template {unsupported_content}, but {origin} has them"
            fix = "write chat.template: chatml, or a Jinja file that does; or remove such conversations"
            raise InputError.at("chat.template", what, fix)

    def has_control_token(self, messages: Sequence[Message], tools: Tools = ()) -> bool:
        """True if a text contains a control token, which could end a turn or fake a role."""
        texts = [text for message in messages for text in message.texts]
        texts += [json.dumps(tool, ensure_ascii=False) for tool in tools]
        return any(token in text for text in texts for token in self._control)

    def write(self, messages: Sequence[Message], tools: Tools = ()) -> RenderedConversation:
        """Return the conversation as the template writes it. Raise ConversationError."""
        return self._turns.write(messages, tools)

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of the prompt for the next answer. Raise ConversationError."""
        text = self._turns.prompt(messages, tools)
        return next(self._tokenizer.encode_with_offsets([text], control=True)).ids.tolist()

    def sample(self, messages: Sequence[Message], learned: set[int], tools: Tools = ()) -> Sample:
        """Return a conversation with flags in the turns of the messages `learned`. Raise ConversationError."""
        return self.to_sample(self.write(messages, tools), learned)

    def to_sample(self, written: RenderedConversation, learned: set[int], *, everything: bool = False) -> Sample:
        """Return the ids of a conversation, with flags in the turns of the messages `learned`. Raise ConversationError.

        `everything`: also learn all text outside the assistant's turns, and the tags of empty thoughts that some
        templates write before an answer. Results of tools are never learned.
        """
        encoded = self._encode(written)
        if cuts := self._find_cuts(encoded, written):
            encoded = self._encode_in_pieces(written, cuts)
        starts, ends = encoded.starts, encoded.ends
        flags = np.full(len(encoded.ids), everything, dtype=np.uint8)
        for turn in written.turns:
            inside = (ends > turn.start) & (starts < turn.end)
            is_learned = turn.message in learned
            flags[inside] = is_learned
            flags[inside & (ends <= turn.empty_thought)] = everything and is_learned
        for start, end in written.results:
            flags[(ends > start) & (starts < end)] = 0
        last = written.turns[-1]
        if last.closed:
            return Sample(encoded.ids, flags)
        # The template writes no end of the turn: an end token is learned after it.
        count = int(np.searchsorted(starts, last.end, side="left"))
        ids = np.append(encoded.ids[:count], written.open_end)
        return Sample(ids, np.append(flags[:count], np.uint8(last.message in learned)))

    def token_difference(self, written: RenderedConversation) -> Difference | None:
        """Return the first turn whose tokens differ from those of the text encoded as a whole, or None."""
        encoded = self._encode(written)
        cuts = self._find_cuts(encoded, written)
        if not cuts or np.array_equal(self._encode_in_pieces(written, cuts).ids, encoded.ids):
            return None
        return Difference(next(number for number, turn in enumerate(written.turns, 1) if turn.end >= cuts[0]), "tokens")

    def _encode(self, written: RenderedConversation) -> Encoding:
        return next(self._tokenizer.encode_with_offsets([written.text], control=True))

    def _encode_in_pieces(self, written: RenderedConversation, cuts: list[int]) -> Encoding:
        first = self._tokenizer.encode_with_offsets([written.text[: cuts[0]]], control=True)
        pieces = [written.text[start:end] for start, end in pairwise([*cuts, len(written.text)])]
        encoded = chain(first, self._tokenizer.encode_continuations(pieces))
        parts = [
            (part.ids, part.starts + offset, part.ends + offset)
            for part, offset in zip(encoded, [0, *cuts], strict=True)
        ]
        return Encoding(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _find_cuts(self, whole: Encoding, written: RenderedConversation) -> list[int]:
        """Return the boundaries of turns at which the text is split before it is encoded.

        A model answers after the tokens of its prompt. The text is split before a turn if the whole text has other
        tokens there: one across the boundary (a prompt that ends in a space), or different ones before it (in GPT-2 two
        line feeds are one token at the end of a text, and two tokens before a word). It is split after a turn if a
        token crosses that boundary.
        """
        cuts = {turn.end for turn in written.turns if ((whole.starts < turn.end) & (whole.ends > turn.end)).any()}
        starts = [turn.start for turn in written.turns]
        counts = [int(np.searchsorted(whole.ends, start, side="right")) for start in starts]
        begins = [int(whole.starts[count - _CONTEXT_TOKENS]) if count > _CONTEXT_TOKENS else 0 for count in counts]
        prompts = [written.text[begin:start] for begin, start in zip(begins, starts, strict=True)]
        encoded = self._tokenizer.encode_with_offsets(prompts, control=True)
        for prompt, begin, start, count in zip(encoded, begins, starts, counts, strict=True):
            last, last_in_whole = prompt.ids[-1:], whole.ids[:count][-1:]
            start_of_last, start_of_last_in_whole = prompt.starts[-1:] + begin, whole.starts[:count][-1:]
            if not (np.array_equal(last, last_in_whole) and np.array_equal(start_of_last, start_of_last_in_whole)):
                cuts.add(start)
        return sorted(cuts)
