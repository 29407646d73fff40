"""Restores tokens that a text lacks, such as commas.

The output of a pair is its input with single tokens inserted. The label of an input token is the token inserted after
it, or the token itself if nothing is inserted. So the head of a masked language model predicts missing tokens and their
positions. The store holds the tokens of the output, with flags for inserted tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.config import RunConfig
from artel.models import IGNORED, evaluation_mode
from artel.objectives.base import Objective, directions
from artel.objectives.decoding import Decoding, python_literal
from artel.objectives.length_groups import as_tensors
from artel.objectives.per_token import SUMS, token_metrics
from artel.objectives.statistics import precision_recall_f1
from artel.objectives.types import Batch, DocumentSamples, Presentation, Reply, TokenView
from artel.text import Document, DroppedRecord, Pair, Rejected
from artel.tokens import Encoding, Rows, Sample, Samples, StoreSplit, Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.generation.generate import Sampling

_EXAMPLE = "He said that he would come but he did not"
_TOKEN, _INSERTED, _RULE = 1, 2, 4  # flags: input token, inserted token, comma by rule after an input token


class InsertionTagging(Objective, Decoding):
    """The objective `masked` for pairs."""

    auto_class = "AutoModelForMaskedLM"
    learns_from = ("pairs",)
    presentation = Presentation("inserts what a text lacks, e.g. commas", pipeline_tag="token-classification")
    is_per_token = True
    continues = False
    adds_special_tokens = True
    sums = (*SUMS, "missing", "guessed", "found", "by_rule", "found_by_rule")
    metric_directions = directions(lower=["loss", "perplexity"], higher=["accuracy", "precision", "recall", "f1"])

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._frame = tokenizer.frame()
        self._single_token_ids: dict[str, int | None] = {}

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        return [config.data.block]

    def demo_command(self, folder: str, samples: Samples | None) -> str:
        return f'artel generate {folder} --prompt "{_EXAMPLE}"'

    def model_card_code(self) -> str:
        return cleandoc(f"""
            inputs = tokenizer({python_literal(_EXAMPLE)}, return_tensors="pt")
            with torch.no_grad():
                guesses = model(**inputs).logits[0].argmax(dim=-1)
            restored = []
            for token, guess in zip(inputs["input_ids"][0].tolist(), guesses.tolist()):
                # The label of a token is what follows it and is missing, or the token itself.
                restored += [token] if guess == token or token in tokenizer.all_special_ids else [token, guess]
            print(tokenizer.decode(restored, skip_special_tokens=True))
        """)

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        pairs = [document.record.fields for document in documents]
        inputs = [pair.input for pair in pairs if isinstance(pair, Pair)]
        for document, encoded in zip(documents, self.tokenizer.encode_with_offsets(inputs), strict=True):
            record = document.record
            assert isinstance(record.fields, Pair)
            inserted = self._align(record.fields, encoded)
            if inserted is None:
                detail = "its output is not its input plus inserted tokens; fix or remove the pair"
                yield Rejected(record.origin, "not_aligned", detail, record.set_name)
            elif len(encoded.ids) + self._frame.size > self.config.data.block:
                yield DroppedRecord("longer_than_block")
            else:
                yield DocumentSamples([self._make_sample(record.fields.input, encoded, inserted)])

    def _align(self, pair: Pair, encoded: Encoding) -> dict[int, int] | None:
        """Return the tokens to insert, by the preceding input token; None if the output is not made by insertions."""
        missing = find_insertions(pair.input, pair.output)
        if missing is None or -1 in missing:
            return None
        inserted: dict[int, int] = {}
        for index, text in missing.items():
            token = encoded.token_range(index, index + 1)[1]
            token_id = self._single_token_id(text)
            if token_id is None or pair.input[index + 1 : int(encoded.ends[token])].strip():  # inside a token
                return None
            if token_id == encoded.ids[token]:  # this label would mean that nothing is missing
                return None
            inserted[token] = token_id
        return inserted

    def _single_token_id(self, text: str) -> int | None:
        """Return the id of a text that is one token, or None."""
        if text not in self._single_token_ids:
            ids = next(self.tokenizer.encode([text])).tolist()
            token_id = ids[0] if len(ids) == 1 else self.tokenizer.hf.get_vocab().get(text)
            self._single_token_ids[text] = None if token_id == self.tokenizer.hf.unk_token_id else token_id
        return self._single_token_ids[text]

    def _make_sample(self, text: str, encoded: Encoding, inserted: dict[int, int]) -> Sample:
        by_rule = {encoded.token_range(index, index + 1)[1] for index in comma_positions(text)}
        ids, flags = list(self._frame.before), [0] * len(self._frame.before)
        for token, token_id in enumerate(encoded.ids.tolist()):
            ids.append(token_id)
            flags.append(_TOKEN | (_RULE if token in by_rule else 0))
            if token in inserted:
                ids.append(inserted[token])
                flags.append(_INSERTED)
        ids += self._frame.after
        flags += [0] * len(self._frame.after)
        return Sample(np.array(ids, dtype=np.int64), np.array(flags, dtype=np.uint8))

    def batch(self, rows: Rows) -> Batch:
        assert rows.flags is not None
        ids = np.full_like(rows.ids, self.tokenizer.pad_id)
        targets = np.full_like(ids, IGNORED)
        attended, by_rule = np.zeros_like(ids), np.zeros(ids.shape, dtype=bool)
        for row, length in enumerate(rows.lengths):
            flags, tokens = rows.flags[row, :length], rows.ids[row, :length]
            input_tokens = np.flatnonzero(flags != _INSERTED)
            count = len(input_tokens)
            ids[row, :count] = tokens[input_tokens]
            attended[row, :count] = 1
            if not rows.valid[row]:
                continue
            # In the store, an inserted token or the next input token follows an input token.
            has_insertion = np.append(flags[1:] == _INSERTED, False)[input_tokens]
            labels = np.where(has_insertion, np.append(tokens[1:], 0)[input_tokens], tokens[input_tokens])
            targets[row, :count] = np.where(flags[input_tokens] & _TOKEN, labels, IGNORED)
            by_rule[row, :count] = (flags[input_tokens] & _RULE) > 0
        arrays = {"input_ids": ids, "attention_mask": attended, "targets": targets, "by_rule": by_rule}
        return Batch(as_tensors(arrays), int((targets != IGNORED).sum()), int(attended[rows.valid].sum()))

    def token_views(self, rows: Rows) -> list[TokenView]:
        tensors = self.batch(rows).tensors
        is_input = tensors["attention_mask"][0] > 0
        return [TokenView(tensors["input_ids"][0, is_input].numpy(), tensors["targets"][0, is_input].numpy())]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        import torch

        from artel.models.loss import model_losses

        ids, targets, by_rule = (batch.tensors[name] for name in ("input_ids", "targets", "by_rule"))
        loss, guesses = model_losses(
            model, {"input_ids": ids, "attention_mask": batch.tensors["attention_mask"]}, targets
        )
        is_target = targets != IGNORED
        missing, inserted = is_target & (targets != ids), is_target & (guesses != ids)
        correct = is_target & (guesses == targets)
        found_by_rule = by_rule & missing & (targets == self._single_token_id(","))
        counts = (correct, missing, inserted, correct & missing, by_rule, found_by_rule)
        return torch.stack([loss, torch.full_like(loss, batch.targets), *(count.sum().float() for count in counts)])

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return precision, recall and F1 of insertions (position and token), and of the rule for Russian commas."""
        metrics = token_metrics(totals)
        metrics |= precision_recall_f1(totals["found"], totals["guessed"], totals["missing"])
        if totals["by_rule"]:
            scores = precision_recall_f1(totals["found_by_rule"], totals["by_rule"], totals["missing"])
            metrics |= {f"rule_{name}": score for name, score in scores.items()}
        return metrics

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        return Reply([self.restore(model, prompt)])

    def restore(self, model: PreTrainedModel, text: str) -> str:
        """Return the text with the insertions that the model predicts."""
        import torch

        encoded = next(self.tokenizer.encode_with_offsets([text]))
        ids = torch.tensor([[*self._frame.before, *encoded.ids.tolist(), *self._frame.after]], device=model.device)
        with evaluation_mode(model):
            guesses = model(input_ids=ids).logits[0].argmax(dim=-1).cpu().numpy()
        guesses = guesses[len(self._frame.before) :][: len(encoded.ids)]
        segments, end = [], 0
        for token in np.flatnonzero(guesses != encoded.ids):
            start, end = end, int(encoded.ends[token])
            segments += [text[start:end], self.tokenizer.decode([guesses[token]])]
        return "".join([*segments, text[end:]])


