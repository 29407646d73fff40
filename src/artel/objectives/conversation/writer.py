"""Turns conversations into ids and flags of learned tokens, by a chat template."""

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
"""Number of tokens at the end of a prompt that are encoded again. With full prompts, time would grow as turns²."""


class ConversationWriter:
    """Turns conversations into ids and flags by one template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """Raise InputError if the assistant's turns cannot be located in rendered text."""
        self._tokenizer = tokenizer
        self._turns = TurnLocator(tokenizer, template)
        self._control = tokenizer.control_tokens
        try:
            self._turns.write([Message("user", "a"), Message("assistant", "b")])
        except ConversationError as error:
            raise InputError.at("chat.template", str(error), "use another: chatml, or a Jinja file") from None

    def check_tools(self, messages: Sequence[Message], tools: Tools, origin: str) -> None:
        """Raise InputError if the template does not write a conversation's tools, calls or results."""
        reason = self._turns.unsupported_content(messages, tools)
        if reason:
            what = f"the template {reason}, but {origin} has them"
            fix = "write chat.template: chatml, or a Jinja file that does; or remove such conversations"
            raise InputError.at("chat.template", what, fix)

    def has_control_token(self, messages: Sequence[Message], tools: Tools = ()) -> bool:
        """True if a text contains a control token, which could end a turn or fake a role."""
        texts = [text for message in messages for text in message.texts]
        texts += [json.dumps(tool, ensure_ascii=False) for tool in tools]
        return any(token in text for text in texts for token in self._control)

    def write(self, messages: Sequence[Message], tools: Tools = ()) -> RenderedConversation:
        """Return the conversation as the template writes it.

        Raise ConversationError if the template rejects it or the turns cannot be located.
        """
        return self._turns.write(messages, tools)

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of the prompt for the next answer."""
        text = self._turns.prompt(messages, tools)
        return next(self._tokenizer.encode_with_offsets([text], control=True)).ids.tolist()

    def continuation(
        self, messages: Sequence[Message], added: Sequence[Message], tools: Tools, reply: str, end: tuple[int, str]
    ) -> list[int] | None:
        """Return the ids between a reply and the next one: what the template writes for the messages `added`.

        `messages` end with the reply. `reply`: its text as the model wrote it. `end`: the last token, and the text with
        which the model ended it. None if the template changes what comes before, as those do that drop earlier
        thoughts, or ends a reply with another token.

        Raise ConversationError if the template rejects the conversation.
        """
        text, prompt = self._turns.prompt([*messages, *added], tools), self._turns.prompt(messages[:-1], tools)
        end_id, end_text = end
        start = len(prompt + reply + end_text)
        if not text.startswith(prompt + reply + end_text):  # the template may write calls with other spaces
            try:
                rendered = self._turns.write(messages, tools)
            except ConversationError:  # the reply cannot be located: it has markers of the template, for example
                return None
            turn = rendered.turns[-1]
            written = rendered.text[: turn.end]
            if not (written.startswith(prompt) and text.startswith(written)):
                return None
            if turn.is_closed and written.endswith(end_text):
                start = turn.end
            elif text.startswith(end_text, turn.end):  # the end is the beginning of the next turn: GLM's <|user|>
                start = turn.end + len(end_text)
            elif not turn.is_closed and end_id == rendered.open_end:
                start = turn.end
            else:
                return None
        return next(self._tokenizer.encode_continuations([text[start:]])).ids.tolist()

    def sample(self, messages: Sequence[Message], learned: set[int], tools: Tools = ()) -> Sample:
        """Return a conversation with flags in the turns of the messages `learned`."""
        return self.to_sample(self.write(messages, tools), learned)

    def to_sample(self, rendered: RenderedConversation, learned: set[int], *, learn_prompts: bool = False) -> Sample:
        """Return the ids of a conversation, with flags in the turns of the messages `learned`.

        `learn_prompts`: also learn all text outside the assistant's turns, and the tags of empty thoughts that some
        templates write before an answer. Results of tools are never learned.
        """
        encoded = self._encode(rendered)
        if cuts := self._find_cuts(encoded, rendered):
            encoded = self._encode_chunks(rendered, cuts)
        starts, ends = encoded.starts, encoded.ends
        flags = np.full(len(encoded.ids), learn_prompts, dtype=np.uint8)
        for turn in rendered.turns:
            inside = (ends > turn.start) & (starts < turn.end)
            is_learned = turn.message in learned
            flags[inside] = is_learned
            flags[inside & (ends <= turn.empty_thought)] = learn_prompts and is_learned
        for start, end in rendered.results:
            flags[(ends > start) & (starts < end)] = 0
        last = rendered.turns[-1]
        if last.is_closed:
            return Sample(encoded.ids, flags)
        # The template does not close the turn: an end token is added and learned.
        count = int(np.searchsorted(starts, last.end, side="left"))
        ids = np.append(encoded.ids[:count], rendered.open_end)
        return Sample(ids, np.append(flags[:count], np.uint8(last.message in learned)))

    def token_difference(self, rendered: RenderedConversation) -> Difference | None:
        """Return the first turn whose tokens differ from those of the text encoded as a whole, or None."""
        encoded = self._encode(rendered)
        cuts = self._find_cuts(encoded, rendered)
        if not cuts or np.array_equal(self._encode_chunks(rendered, cuts).ids, encoded.ids):
            return None
        return Difference(
            next(turn_number for turn_number, turn in enumerate(rendered.turns, 1) if turn.end >= cuts[0]), "tokens"
        )

    def _encode(self, rendered: RenderedConversation) -> Encoding:
        return next(self._tokenizer.encode_with_offsets([rendered.text], control=True))

    def _encode_chunks(self, rendered: RenderedConversation, cuts: list[int]) -> Encoding:
        first = self._tokenizer.encode_with_offsets([rendered.text[: cuts[0]]], control=True)
        chunks = [rendered.text[start:end] for start, end in pairwise([*cuts, len(rendered.text)])]
        encoded = chain(first, self._tokenizer.encode_continuations(chunks))
        shifted = [
            (chunk.ids, chunk.starts + offset, chunk.ends + offset)
            for chunk, offset in zip(encoded, [0, *cuts], strict=True)
        ]
        return Encoding(*(np.concatenate(arrays) for arrays in zip(*shifted, strict=True)))

    def _find_cuts(self, tokens: Encoding, rendered: RenderedConversation) -> list[int]:
        """Return the boundaries of turns at which the text is split before it is encoded.

        A model answers after the tokens of its prompt. The text is split before a turn if the whole text has other
        tokens there: one across the boundary (a prompt that ends in a space), or different ones before it (in GPT-2 two
        line feeds are one token at the end of a text, and two tokens before a word). It is split after a turn if a
        token crosses that boundary.
        """
        cuts = {turn.end for turn in rendered.turns if ((tokens.starts < turn.end) & (tokens.ends > turn.end)).any()}
        starts = [turn.start for turn in rendered.turns]
        counts = [int(np.searchsorted(tokens.ends, start, side="right")) for start in starts]
        context_starts = [
            int(tokens.starts[count - _CONTEXT_TOKENS]) if count > _CONTEXT_TOKENS else 0 for count in counts
        ]
        prompts = [rendered.text[offset:start] for offset, start in zip(context_starts, starts, strict=True)]
        encoded = self._tokenizer.encode_with_offsets(prompts, control=True)
        for prompt, offset, start, count in zip(encoded, context_starts, starts, counts, strict=True):
            has_same_id = np.array_equal(prompt.ids[-1:], tokens.ids[:count][-1:])
            has_same_start = np.array_equal(prompt.starts[-1:] + offset, tokens.starts[:count][-1:])
            if not (has_same_id and has_same_start):  # of the last token before the boundary
                cuts.add(start)
        return sorted(cuts)
