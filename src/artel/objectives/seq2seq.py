"""Sequence to sequence with encoder-decoders: corrections, summaries, paraphrases, translations.

T5 (Raffel et al. 2020), BART (Lewis et al. 2020) and relatives: the encoder reads the input, and the decoder learns
each token of the output from the tokens before it and the input. The loss is the mean over the output's tokens.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.config import ModelConfig, RunConfig
from artel.errors import InputError, Problem
from artel.models import IGNORED
from artel.objectives.base import Objective, directions
from artel.objectives.decoding import Decoding, python_literal
from artel.objectives.length_groups import as_tensors, group_inputs, group_rows, round_up, stack_rows
from artel.objectives.per_token import SUMS, token_metrics
from artel.objectives.seq2seq_text import GenerationInput, PairFraming, TextGenerator, padded_length
from artel.objectives.types import AnswerPrompt, Batch, DocumentSamples, Presentation, Reply, TokenView
from artel.printable import shorten
from artel.text import Document, DroppedRecord, Pair, Rejected
from artel.tokens import Rows, Sample, Samples, StoreSplit, Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.generation.answers import SampledAnswer
    from artel.generation.generate import Sampling
    from artel.models.loading.request import ModelRequest

_INPUT = 0  # column of a sample's numbers: length of the input
_NOT_GENERATED = -1.0
_MIN_OUTPUT_TOKENS = 8
_MAX_LISTED, _MAX_LISTED_CHARACTERS = 10, 60  # pairs in a report, and characters of each text
_EXAMPLE = "He come home yesterday."


class SequenceToSequence(Objective, Decoding):
    auto_class = "AutoModelForSeq2SeqLM"
    learns_from = ("pairs",)
    presentation = Presentation(
        "writes a text for a text: corrected, shorter, in other words, in another language", "rewrite"
    )
    section = "seq2seq"
    continues = False
    adds_special_tokens = True
    has_answers = True
    sums = SUMS
    has_many_outputs = True
    tasks = ("generate",)
    metric_directions = directions(lower=["loss", "perplexity"], higher=["accuracy", "exact_match", "chrf"])

    @classmethod
    def claims(cls, architecture: str, folder: str) -> bool:
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as NAMES

        from artel.models.loading.model_folder import read_config

        return architecture in NAMES.values() and read_config(folder)[0].is_encoder_decoder

    @classmethod
    def run_values(cls, model_config: PreTrainedConfig, folder: str) -> dict[str, Any]:
        """Return the maximum output length in its generation settings."""
        from transformers import GenerationConfig

        try:
            settings = GenerationConfig.from_pretrained(folder)
        except OSError:  # no generation settings
            return {}
        max_tokens = settings.max_new_tokens or settings.max_length or 0
        return {"seq2seq": {"target": max_tokens}} if max_tokens >= _MIN_OUTPUT_TOKENS else {}

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._seq2seq = config.seq2seq
        self._framing = PairFraming(config, tokenizer)
        self._generator = TextGenerator(tokenizer, self._framing)
        if self._seq2seq.generate:
            self.outputs = tuple(f"token_{position}" for position in range(self._framing.max_output_tokens))
        self.samples_with_outputs = self._seq2seq.generate

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        problems = super().problems(config)
        best = config.checkpoint.best
        if best in ("exact_match", "chrf") and not config.seq2seq.generate:
            what = f"{best!r} needs generated texts, but seq2seq.generate is 0"
            problems.append(Problem("checkpoint.best", what, "write seq2seq.generate: 200, or another number"))
        if config.validate_.rewards and not config.seq2seq.generate:
            what = "score generated texts, but seq2seq.generate is 0"
            problems.append(Problem("validate.rewards", what, "write seq2seq.generate: 200, or another number"))
        return problems

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        seq2seq = config.seq2seq
        languages = [seq2seq.source_language, seq2seq.target_language]
        return [config.data.block, seq2seq.target, seq2seq.prefix, seq2seq.too_long, languages]

    # the model

    def model_request(self, model: ModelConfig, block: int = 1, seed: int = 0) -> ModelRequest:
        """Return the request. A new decoder starts with its architecture's default token, usually padding."""
        if model.from_ is not None:
            return super().model_request(model, block, seed)
        request = super().model_request(model, max(block, self._framing.max_output_tokens), seed)
        from artel.models.loading.model_config import decoder_start_id
        from artel.models.loading.structure import model_config_values

        values = model_config_values(model, self.auto_class)
        if "decoder_start_token_id" in values:
            return request
        start = decoder_start_id(values["model_type"], self.tokenizer)
        return replace(request, head_config={"decoder_start_token_id": start})

    def check(self, model: PreTrainedModel) -> None:
        from artel.models.loading.structure import position_limit

        limit = position_limit(model)
        if limit is not None and self._framing.max_output_tokens > limit:
            what = f"{self._framing.max_output_tokens} tokens are more than the model's {limit} positions"
            raise InputError.at("seq2seq.target", what, f"write {limit} or less")
        if not model.config.is_encoder_decoder:
            what = f"{model.config.model_type} has no encoder and decoder"
            raise InputError.at("model", what, "use t5, mt5 or bart; objective causal or chat learns from its texts")
        _check_start(model)

    def model_files(self, model: PreTrainedModel) -> dict[str, bytes]:
        """Return the model's generation settings, changed to make transformers generate like artel."""
        settings = copy.deepcopy(model.generation_config)
        settings._from_model_config = False
        settings.max_length, settings.max_new_tokens = None, self._framing.max_output_tokens
        for name, value in self._generator.special_ids(model).items():
            setattr(settings, name, value)
        if self._seq2seq.beams is not None:
            settings.num_beams = self._seq2seq.beams
        return {"generation_config.json": settings.to_json_string().encode()}

    def model_card_code(self) -> str:
        return cleandoc(f"""
            inputs = tokenizer({python_literal(self._seq2seq.prefix + self.example_prompt(None))}, return_tensors="pt")
            outputs = model.generate(**inputs)
            print(tokenizer.decode(outputs[0], skip_special_tokens=True))
        """)

    def output_ids(self, sample: Sample) -> np.ndarray | None:
        return sample.ids[sample.numbers[_INPUT] :]

    def example_prompt(self, samples: Samples | None) -> str:
        """Return the first of `validate.prompts`, or the first training input without its prefix."""
        if samples is None or self.config.validate_.prompts:
            return next(filter(None, self.config.validate_.prompts), _EXAMPLE)
        sample = samples.read(0)
        text = self._generator.text(sample.ids[: sample.numbers[_INPUT]])
        return " ".join(text.removeprefix(self._seq2seq.prefix.strip()).split()[:12])

    # record -> samples

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        pairs = [document.record.fields for document in documents]
        inputs = self._framing.inputs([pair.input for pair in pairs if isinstance(pair, Pair)])
        outputs = self._framing.outputs([pair.output for pair in pairs if isinstance(pair, Pair)])
        for document, source, target in zip(documents, inputs, outputs, strict=True):
            pair = document.record.fields
            assert isinstance(pair, Pair)
            truncated = {"input_truncated": int(source.is_truncated), "output_truncated": int(target.is_truncated)}
            if self._seq2seq.too_long == "drop" and any(truncated.values()):
                yield DroppedRecord("longer_than_block" if source.is_truncated else "longer_than_target")
                continue
            sample = Sample(np.concatenate([source.ids, target.ids]), None, (len(source.ids),))
            counts = {name: count for name, count in truncated.items() if count}
            texts = {"input": pair.input, "output": pair.output} if document.split == "validation" else None
            yield DocumentSamples([sample], texts, counts)

    # samples -> batch -> loss

    def batch(self, rows: Rows) -> Batch:
        """Return `group_rows` of the inputs, and `targets` of the same rows, int64 (rows, longest output).

        `predicted0`, `predicted1`, …: positions with a target in the flattened targets of each group. `generated`, bool
        (rows,): True for validation rows for which the model also generates.
        """
        split = rows.numbers[:, _INPUT]
        count = len(rows.ids)
        inputs = [rows.ids[row, : split[row]] for row in range(count)]
        grouped = group_rows(inputs, self.group_count(count), self.tokenizer.pad_id)
        order = np.argsort(grouped.tensors["unsorted_indices"].numpy())
        outputs = [rows.ids[row, split[row] : rows.lengths[row]] for row in order]
        targets = stack_rows(outputs, padded_length(outputs), IGNORED)
        targets[~rows.valid[order]] = IGNORED
        lengths = np.array(list(map(len, outputs)))
        groups = tuple(
            replace(group, target=min(round_up(int(lengths[group.start : group.end].max())), targets.shape[1]))
            for group in grouped.groups
        )
        arrays: dict[str, np.ndarray] = {
            "targets": targets,
            "generated": rows.valid[order] & (rows.epochs[order] < 0) & (rows.indices[order] < self._seq2seq.generate),
        }
        for index, group in enumerate(groups):
            group_targets = targets[group.start : group.end, : group.target]
            arrays[f"predicted{index}"] = np.flatnonzero(group_targets != IGNORED)
        count, tokens = int((targets != IGNORED).sum()), int(rows.lengths[rows.valid].sum())
        return Batch(grouped.tensors | as_tensors(arrays), count, tokens, groups)

    def token_views(self, rows: Rows) -> list[TokenView]:
        """Return the input of the encoder, and the output of the decoder."""
        split, length = rows.numbers[0, _INPUT], rows.lengths[0]
        source, target = rows.ids[0, :split], rows.ids[0, split:length]
        return [TokenView(source, np.full(len(source), IGNORED), "input"), TokenView(target, target, "output")]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the sums. A target is a token of an output."""
        import torch

        inputs = group_inputs(model, batch.tensors, batch.groups)
        sums = [self._group_sums(model, batch, index, group) for index, group in enumerate(inputs)]
        loss, correct = torch.stack(sums).sum(dim=0)
        return torch.stack([loss, torch.full_like(loss, batch.targets), correct])

    def _group_sums(self, model: PreTrainedModel, batch: Batch, index: int, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the loss and correct guesses of a group, float32 (2,). The loss is smoothed in training only."""
        import torch

        from artel.generation.encoder_decoder import decoder_inputs
        from artel.models.logits_loss import loss_of_logits
        from artel.models.loss import model_losses

        group, positions = batch.groups[index], batch.tensors[f"predicted{index}"]
        targets = batch.tensors["targets"][group.start : group.end, : group.target].contiguous()
        inputs = {**inputs, "decoder_input_ids": decoder_inputs(model, targets), "use_cache": False}
        expected = targets.flatten()[positions]
        if self._seq2seq.smoothing and model.training:
            smoothed = _SmoothedLoss(expected, self._seq2seq.smoothing)
            return loss_of_logits(model, inputs, positions, smoothed, 2)
        loss, guesses = model_losses(model, inputs, targets, positions)
        return torch.stack([loss, (guesses == expected).sum().float()])

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums, and the ids that the model generates for the first `seq2seq.generate` pairs."""
        import torch

        from artel.generation.encoder_decoder import any_rank, generate_rows

        sums = self.loss(model, batch)
        is_generated = batch.tensors["generated"]
        outputs = sums.new_full((len(is_generated), len(self.outputs)), _NOT_GENERATED)
        if self._seq2seq.generate and any_rank(bool(is_generated.any()), is_generated.device):
            # A rank without rows to generate generates its first row: ranks that share a model must call it equally
            # often.
            rows = is_generated.nonzero()[:, 0] if is_generated.any() else is_generated.new_zeros(1, dtype=torch.int64)
            sampling = replace(self.default_sampling(), seed=self.config.seed)
            ids, mask = (batch.tensors[name][rows] for name in ("input_ids", "attention_mask"))
            special_ids = self._generator.special_ids(model)
            generated = generate_rows(model, ids, mask, sampling, special_ids, with_other_ranks=True)
            outputs[rows, : generated.shape[1]] = generated.to(outputs.dtype)
            outputs[~is_generated] = _NOT_GENERATED
        return sums, outputs[batch.tensors["unsorted_indices"]]

    # metrics

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return `token_metrics` (teacher-forced); of generated texts `exact_match`, 0 to 1, and `chrf`, 0 to 100."""
        metrics = token_metrics(totals)
        pairs = [(text, reference["output"].strip()) for text, reference in self._generated_texts(outputs, split)]
        if pairs:
            metrics["exact_match"] = sum(text == output for text, output in pairs) / len(pairs)
            metrics["chrf"] = chrf(pairs)
        return metrics

    def details(self, outputs: np.ndarray, split: StoreSplit) -> dict[str, Any]:
        pairs = list(itertools.islice(self._generated_texts(outputs, split), _MAX_LISTED))
        rows = [
            {"input": _line(reference["input"]), "output": _line(reference["output"]), "written": _line(text)}
            for text, reference in pairs
        ]
        return {"tables": {"What the model writes": rows}} if rows else {}

    def _generated_texts(self, outputs: np.ndarray, split: StoreSplit) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the stripped text that the model generated for a pair, and the stored pair."""
        for ids, reference in zip(outputs, split.references(), strict=False):
            if not len(ids) or ids[0] == _NOT_GENERATED:
                return
            yield self._generator.text(ids[ids != _NOT_GENERATED].astype(np.int64)), reference

    def answer_prompts(self, split: StoreSplit, limit: int) -> tuple[list[AnswerPrompt], int]:
        """Return the pairs whose outputs an evaluation generates (`seq2seq.generate`)."""
        pairs = itertools.islice(split.references(), min(limit, self._seq2seq.generate))
        return [AnswerPrompt(pair["input"], {"answer": pair["output"]}) for pair in pairs], 0

    def generated_answers(self, model: PreTrainedModel, outputs: np.ndarray) -> list[SampledAnswer]:
        return [
            self._generator.answer(model, ids[ids != _NOT_GENERATED].astype(np.int64))
            for ids in itertools.takewhile(lambda ids: len(ids) and ids[0] != _NOT_GENERATED, outputs)
        ]

    # use

    def default_sampling(self) -> Sampling:
        """Return greedy decoding, or beam search if the run sets `beams`, up to the maximum output length."""
        from artel.generation.generate import Sampling

        return Sampling(self._framing.max_output_tokens, temperature=0.0, beams=self._seq2seq.beams)

    def run_task(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return {"text", "finish_reason" (stop or length), "tokens", …} for each text or keys of `GenerationInput`."""
        default = {"sampling": self.default_sampling()}
        requests = [
            GenerationInput(**(default | (item if isinstance(item, dict) else {"text": item}))) for item in inputs
        ]
        return [
            {"text": output.text, "finish_reason": "stop" if output.is_finished else "length", "tokens": output.tokens}
            | {"prompt_tokens": output.input_tokens, "truncated": output.is_truncated}
            for output in self._generator.generate(model, requests)
        ]

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        (output,) = self._generator.generate(model, [GenerationInput(prompt, sampling)])
        notes = []
        if output.is_truncated:
            notes.append(f"the text was cut to {self._framing.max_input_tokens} tokens (data.block)")
        if not output.is_finished:
            notes.append(f"the answer was cut off at {output.tokens} tokens; use a larger --max-new-tokens")
        return Reply([output.text], tuple(notes), {"prompt": prompt, "text": output.text})