def find_insertions(input_text: str, output_text: str) -> dict[int, str] | None:
    """Return the insertions that turn the input into the output: index of the preceding character -> inserted text.

    Ignores white space. Index -1 is the beginning. None if the output lacks a character of the input.
    """
    missing: dict[int, str] = {}
    last_index, index = -1, 0
    for character in output_text:
        if character.isspace():
            continue
        while index < len(input_text) and input_text[index].isspace():
            index += 1
        if index < len(input_text) and input_text[index] == character:
            last_index, index = index, index + 1
        else:
            missing[last_index] = missing.get(last_index, "") + character
    return None if input_text[index:].strip() else missing


_WORD = re.compile(r"[^\W\d_]+")
_RELATIVE_PRONOUNS = frozenset(
    "который которая которое которые которого которой которому которым которых которую которыми котором".split()
)
# More often than not, a comma precedes these (counted on 3,440 sentences of Universal Dependencies).
_CONJUNCTIONS = _RELATIVE_PRONOUNS | frozenset(
    "что чтобы но а если когда где куда откуда хотя пока поскольку словно будто ибо зато чем почему зачем однако "
    "потому особенно включая например причём причем какой какая какое какие чей чья чьё чьи".split()
)
_PREPOSITIONS = frozenset("в во на с со к ко о об от из у по за для при под над через после до без перед".split())
# The comma precedes both words of these pairs: потому что, оттого что, так что.
_BEFORE_THAT = frozenset("потому оттого так".split())


def comma_positions(text: str) -> list[int]:
    """Return the indices after which a textbook rule puts commas in Russian: before a conjunction.

    This is the baseline that a model must beat.
    """
    words = list(_WORD.finditer(text))
    positions = set()
    for index in range(1, len(words)):
        word, comma_word = words[index][0].lower(), index
        if word not in _CONJUNCTIONS:
            continue
        previous = words[index - 1][0].lower()
        if (word in _RELATIVE_PRONOUNS and previous in _PREPOSITIONS) or (word == "что" and previous in _BEFORE_THAT):
            comma_word -= 1  # в котором, потому что
        if comma_word == 0:
            continue
        end = words[comma_word - 1].end()
        if not text[end : words[comma_word].start()].strip():  # otherwise a dash or full stop is there already
            positions.add(end - 1)
    return sorted(positions)
