"""Token classification: learns tags of words, and finds names in full texts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models import IGNORED
from artel.objectives.base import Objective, directions
from artel.objectives.decoding import Decoding, first_words, python_literal
from artel.objectives.length_groups import as_tensors, group_inputs, group_rows
from artel.objectives.pretrained_heads import base_labels
from artel.objectives.tokens.entities import (
    Scores,
    document_tags,
    entity_words,
    most_common_fraction,
    predict_entities,
    predicted_tags,
    token_labels,
)
from artel.objectives.tokens.tag_set import TagSet, collect_labels, labels_or_tags, uses_word_tags
from artel.objectives.tokens.word_windows import DOCUMENT, NO_WORD, WordWindows, find_span_words, review_spans
from artel.objectives.types import Batch, DocumentSamples, Presentation, Reply, TokenView
from artel.text import Document, DroppedRecord, Record, Rejected, TaggedText
from artel.text.tags import ENTITIES, OUTSIDE, WORDS, split_tag
from artel.tokens import Rows, Samples, StoreSplit, Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.generation.generate import Sampling

_EXAMPLE = "Anna Karenina went to Moscow."
_PIPELINE_USAGE = cleandoc(f"""
    from transformers import pipeline

    tagger = pipeline("token-classification", model, tokenizer=tokenizer, aggregation_strategy="first")
    for name in tagger({python_literal(_EXAMPLE)}):
        print(name["start"], name["end"], name["entity_group"], name["word"], name["score"])
