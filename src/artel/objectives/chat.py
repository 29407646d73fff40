"""Instruction tuning: conversations rendered by a chat template, learned in the assistant's turns.

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
from artel.generation import GenerationPrompt
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
from artel.objectives.conversation.calls import (
    call_metrics,
    call_turns,
    conversation_reference,
    has_tools,
    read_conversations,
)
from artel.objectives.conversation.frame import ConversationError, Difference, RenderedConversation
from artel.objectives.conversation.template_check import call_notes, check_targets, difference_notes, end_notes
from artel.objectives.conversation.writer import ConversationWriter
from artel.objectives.decoding import Decoding, generation_code, python_literal, writing_problems
from artel.objectives.length_groups import as_tensors
from artel.objectives.per_token import BALANCED_SUMS, balanced_token_sums, inputs_of, token_metrics
from artel.objectives.types import (
    AnswerPrompt,
    Batch,
    DocumentSamples,
    GenerationEval,
    Presentation,
    Reply,
    TokenView,
)
from artel.storage import user_path
from artel.text import Conversation, Document, DroppedRecord, Message, Rejected, Tools
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

    from artel.generation.generate import Sampling

_MIN_NEW_TOKENS = 256
"""Minimum length allowed for a generated turn with tools, even if the record's turns are short."""
_MAX_CALL_TURNS = 200
"""Maximum number of turns that a model writes in evaluation, in conversations with tools, to compare its calls."""
_IDS_VERSION = 2
"""Increase it when the same conversation gets other ids: stores are then prepared again. Version 2: no second space
after a prompt that ends in one."""


