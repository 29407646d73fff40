"""Embedding: matching texts get vectors that are near each other.

The loss with in-batch negatives uses all vectors of the global batch (`needs_global_outputs`): a batch of 1,000 has
1,000 candidates, no matter how it is divided into micro-batches and processes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.config import EmbeddingConfig, ModelConfig, RunConfig
from artel.errors import InputError, Problem
from artel.messages import Phrase
from artel.models import IGNORED
from artel.models.text_vectors import has_pooling_layer
from artel.objectives.base import Objective, directions
from artel.objectives.decoding import Decoding, python_literal
from artel.objectives.embedding.losses import KEYS, MatchKeys, Texts, loss_sum, match_keys
from artel.objectives.embedding.matches import (
    DOCUMENT,
    HASH,
    NEGATIVE,
    PADDING,
    POSITIVE,
    QUERY,
    ROLE,
    SCORE,
    SCORE_SCALE,
    MatchReader,
    choose_texts,
    text_hash,
)
from artel.objectives.embedding.retrieval import DEPTH, ValidatedTexts, lookup_metrics, mean_loss
from artel.objectives.embedding.sentence_transformers import folder_files, read_folder
from artel.objectives.embedding.vectors import (
    TextEncoder,
    finalize_vectors,
    group_vectors,
    is_causal,
    isolates_texts,
    packed_rows,
    packed_vectors,
)
from artel.objectives.length_groups import as_tensors, group_rows
from artel.objectives.types import Batch, DocumentSamples, Presentation, Reply, TokenView
from artel.text import Document, Rejected
from artel.tokens import Rows, Samples, StoreSplit, Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.generation.generate import Sampling

_EXAMPLE = "Where is Anna?"
_NAMES = {QUERY: "query", POSITIVE: "positive", NEGATIVE: "negative"}
_GOALS = {
    QUERY: "a vector near those of its positives",
    POSITIVE: "a vector near its query's",
    NEGATIVE: "a vector far from its query's",
}


class Embedding(Objective, Decoding):
    auto_class = "AutoModel"
    learns_from = ("matches",)
    presentation = Presentation(
        "turns texts into vectors, which are close if the texts match", "embed", "sentence-similarity", 2e-5
    )
    section = "embedding"
    continues = False
    adds_special_tokens = True
    sums = ("loss", "targets")
    document_number = DOCUMENT
    has_many_outputs = True
    tasks = ("embed",)
    prompts_problem = ("an embedding model does not generate text", "remove them; validation measures retrieval")
    needs_global_outputs = True
    metric_directions = directions(
        lower=["loss"],
        higher=["recall_at_1", "recall_at_5", f"recall_at_{DEPTH}", f"mrr_at_{DEPTH}", f"ndcg_at_{DEPTH}", "spearman"],
    )

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._embedding = config.embedding
        self._reader = MatchReader(tokenizer, config.embedding, config.data.block)
        self._encoder = TextEncoder(tokenizer, self._reader, config.embedding, config.data.block)
        self._packs = False
        self._causal = False
        self.needs_global_outputs = config.embedding.loss in ("in_batch_negatives", "cosent")

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        embedding = config.embedding
        problems = super().problems(config)
        if embedding.loss == "in_batch_negatives" and config.train.batch == 1:
            what = "is 1, but the loss needs documents of other queries in the batch"
            problems.append(Problem("train.batch", what, "write 32 or more"))
        if embedding.loss == "triplet" and embedding.negatives == 0:
            what = "is 0, but a triplet needs a negative"
            problems.append(Problem("embedding.negatives", what, "write 1 or more"))
        if config.model.from_ is not None and has_pooling_layer(config.model.from_):
            pooling = read_folder(config.model.from_)["embedding"]["pooling"]
            if pooling != embedding.pooling:
                what = f"{embedding.pooling}, but {config.model.from_} was trained with {pooling}"
                problems.append(Problem("embedding.pooling", what, f"write pooling: {pooling}"))
        return problems + _matryoshka_problems(_folder_vector_size(config.model), embedding.matryoshka)

    @classmethod
    def claims(cls, architecture: str, folder: str) -> bool:
        """True for a model without a head, or one saved by sentence-transformers."""
        is_headless = architecture.endswith("Model") and not architecture.endswith("HeadModel")
        return is_headless or has_pooling_layer(folder)

    @classmethod
    def run_values(cls, model_config: PreTrainedConfig, folder: str) -> dict[str, Any]:
        return read_folder(folder) if has_pooling_layer(folder) else {}

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        embedding = config.embedding
        return [config.data.block, embedding.prompts.model_dump(), embedding.loss, embedding.largest_score]

    @property
    def loss_description(self) -> str:
        embedding = self._embedding
        loss = {
            "in_batch_negatives": Phrase("in-batch negatives of the whole global batch"),
            "triplet": Phrase("triplets, margin {margin:g}", margin=embedding.margin),
            "cosine": Phrase("squared error of cosines"),
            "cosent": Phrase("CoSENT of the whole global batch"),
        }[embedding.loss]
        sizes = list(embedding.matryoshka)
        return Phrase("{loss}, at {sizes} numbers", loss=loss, sizes=sizes) if sizes else loss

    def check(self, model: PreTrainedModel) -> None:
        """Check the vector size. Let texts share rows if the model isolates them."""
        vector_size = model.config.get_text_config().hidden_size
        if problems := _matryoshka_problems(vector_size, self._embedding.matryoshka):
            raise InputError(problems)
        self.outputs = tuple(map(str, range(vector_size)))
        self._causal = is_causal(model)
        self._packs = isolates_texts(model, causal=self._causal)

    # record -> samples

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected]:
        return self._reader.samples(documents)

    def min_evaluated(self, split: StoreSplit) -> int:
        numbers = split.numbers()
        return int((numbers[:, DOCUMENT] == numbers[0, DOCUMENT]).sum()) if len(numbers) else 0

    # samples -> batch -> loss

    def batch(self, rows: Rows) -> Batch:
        """Return `packed_rows` or `group_rows` of all texts, and `keys` (texts, len(KEYS)).

        Texts are queries, then positives, then negatives, each in the order of the matches; `keys` also
        contains positives that are not in the batch.
        """
        valid = np.flatnonzero(rows.valid)
        valid_rows = valid if len(valid) else [0]  # a rank without samples must still call the model
        if rows.numbers[0, ROLE]:
            texts = [rows.ids[row, : rows.lengths[row]] for row in valid_rows]  # validation uses no keys
            keys = np.zeros((len(texts), len(KEYS)), dtype=np.int64)
            min_texts = len(rows.ids)
        else:
            texts, keys = self._choose_match_texts(rows, valid_rows)
            min_texts = 2 * len(rows.ids)  # a match has two texts or more
        if not len(valid):
            keys[:, 0] = PADDING
        tokens = sum(map(len, texts)) if len(valid) else 0
        tensors = as_tensors({"keys": keys})
        if self._packs:
            return Batch(tensors | packed_rows(texts), len(valid), tokens)
        grouped = group_rows(texts, self.group_count(min_texts), self.tokenizer.pad_id)
        return Batch(tensors | grouped.tensors, len(valid), tokens, grouped.groups)

    def _choose_match_texts(
        self, rows: Rows, valid_rows: Sequence[int] | np.ndarray
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the texts of the matches in `valid_rows`, and their keys."""
        assert rows.flags is not None
        matches = []
        for row in valid_rows:
            length = rows.lengths[row]
            key = f"match:{self.config.seed}:{rows.epochs[row]}:{rows.indices[row]}"
            matches.append(
                choose_texts(rows.ids[row, :length], rows.flags[row, :length], self._embedding.max_negatives, key)
            )
        keys = match_keys(
            [
                MatchKeys(
                    int(rows.numbers[row, HASH]),
                    text_hash(match.positive),
                    list(map(text_hash, match.negatives)),
                    list(map(text_hash, match.other_positives)),
                    int(rows.numbers[row, SCORE]),
                )
                for row, match in zip(valid_rows, matches, strict=True)
            ]
        )
        texts = [match.query for match in matches] + [match.positive for match in matches]
        return texts + [text for match in matches for text in match.negatives], keys

    def token_views(self, rows: Rows) -> list[TokenView]:
        """Return every text of the first row. No token is predicted."""
        ids = rows.ids[0, : rows.lengths[0]]
        roles, texts = rows.numbers[:1, ROLE], [ids]
        if rows.flags is not None and not roles[0]:
            starts = np.flatnonzero(rows.flags[0, : rows.lengths[0]])
            roles, texts = rows.flags[0, starts], np.split(ids, starts[1:])
        goals = dict(_GOALS)
        if self._embedding.learns_scores:
            score = rows.numbers[0, SCORE] / SCORE_SCALE
            goals[POSITIVE] = f"a cosine with its query in the order of {score:g}"
            if self._embedding.loss == "cosine":
                goals[POSITIVE] = f"the cosine {score:g} with its query"
        return [
            TokenView(text, np.full(len(text), IGNORED), _NAMES[int(role)], goal=goals[int(role)])
            for text, role in zip(texts, roles, strict=True)
        ]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the sums among the texts of this micro-batch only. A target is a query."""
        outputs = self.batch_outputs(model, batch)
        return self.global_loss(outputs, batch.tensors["keys"], slice(None))

    def batch_outputs(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        if batch.groups:
            return group_vectors(model, batch.tensors, batch.groups, self._embedding.pooling)
        return packed_vectors(model, batch.tensors, self._embedding.pooling, causal=self._causal)

    def output_keys(self, batch: Batch) -> torch.Tensor:
        return batch.tensors["keys"]

    def global_loss(self, outputs: torch.Tensor, keys: torch.Tensor, micro_batch: slice) -> torch.Tensor:
        import torch

        texts = Texts.from_vectors(outputs, keys)
        loss = loss_sum(texts, self._embedding, micro_batch)
        return torch.stack([loss, loss.new_tensor(float(len(texts.indices(QUERY, micro_batch=micro_batch))))])

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the vector of each text; `metrics` compares them."""
        outputs = finalize_vectors(self.batch_outputs(model, batch), self._embedding)
        return outputs.new_tensor([0.0, float(batch.targets)]), outputs

    # metrics

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return the loss over batches of `train.batch` matches in order, and retrieval metrics.

        Queries of the split are looked up among all its documents; scored pairs are ranked by cosine.
        """
        validated = ValidatedTexts.from_outputs(outputs, split)
        loss = mean_loss(validated, self._embedding, self.config.train.batch)
        return {"loss": loss} | lookup_metrics(validated, validated.vectors, self._embedding)

    def details(self, outputs: np.ndarray, split: StoreSplit) -> dict[str, Any]:
        """Return the size of the corpus, and the metrics of truncated vectors (`embedding.matryoshka`)."""
        validated = ValidatedTexts.from_outputs(outputs, split)
        shorter = [
            {"dimensions": str(size), **lookup_metrics(validated, validated.vectors[:, :size], self._embedding)}
            for size in self._embedding.matryoshka
            if size < validated.vectors.shape[1]
        ]
        counts = {"queries": int((validated.roles == QUERY).sum()), "documents": len(validated.documents)}
        return {"tables": {"Corpus": [counts], **({"Shorter vectors": shorter} if shorter else {})}}

    # use

    def run_task(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return {"embedding", "tokens", "truncated"} for each text or {"text", "input_type", "dimensions"}.

        A text may be ids, with special tokens. Raise InputError for an empty text, or invalid input_type or dimensions.
        """
        requests: list[dict[str, Any]] = [item if isinstance(item, dict) else {"text": item} for item in inputs]
        result = []
        for (input_type, dimensions), group in groupby(
            requests, lambda request: (request.get("input_type"), request.get("dimensions"))
        ):
            rows = self._encoder.rows([request["text"] for request in group], input_type or "")
            vectors = self._encoder.vectors(model, [row for row, _ in rows], dimensions=dimensions)
            result += [
                {"embedding": vector.tolist(), "tokens": len(row), "truncated": is_cut}
                for vector, (row, is_cut) in zip(vectors, rows, strict=True)
            ]
        return result

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        (answer,) = self.run_task(model, "embed", [prompt])
        vector = answer["embedding"]
        first_numbers = f"[{', '.join(f'{value:.4f}' for value in vector[:8])}, …]"
        notes = (f"the first 8 of {len(vector)} numbers; all of them with --json",)
        return Reply([first_numbers], notes, {"prompt": prompt, "embedding": vector})

    def model_files(self, model: PreTrainedModel) -> dict[str, bytes]:
        from artel.models.loading.structure import position_limit

        block = min(self.config.data.block, position_limit(model) or self.config.data.block)
        return folder_files(self._embedding, model.config.get_text_config().hidden_size, block)

    def demo_command(self, folder: str, samples: Samples | None) -> str:
        prompt = _EXAMPLE if samples is None else self._reader.first_query_words(samples.read(0))
        return f"artel generate {folder} --prompt {shlex.quote(prompt)} --json"

    def model_card_code(self) -> str:
        return example_code(self._embedding, [_EXAMPLE, "Anna is in the forest."])


