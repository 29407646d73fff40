"""Instruction tuning: conversations written by a chat template, learned in the assistant's turns.

The whole conversation is tokenized once, and the template itself locates the assistant's turns (`conversation/`), so
that training and inference use the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models import IGNORED
from artel.objectives.base import Objective, directions
from artel.objectives.collate import (
    check_packed,
    next_token_view,
    packed_batch,
    packed_problems,
    packed_views,
    target_tensors,
)
from artel.objectives.conversation.calls import call_metrics, call_turns, conversation_reference
from artel.objectives.conversation.frame import ConversationError, Difference, RenderedConversation
from artel.objectives.conversation.template_check import call_notes, check_targets, difference_notes, end_notes
from artel.objectives.conversation.writer import ConversationWriter
from artel.objectives.decoding import Decoding, generation_usage, python_literal
from artel.objectives.length_groups import as_tensors
from artel.objectives.per_token import BALANCED_SUMS, balanced_token_sums, inputs_of, token_metrics
from artel.objectives.types import (
    Batch,
    DocumentSamples,
    GenerationEval,
    GenerationPrompt,
    Presentation,
    Reply,
    TokenView,
)
from artel.storage import user_path
from artel.text import Conversation, Document, Dropped, Message, Rejected, Tools
from artel.tokens import PackedSamples, Rows, Sample, Samples, StoreSplit, Tokenizer, TokenStore, UnpackedSamples
from artel.tokens.tokenizer.chat_template import (
    CHATML,
    CHATML_TOKENS,
    PLAIN,
    TEMPLATE_NAMES,
    TurnEnd,
    inserts_date,
    prompt_ids,
    read_template,
    resolve_template,
    turn_end,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.models.generate import Sampling

_MIN_NEW_TOKENS = 256
"""Minimum length allowed for a generated turn with tools, even if the record's turns are short."""
_MAX_CALL_TURNS = 200
"""Turns of conversations with tools that a model writes at most when it is evaluated, to compare its calls."""
_IDS_VERSION = 2
"""Increase it if the same conversation gets other ids, so that stores are prepared again. 2: no second space after a
prompt that ends in one."""