class Chat(Objective, Decoding):
    auto_class = "AutoModelForCausalLM"
    learns_from = ("conversations",)
    presentation = Presentation("answers as the assistant of conversations", "chat", "text-generation")
    section = "chat"
    generates = True
    is_per_token = True
    has_answers = True
    packs_samples = True
    continues = False
    sums: ClassVar[tuple[str, ...]] = BALANCED_SUMS
    metric_directions = directions(lower=["loss", "perplexity"], higher=["accuracy"])

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.isolated_documents = self.uses_document_mask(config)
        self.template = resolve_template(tokenizer, config.chat.template)
        tokenizer.hf.chat_template = self.template  # saved with the model
        self.inserts_date = inserts_date(tokenizer, self.template)
        self._writer = ConversationWriter(tokenizer, self.template)

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        packed = packed_problems(config, cls.auto_class) if cls.uses_document_mask(config) else []
        writing = writing_problems(config) if config.validate_.rewards else []
        return [*super().problems(config), *packed, *template_problems(config), *writing]

    @classmethod
    def special_tokens(cls, config: RunConfig) -> list[str]:
        return list(CHATML_TOKENS) if config.chat.template in ("auto", "chatml") else []

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        settings = config.chat.model_dump(mode="json", exclude={"generate"})
        references = ["references"] if config.validate_.rewards else []
        return [config.data.block, settings, template_version(config), *references]

    def demo_command(self, folder: str, samples: Samples | None) -> str:
        return f"artel chat {folder}"

    def model_card_code(self) -> str:
        prompt = next(filter(None, self.config.validate_.prompts), "Hello! Who are you?")
        prompt_tokens = prompt_ids(self.tokenizer, self.template, [{"role": "user", "content": prompt}])
        ends = turn_end(self.tokenizer, self.template).ids
        lines = [
            f'messages = [{{"role": "user", "content": {python_literal(prompt)}}}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
        return "\n".join([*lines, *generation_code(self.config.data.block - len(prompt_tokens), ends)])

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
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
                    messages = _filter_thoughts(record.fields.messages, self.config.chat.reasoning)
                    if self.config.validate_.rewards or has_tools(messages, record.fields.tools):
                        reference = conversation_reference(replace(record.fields, messages=tuple(messages)))
                        result = replace(result, reference=reference)
                yield result
            except ConversationError as error:
                detail = f"{error}; fix it, or use another chat.template"
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
            messages = _filter_thoughts(conversation.messages, self.config.chat.reasoning)
            rendered = self._writer.write(messages, conversation.tools)
            differences = (rendered.difference, self._writer.token_difference(rendered))
            return [difference for difference in differences if difference is not None]
        return []

    def _convert(self, conversation: Conversation) -> DocumentSamples | DroppedRecord:
        messages, tools = conversation.messages, conversation.tools
        if self._writer.has_control_token(messages, tools):
            return DroppedRecord("control_token")
        filtered = _filter_thoughts(messages, self.config.chat.reasoning)
        rendered = self._writer.write(filtered, tools)
        num_omitted = sum(bool(message.thought) for message in messages) - rendered.thoughts
        counts = {"thoughts_left_out": num_omitted} if num_omitted else {}
        sample = self._make_sample(filtered, rendered)
        if not _has_targets(sample):
            raise ConversationError("no turn is a target (chat.train_on, loss_weight)")
        block = self.config.data.block
        if len(sample.ids) <= block:
            return DocumentSamples([sample], counts=counts)
        if self.config.chat.too_long == "truncate_left":
            assert sample.flags is not None
            truncated = Sample(sample.ids[-block:], sample.flags[-block:])
            counts["truncated"] = 1
            return (
                DocumentSamples([truncated], counts=counts)
                if _has_targets(truncated)
                else DroppedRecord("longer_than_block")
            )
        if self.config.chat.too_long == "split":
            return self._split(filtered, tools, counts)
        return DroppedRecord("longer_than_block")

    def _make_sample(self, messages: Sequence[Message], rendered: RenderedConversation) -> Sample:
        """Return ids, and flags uint8 (tokens,): 1 for learned tokens."""
        train_on = self.config.chat.train_on
        last = max(index for index, message in enumerate(messages) if message.role == "assistant")
        targets = {
            index
            for index, message in enumerate(messages)
            if (message.trained if message.trained is not None else _is_trained_on(message, train_on, index == last))
        }
        return self._writer.to_sample(rendered, targets, learn_prompts=train_on == "all")

    def _split(
        self, messages: Sequence[Message], tools: Tools, counts: dict[str, int]
    ) -> DocumentSamples | DroppedRecord:
        """Split into conversations of whole exchanges, each as long as fits, with the system message."""
        system, exchanges = _split_exchanges(messages)
        samples: list[Sample] = []
        num_skipped, start = 0, 0
        while start < len(exchanges):
            longest: Sample | None = None
            end = start
            while end < len(exchanges):
                turns = [message for exchange in exchanges[start : end + 1] for message in exchange]
                if any(message.role == "assistant" for message in turns):
                    messages = [*system, *turns]
                    candidate = self._make_sample(messages, self._writer.write(messages, tools))
                    if len(candidate.ids) > self.config.data.block:
                        break
                    longest = candidate
                end += 1
            if longest is None:  # a single exchange is too long
                end = max(end, start + 1)
            if longest is not None and _has_targets(longest):
                samples.append(longest)
            else:
                num_skipped += end - start
            start = end
        if not samples:
            return DroppedRecord("longer_than_block")
        skipped = {"exchanges_left_out": num_skipped} if num_skipped else {}
        return DocumentSamples(samples, counts={"split": 1} | skipped | counts)

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
        # Padding is on the right, where the causal mask already hides it.
        return balanced_token_sums(model, inputs_of(model, batch, causal=True) | {"use_cache": False}, batch)

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return `token_metrics` of the learned tokens."""
        return token_metrics(totals)

    def generation_eval(self, model: PreTrainedModel, split: StoreSplit) -> GenerationEval | None:
        """Return the first 200 assistant turns in conversations with tools, to compare their calls."""
        turns, num_skipped = call_turns(split.references(), self._writer.prompt_ids, _MAX_CALL_TURNS)
        if not turns:
            return None
        end = self._answer_end(model)
        # Some models begin a call with a control token: [TOOL_CALLS], <|python_tag|>.
        prompts = [GenerationPrompt(turn.ids, end, special_tokens=True) for turn in turns]
        answers = ["\n".join(turn.answer.texts) for turn in turns]
        longest = max(len(ids) for ids in self.tokenizer.encode(answers))
        without = f" ({num_skipped:,} more left out: the template writes no prompt for them)" if num_skipped else ""
        first = "the first " if len(turns) == _MAX_CALL_TURNS else ""
        what = f"calls in {first}{len(turns):,} turns with tools{without}"
        return GenerationEval(what, prompts, max(_MIN_NEW_TOKENS, 2 * longest), partial(call_metrics, turns))

    def answer_prompts(self, split: StoreSplit, limit: int) -> tuple[list[AnswerPrompt], int]:
        """Return the conversations before their last answer.

        Skip those without a user's message before it, those that the template cannot end there, and those that leave
        no space for an answer in `data.block`.
        """
        prompts: list[AnswerPrompt] = []
        num_skipped, longest = 0, self.config.data.block - self.config.validate_.new_tokens
        for messages, tools in read_conversations(split.references()):
            if len(prompts) == limit:
                break
            last = max(index for index, message in enumerate(messages) if message.role == "assistant")
            context, ids = messages[:last], []
            if any(message.role in ("user", "tool") for message in context):
                with suppress(ConversationError):
                    ids = self._writer.prompt_ids(context, tools)
            if not 0 < len(ids) <= longest:
                num_skipped += 1
                continue
            question = [{"role": message.role, "content": message.content} for message in context]
            prompts.append(AnswerPrompt(question, {"answer": messages[last].content}, ids))
        return prompts, num_skipped

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        """Return the answer to a user's message."""
        return Reply(self._generate_answer(model, prompt, sampling))

    def _generate_answer(self, model: PreTrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
        from artel.generation.generate import generate_from_ids
        from artel.models.loading.structure import position_limit

        generation_prompt = self.generation_prompt(model, prompt)
        pieces = generate_from_ids(
            model, self.tokenizer, generation_prompt.ids, sampling, position_limit(model), generation_prompt.end
        )
        has_text = False
        for piece in pieces:
            # With some templates the model writes the space before an answer.
            text = piece if has_text else piece.lstrip()
            has_text = has_text or bool(text)
            yield text

    def generation_prompt(self, model: PreTrainedModel, prompt: str) -> GenerationPrompt:
        ids = prompt_ids(self.tokenizer, self.template, [{"role": "user", "content": prompt}])
        return GenerationPrompt(ids, self._answer_end(model))

    def _answer_end(self, model: PreTrainedModel) -> TurnEnd:
        """Return the ends of an answer: those of the template and of the model's generation_config.json."""
        from artel.generation.generate import end_ids

        end = self.turn_end()
        return TurnEnd(end.ids | end_ids(model), end.texts)


def template_problems(config: RunConfig) -> list[Problem]:
    """Return the problems of a template file. Called before any text is read."""
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
    """Build the batch of a causal model: each flagged token is the target of the token before it."""
    assert rows.flags is not None
    targets = np.where(rows.flags[:, 1:] > 0, rows.ids[:, 1:], IGNORED)
    targets[~rows.valid] = IGNORED
    real = np.arange(targets.shape[1]) < rows.lengths[:, None] - 1
    tensors = as_tensors({"input_ids": rows.ids[:, :-1], "real": real}) | target_tensors(targets)
    return Batch(tensors, int((targets != IGNORED).sum()), int((rows.lengths - 1)[rows.valid].sum()))


def _has_targets(sample: Sample) -> bool:
    return sample.flags is not None and bool(sample.flags.any())


def _is_trained_on(message: Message, train_on: str, is_last: bool) -> bool:
    """True if chat.train_on selects this turn."""
    if train_on == "last":
        return is_last
    return train_on != "tool_calls" or bool(message.tool_calls)


def _filter_thoughts(messages: Sequence[Message], reasoning: str) -> list[Message]:
    """Return the messages without the thoughts that chat.reasoning removes."""
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    first_kept = {"keep": 0, "last": last_user, "drop": len(messages)}[reasoning]
    return [
        replace(message, thought="") if message.thought and index < first_kept else message
        for index, message in enumerate(messages)
    ]


def _split_exchanges(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Return the system messages, and the other messages in exchanges that begin with a user's turn."""
    system = [message for message in messages if message.role == "system"]
    exchanges: list[list[Message]] = []
    for message in messages:
        if message.role == "system":
            continue
        if message.role == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(message)
    return system, exchanges