def _folder_vector_size(model: ModelConfig) -> int | None:
    """Return the vector size of a model in a folder; None if the model is on the hub or damaged."""
    if model.from_ is None or not Path(model.from_, "config.json").is_file():
        return None
    from artel.models.loading.model_folder import read_config

    try:
        config, _ = read_config(model.from_, runs_code=model.runs_code)
    except InputError:  # reported when the model is checked
        return None
    return getattr(config.get_text_config(), "hidden_size", None)


def _matryoshka_problems(vector_size: int | None, matryoshka: list[int]) -> list[Problem]:
    """Return a problem if vectors of `vector_size` numbers are shorter than a matryoshka size."""
    if vector_size is None or all(length <= vector_size for length in matryoshka):
        return []
    fitting = sorted({min(length, vector_size) for length in matryoshka}, reverse=True)
    what = f"{matryoshka[0]} is more than the {vector_size} numbers of a vector of this model"
    return [Problem("embedding.matryoshka", what, f"write {fitting}")]


_POOLED = {
    "mean": "vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
    "cls": "vectors = states[:, 0]",
    "last": "vectors = states[torch.arange(len(states)), mask.sum(1) - 1]",
}


def example_code(embedding: EmbeddingConfig, texts: Sequence[str]) -> str:
    """Return Python that computes the vectors of a query and a document, and their cosine, with transformers."""
    query, document = texts
    prompted = [embedding.prompts.query + query, embedding.prompts.document + document]
    cosine = "(vectors[0] @ vectors[1]).item())  # the cosine"
    if not embedding.normalize:
        cosine = "torch.cosine_similarity(vectors[0], vectors[1], dim=0).item())"
    return "\n".join(
        [
            f"texts = [{', '.join(map(python_literal, prompted))}]",
            'inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")',
            "with torch.no_grad():",
            "    states = model(**inputs).last_hidden_state",
            'mask = inputs["attention_mask"]',
            _POOLED[embedding.pooling],
            *(["vectors = torch.nn.functional.normalize(vectors, dim=1)"] if embedding.normalize else []),
            f"print({cosine}",
        ]
    )