@dataclass(frozen=True, slots=True)
class _SmoothedLoss:
    """Cross-entropy with label smoothing (Szegedy et al. 2016, section 7), and the number of correct guesses."""

    targets: torch.Tensor
    smoothing: float

    def __call__(self, logits: torch.Tensor, chunk: slice) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        targets = self.targets[chunk]
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.smoothing)
        return torch.stack([loss, (logits.detach().argmax(dim=1) == targets).sum().float()])


def _check_start(model: PreTrainedModel) -> None:
    """Raise InputError if a model's configuration does not define the start of its decoder."""
    import torch

    from artel.generation.encoder_decoder import decoder_inputs

    try:
        decoder_inputs(model, torch.full((1, 2), IGNORED))
    except (ValueError, TypeError, AttributeError) as error:
        what = f"{model.config.model_type} does not define how its decoder starts: {' '.join(str(error).split())[:200]}"
        fix = "write decoder_start_token_id and pad_token_id into its config.json"
        raise InputError.at("model", what, fix) from None


def _line(text: str) -> str:
    return shorten(" ".join(text.split()), _MAX_LISTED_CHARACTERS)


_ORDER = 6
_BETA = 2


def chrf(pairs: Iterable[tuple[str, str]]) -> float:
    """Return corpus chrF2 of (generated, expected) texts, 0 to 100 (Popović 2015).

    The default of sacrebleu: n-grams of 1 to 6 characters without white space, recall twice as important as precision.
    A word with a wrong ending counts in part, and no word tokenizer is needed.
    """
    generated, expected, common = ([0] * _ORDER for _ in range(3))
    for text, reference in pairs:
        characters = "".join(text.split()), "".join(reference.split())
        for order in range(_ORDER):
            text_ngrams, reference_ngrams = (_ngrams(value, order + 1) for value in characters)
            # Like sacrebleu: a reference without n-grams of this length does not count for precision.
            generated[order] += text_ngrams.total() if reference_ngrams else 0
            expected[order] += reference_ngrams.total()
            common[order] += (text_ngrams & reference_ngrams).total()
    precisions, recalls, orders = 0.0, 0.0, 0
    for order in range(_ORDER):
        if generated[order] and expected[order]:
            precisions += common[order] / generated[order]
            recalls += common[order] / expected[order]
            orders += 1
    if not orders or not precisions + recalls:
        return 0.0
    precision, recall = precisions / orders, recalls / orders
    return 100 * (1 + _BETA**2) * precision * recall / (_BETA**2 * precision + recall)


def _ngrams(text: str, length: int) -> Counter[str]:
    return Counter(text[start : start + length] for start in range(len(text) - length + 1))