""")
_MIN_WINDOW_TOKENS = 8


class Tokens(Objective, Decoding):
    auto_class = "AutoModelForTokenClassification"
    learns_from = (ENTITIES, WORDS)
    presentation = Presentation("marks names in a text, or gives each word a tag", "tag", "token-classification")
    section = "tokens"
    decided_by_records = ("labels",)
    tasks = ("entities",)
    continues = False
    adds_special_tokens = True
    sums = ("loss", "targets", "correct")
    document_number = DOCUMENT
    has_many_outputs = True
    metric_directions = directions(lower=["loss"], higher=["precision", "recall", "f1", "macro_f1", "accuracy"])

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        if config.tokens.isolate_punctuation:
            tokenizer.isolate_punctuation()
        self.tags = TagSet.from_config(config)
        self._windows = self._build_windows(config.data.block)
        self.outputs = tuple(f"tag_{position}" for position in range(config.data.block))

    def _build_windows(self, block: int) -> WordWindows:
        tokens = self.config.tokens
        return WordWindows(self.tokenizer, self.tags, block, tokens.nested)

    @classmethod
    def decide(cls, config: RunConfig, records: Iterable[Record]) -> dict[str, Any]:
        labels = collect_labels(records, word_tags=uses_word_tags(config))
        return {"labels": labels_or_tags(labels, config, base_labels(config, cls.auto_class))}

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        problems = super().problems(config)
        tokens, block = config.tokens, config.data.block
        if block - 2 < _MIN_WINDOW_TOKENS:  # without [CLS] and [SEP]
            what = f"{block} tokens leave no room for a text"
            problems.append(Problem("data.block", what, f"write {_MIN_WINDOW_TOKENS + 2} or more"))
        kinds = {source.yields for source in config.data.sources}
        if tokens.scheme == "words" and ENTITIES in kinds:
            what = "words needs a label for each word, but the sources have names"
            problems.append(Problem("tokens.scheme", what, "write kind: words in the source, or scheme: bio"))
        if tokens.scheme == "bilou" and WORDS in kinds:
            what = "bilou is for names of several words, but the sources have a tag for each word"
            problems.append(Problem("tokens.scheme", what, "remove it"))
        if config.checkpoint.best in ("precision", "recall", "f1") and uses_word_tags(config):
            what = f"{config.checkpoint.best} is a metric of names, but here each word has a tag"
            problems.append(Problem("checkpoint.best", what, "write accuracy or macro_f1"))
        return problems

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        base = base_labels(config, cls.auto_class) if config.tokens.labels == "auto" else []
        return [
            config.data.block,
            config.tokens.model_dump(mode="json"),
            uses_word_tags(config),
            *([base] if base else []),
        ]

    @classmethod
    def small_run(cls, block: int) -> dict[str, Any]:
        return {"objective": "tokens", "data": {"sources": [{"format": "dummy", "documents": 300, "kind": "entities"}]}}

    @classmethod
    def run_values(cls, model_config: PreTrainedConfig, folder: str) -> dict[str, Any]:
        """Return the tags from id2label, and settings that keep the tokenizer unchanged."""
        tags = [str(model_config.id2label[tag_id]) for tag_id in range(model_config.num_labels)]
        scheme = "bio" if OUTSIDE in tags else "words"
        block = min(512, int(getattr(model_config, "max_position_embeddings", None) or 512))
        section = {"labels": tags, "scheme": scheme, "isolate_punctuation": False}
        return {"tokens": section, "data": {"block": block}}

    @property
    def loss_description(self) -> str:
        return "cross-entropy of the tag of each word"

    @property
    def head_config(self) -> dict[str, Any]:
        names = dict(enumerate(self.tags.tags))
        return {
            "num_labels": len(names),
            "id2label": names,
            "label2id": {name: tag_id for tag_id, name in names.items()},
        }

    def demo_command(self, folder: str, samples: Samples | None) -> str:
        if samples is None:
            return f'artel generate {folder} --prompt "{_EXAMPLE}"'
        sample, frame = samples.read(0), self._windows.frame
        text = sample.ids[len(frame.before) : len(sample.ids) - len(frame.after)]
        return f"artel generate {folder} --prompt {shlex.quote(first_words(self.tokenizer, text))}"

    def model_card_code(self) -> str:
        comment = "A word has the tag of its first token."
        if not self.tags.word_tags:
            comment = "B- begins a name, I- and L- continue and end it, U- is a name of one word."
            if all(split_tag(tag)[0] in "BIO" for tag in self.tags.tags):
                # The pipeline of transformers takes a space that is a token, as in small byte-level vocabularies, for a
                # word, and gives its tag to the next word.
                encoded = self.tokenizer.hf(_EXAMPLE, return_offsets_mapping=True, add_special_tokens=False)
                if all(_EXAMPLE[start:end].strip() for start, end in encoded["offset_mapping"]):
                    return _PIPELINE_USAGE
                comment = "B- begins a name, and I- continues it. A word has the tag of its first token."
        return cleandoc(f"""
            inputs = tokenizer({python_literal(_EXAMPLE)}, return_tensors="pt")
            with torch.no_grad():
                tags = model(**inputs).logits[0].argmax(dim=-1)
            for token, tag in zip(inputs["input_ids"][0].tolist(), tags.tolist()):
                # {comment}
                print(tokenizer.decode([token]), model.config.id2label[tag])
        """)

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        return self._windows.samples(documents)

    def check(self, model: PreTrainedModel) -> None:
        tags = tuple(str(model.config.id2label[tag_id]) for tag_id in range(model.config.num_labels))
        if tags != self.tags.tags:
            what = f"the model has the tags {', '.join(tags)}, but the run {', '.join(self.tags.tags)}"
            raise InputError.at("tokens", what, "write tokens.labels and tokens.scheme as the model has them")

    def review(self, observed: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
        return review_spans(observed, self.config.tokens.nested)

    def mismatch(self, records: Iterable[Record]) -> str:
        known = self.tags.labels
        labels = {
            label for record in records if isinstance(record.fields, TaggedText) for *_, label in record.fields.spans
        }
        if labels <= set(known):
            return ""
        return f"this model has the labels {', '.join(known)}, but the data have {', '.join(sorted(labels))}"

    # samples -> batch -> loss

    def batch(self, rows: Rows) -> Batch:
        """Return `group_rows`, and `positions`, `words` and `targets` of the labeled words, int64 (words,) each.

        `positions`: indices of first tokens in the flattened, concatenated groups. `words`: their indices in the
        flattened original rows. `targets`: tags, or IGNORED.
        """
        assert rows.flags is not None
        lengths = np.where(rows.valid, rows.lengths, 1)
        ids = [row[:length] for row, length in zip(rows.ids, lengths, strict=True)]
        grouped = group_rows(ids, self.group_count(len(ids)), self.tokenizer.pad_id)
        flags = np.where(rows.valid[:, None], rows.flags, NO_WORD).astype(np.int64)[:, : lengths.max()]
        row, column = np.nonzero(flags != NO_WORD)
        targets = flags[row, column] - 1
        targets[targets == len(self.tags.tags)] = IGNORED
        words = {"positions": grouped.starts[row] + column, "words": row * flags.shape[1] + column, "targets": targets}
        count, tokens = int((targets != IGNORED).sum()), int(rows.lengths[rows.valid].sum())
        return Batch(grouped.tensors | as_tensors(words), count, tokens, grouped.groups)

    def token_views(self, rows: Rows) -> list[TokenView]:
        assert rows.flags is not None
        length = int(rows.lengths[0])
        ids, flags = rows.ids[0, :length], rows.flags[0, :length].astype(np.int64)
        is_word = (flags != NO_WORD) & (flags <= len(self.tags.tags))
        targets = np.where(is_word, flags - 1, IGNORED)
        labels = [self.tags.tags[target] if target != IGNORED else "" for target in targets.tolist()]
        return [TokenView(ids, targets, labels=token_labels(labels, word_tags=self.tags.word_tags))]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        return self._sums(self.logits(model, batch), batch)

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums, and the likeliest tag of each word."""
        logits = self.logits(model, batch)
        ids = batch.tensors["input_ids"]
        return self._sums(logits, batch), predicted_tags(logits, batch.tensors["words"], ids.shape, len(self.outputs))

    def logits(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the logits of each word's first token, float32 (words, tags)."""
        import torch

        inputs = group_inputs(model, batch.tensors, batch.groups)
        logits = torch.cat([model(**group_input).logits.flatten(0, 1) for group_input in inputs])
        return logits[batch.tensors["positions"]].float()

    def _sums(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        targets = batch.tensors["targets"]
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        correct = (logits.detach().argmax(dim=-1) == targets).sum().float()
        return torch.stack([loss, torch.full_like(loss, batch.targets), correct])

    # metrics

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return precision, recall and f1 of names over whole documents, and `accuracy` of the words' tags.

        `commonest_tag`: accuracy of always guessing the commonest tag, which is O for names.

        If every word has a tag, words are those of the data, evaluated by their first piece. A word without a piece of
        its own, because an artel word contains two of them, is neither learned nor evaluated.
        """
        loss, scores = totals["loss"] / totals["targets"], self._scores(outputs, split)
        if self.tags.word_tags:
            words = max(1, scores.gold.total())
            accuracy, commonest = scores.correct.total() / words, max(scores.gold.values(), default=0) / words
            return {"loss": loss, "accuracy": accuracy, "commonest_tag": commonest, "macro_f1": scores.macro_f1()}
        accuracy = totals["correct"] / totals["targets"]
        commonest = most_common_fraction(split, len(outputs), len(self.tags.tags))
        metrics = {"loss": loss, **scores.micro(), "macro_f1": scores.macro_f1()}
        return {**metrics, "accuracy": accuracy, "commonest_tag": commonest}

    def details(self, outputs: np.ndarray, split: StoreSplit) -> dict[str, Any]:
        """Return the scores of each label, and their averages."""
        scores = self._scores(outputs, split)
        tables = {"labels": scores.table(), "averages": scores.averages()}
        return {
            "tables": {
                title: [{"label": label, **row} for label, row in rows.items()] for title, rows in tables.items()
            }
        }

    def _scores(self, outputs: np.ndarray, split: StoreSplit) -> Scores:
        """Return counts over the documents whose windows all have outputs."""
        tags, scores = document_tags(outputs, split), Scores()
        for index, reference in enumerate(split.references()):
            ids = tags.get(index, [])
            if len(ids) < len(reference["starts"]):
                continue
            names = self.tags.names(ids)
            starts, ends, spans = reference["starts"], reference["ends"], reference["spans"]
            if self.tags.word_tags:
                words = zip(spans, find_span_words(starts, ends, spans), strict=True)
                pairs = [(label, names[first]) for (*_, label), (first, end_word) in words if first < end_word]
                scores.add_tags([gold for gold, _ in pairs], [predicted for _, predicted in pairs])
            else:
                entities = entity_words(names, starts, ends, word_tags=False)
                scores.add(
                    ((start, end, label) for start, end, label in spans),
                    [(starts[first], ends[end - 1], label) for first, end, label in entities],
                )
        return scores

    # use

    def run_task(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return the names in each text: {"entities": [{"start", "end", "label", "text", "score"}]}.

        `score`: mean probability of the words' tags. If every word has a tag, entities are words.
        """
        from artel.models.loading.structure import position_limit

        block = min(self.config.data.block, position_limit(model) or self.config.data.block)
        return predict_entities(self, model, self._build_windows(block), inputs)

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        (answer,) = self.run_task(model, "entities", [prompt])
        segments, position = [], 0
        for entity in answer["entities"]:
            segments += [prompt[position : entity["start"]], f"[{entity['text']}]({entity['label']})"]
            position = entity["end"]
        notes = () if answer["entities"] else ("no names found",)
        return Reply(["".join([*segments, prompt[position:]])], notes, {"prompt": prompt, **answer})