class Chat(Objective, Decoding):
    auto_class = "AutoModelForCausalLM"
    learns_from = ("conversations",)
    presentation = Presentation("answers as the assistant of conversations", "chat", "text-generation")
    section = "chat"
    generates = True
    is_per_token = True
    packs_samples = True
    continues = False
    sums: ClassVar[tuple[str, ...]] = BALANCED_SUMS
    better = directions(lower=["loss", "perplexity"], higher=["accuracy"])

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.isolated_documents = self.isolates_documents(config)
        self.template = resolve_template(tokenizer, config.chat.template)
        tokenizer.hf.chat_template = self.template  # saved with the model
        self.inserts_date = inserts_date(tokenizer, self.template)
        self._writer = ConversationWriter(tokenizer, self.template)

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        packed = packed_problems(config, cls.auto_class) if cls.isolates_documents(config) else []
        return [*super().problems(config), *packed, *template_problems(config)]

    @classmethod
    def special_tokens(cls, config: RunConfig) -> list[str]:
        return list(CHATML_TOKENS) if config.chat.template in ("auto", "chatml") else []

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        settings = config.chat.model_dump(mode="json", exclude={"generate"})
        return [config.data.block, settings, template_version(config)]

    def command(self, folder: str, samples: Samples | None) -> str:
        return f"artel chat {folder}"

    def usage(self) -> str:
        prompt = next(filter(None, self.config.validate_.prompts), "Hello! Who are you?")
        prompt_tokens = prompt_ids(self.tokenizer, self.template, [{"role": "user", "content": prompt}])
        ends = turn_end(self.tokenizer, self.template).ids
        lines = [
            f'messages = [{{"role": "user", "content": {python_literal(prompt)}}}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
        return "\n".join([*lines, *generation_usage(self.config.data.block - len(prompt_tokens), ends)])

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | Dropped]:
        for document in documents:
            assert isinstance(document.record.fields, Conversation)
            fields = document.record.fields
            self._writer.check_tools(fields.messages, fields.tools, document.record.origin)
        for document in documents:
            record = document.record
            assert isinstance(record.fields, Conversation)
            try:
                result = self._convert(record.fields)
                if isinstance(result, DocumentSamples) and document.split == "validation":
                    messages = _with_thoughts(record.fields.messages, self.config.chat.reasoning)
                    source = conversation_reference(replace(record.fields, messages=tuple(messages)))
                    result = replace(result, reference=source)
                yield result
            except ConversationError as unfit:
                detail = f"{unfit}; fix it, or use another chat.template"
                yield Rejected(record.origin, "template", detail, record.set_name)

    def turn_end(self) -> TurnEnd:
        return turn_end(self.tokenizer, self.template)

    def check_store(self, store: TokenStore) -> None:
        setting = self.config.chat.template
        name = "the tokenizer's chat template" if setting == "auto" else setting
        check_targets(store.train, self.turn_end(), self.tokenizer, self.template, name)

    def notes(self, documents: Iterable[Document]) -> list[str]:
        documents = list(documents)
        differences = difference_notes((document.record.origin, self._differences(document)) for document in documents)
        ends = end_notes(self.turn_end(), self.tokenizer, self.template, self.config.model.from_)
        return [*ends, *differences, *call_notes(documents)]

    def _differences(self, document: Document) -> list[Difference]:
        conversation = document.record.fields
        assert isinstance(conversation, Conversation)
        with suppress(ConversationError):  # reported by `samples`
            messages = _with_thoughts(conversation.messages, self.config.chat.reasoning)
            written = self._writer.write(messages, conversation.tools)
            differences = (written.difference, self._writer.token_difference(written))
            return [difference for difference in differences if difference is not None]
        return []

    def _convert(self, conversation: Conversation) -> DocumentSamples | Dropped:
        messages, tools = conversation.messages, conversation.tools
        if self._writer.has_control_token(messages, tools):
            return Dropped("control_token")
        kept_messages = _with_thoughts(messages, self.config.chat.reasoning)
        written = self._writer.write(kept_messages, tools)
        thoughts = sum(bool(message.thought) for message in messages) - written.thoughts
        counts = {"thoughts_left_out": thoughts} if thoughts else {}
        sample = self._sample(kept_messages, written)
        if not _learns(sample):
            raise ConversationError("no turn of it is a target (chat.train_on, loss_weight)")
        block = self.config.data.block
        if len(sample.ids) <= block:
            return DocumentSamples([sample], counts=counts)
        if self.config.chat.too_long == "truncate_left":
            assert sample.flags is not None
            truncated = Sample(sample.ids[-block:], sample.flags[-block:])
            counts["truncated"] = 1
            return DocumentSamples([truncated], counts=counts) if _learns(truncated) else Dropped("longer_than_block")
        if self.config.chat.too_long == "split":
            return self._split(kept_messages, tools, counts)
        return Dropped("longer_than_block")

    def _sample(self, messages: Sequence[Message], written: RenderedConversation) -> Sample:
        """Return ids, and flags uint8 (tokens,): 1 if the token is learned."""
        train_on = self.config.chat.train_on
        last = max(number for number, message in enumerate(messages) if message.role == "assistant")
        learned = {
            number
            for number, message in enumerate(messages)
            if (message.trained if message.trained is not None else _is_chosen(message, train_on, number == last))
        }
        return self._writer.to_sample(written, learned, everything=train_on == "all")

    def _split(self, messages: Sequence[Message], tools: Tools, counts: dict[str, int]) -> DocumentSamples | Dropped:
        """Split into conversations of whole exchanges, each with the system message and as long as fits."""
        system, exchanges = _exchanges(messages)
        samples: list[Sample] = []
        left_out, start = 0, 0
        while start < len(exchanges):
            fitting: Sample | None = None
            stop = start
            while stop < len(exchanges):
                part = [message for exchange in exchanges[start : stop + 1] for message in exchange]
                if any(message.role == "assistant" for message in part):
                    messages = [*system, *part]
                    longer = self._sample(messages, self._writer.write(messages, tools))
                    if len(longer.ids) > self.config.data.block:
                        break
                    fitting = longer
                stop += 1
            if fitting is None:  # a single exchange is too long
                stop = max(stop, start + 1)
            if fitting is not None and _learns(fitting):
                samples.append(fitting)
            else:
                left_out += stop - start
            start = stop
        if not samples:
            return Dropped("longer_than_block")
        left = {"exchanges_left_out": left_out} if left_out else {}
        return DocumentSamples(samples, counts={"split": 1} | left | counts)

    def output_ids(self, sample: Sample) -> np.ndarray | None:
        return None if sample.flags is None else sample.ids[sample.flags > 0]

    def dataset(self, split: StoreSplit) -> Samples:
        if self.isolated_documents:
            return PackedSamples(split, self.config.data.block, lookahead=1)
        return UnpackedSamples(split)

    def check(self, model: PreTrainedModel) -> None:
        if self.isolated_documents:
            check_packed(model, causal=True)

    def batch(self, rows: Rows) -> Batch:
        return packed_batch(rows, self.config.data.block) if self.isolated_documents else shift_rows(rows)

    def token_views(self, rows: Rows) -> list[TokenView]:
        if self.isolated_documents:
            return packed_views(rows)
        ids = rows.ids[0, : rows.lengths[0]]
        return [next_token_view(ids, self.batch(rows).tensors["targets"][0].numpy())]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        # Padding is on the right, where a causal mask hides it: it needs no mask of its own.
        return balanced_token_sums(model, inputs_of(model, batch, causal=True) | {"use_cache": False}, batch)

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return `token_metrics` of the learned tokens."""
        return token_metrics(totals)

    def generation_eval(self, model: PreTrainedModel, split: StoreSplit) -> GenerationEval | None:
        """Return the first 200 assistant turns in conversations with tools, to compare their calls."""
        turns, left_out = call_turns(split.references(), self._writer.prompt_ids, _MAX_CALL_TURNS)
        if not turns:
            return None
        end = self._end(model)
        # Some models begin a call with a control token: [TOOL_CALLS], <|python_tag|>.
        prompts = [GenerationPrompt(turn.ids, end, special_tokens=True) for turn in turns]
        answers = ["\n".join(turn.answer.texts) for turn in turns]
        longest = max(len(ids) for ids in self.tokenizer.encode(answers))
        without = f" ({left_out:,} more left out: the template writes no prompt for them)" if left_out else ""
        first = "the first " if len(turns) == _MAX_CALL_TURNS else ""
        what = f"calls in {first}{len(turns):,} turns with tools{without}"
        return GenerationEval(what, prompts, max(_MIN_NEW_TOKENS, 2 * longest), partial(call_metrics, turns))

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        """Return the answer to a user's message."""
        return Reply(self._answer(model, prompt, sampling))

    def _answer(self, model: PreTrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
        from artel.models.generate import generate_from_ids
        from artel.models.loading.structure import position_limit

        begin = self.generation_prompt(model, prompt)
        has_begun = False
        for piece in generate_from_ids(model, self.tokenizer, begin.ids, sampling, position_limit(model), begin.end):
            # With some templates the model writes the space before an answer.
            text = piece if has_begun else piece.lstrip()
            has_begun = has_begun or bool(text)
            yield text

    def generation_prompt(self, model: PreTrainedModel, prompt: str) -> GenerationPrompt:
        ids = prompt_ids(self.tokenizer, self.template, [{"role": "user", "content": prompt}])
        return GenerationPrompt(ids, self._end(model))

    def _end(self, model: PreTrainedModel) -> TurnEnd:
        """Return what ends an answer: the template's ends, and those in the model's generation_config.json."""
        from artel.models.generate import end_ids

        end = self.turn_end()
        return TurnEnd(end.ids | end_ids(model), end.texts)


def template_problems(config: RunConfig) -> list[Problem]:
    """Return what is wrong with a template file. Called before any text is read."""
    if config.chat.template in TEMPLATE_NAMES:
        return []
    try:
        read_template(config.chat.template)
    except InputError as error:
        return list(error.problems)
    return []


def template_version(config: RunConfig) -> list[Any]:
    """Return a version of the template: its file's size and modification time, or a digest of the built-in ones."""
    if config.chat.template in TEMPLATE_NAMES:
        return [_IDS_VERSION, xxhash.xxh3_64_hexdigest((CHATML + PLAIN).encode())]
    file = user_path(config.chat.template, "chat.template")
    return [_IDS_VERSION, *([file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else [])]


def shift_rows(rows: Rows) -> Batch:
    """Return rows for a causal model: each flagged token is the target of the token before it."""
    assert rows.flags is not None
    targets = np.where(rows.flags[:, 1:] > 0, rows.ids[:, 1:], IGNORED)
    targets[~rows.valid] = IGNORED
    real = np.arange(targets.shape[1]) < rows.lengths[:, None] - 1
    tensors = as_tensors({"input_ids": rows.ids[:, :-1], "real": real}) | target_tensors(targets)
    return Batch(tensors, int((targets != IGNORED).sum()), int((rows.lengths - 1)[rows.valid].sum()))


def _learns(sample: Sample) -> bool:
    return sample.flags is not None and bool(sample.flags.any())


def _is_chosen(message: Message, train_on: str, is_last: bool) -> bool:
    """True if chat.train_on chooses a turn."""
    if train_on == "last":
        return is_last
    return train_on != "tool_calls" or bool(message.tool_calls)


def _with_thoughts(messages: Sequence[Message], reasoning: str) -> list[Message]:
    """Return the messages without the thoughts that chat.reasoning removes."""
    last_user = max((number for number, message in enumerate(messages) if message.role == "user"), default=-1)
    first = {"keep": 0, "last": last_user, "drop": len(messages)}[reasoning]
    return [
        replace(message, thought="") if message.thought and number < first else message
        for number, message in enumerate(messages)
    ]


def _exchanges(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Return system messages, and the rest in exchanges that begin with a user's turn."""
    system = [message for message in messages if message.role == "system"]
    exchanges: list[list[Message]] = []
    for message in messages:
        if message.role == "system":
            continue
        if message.role == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(message)
    return system, exchanges
