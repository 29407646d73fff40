"""Rerankers (cross-encoders): the score of a query and a document that are read together.

Nogueira and Cho 2019, "Passage Re-ranking with BERT". pointwise: the sigmoid of the score is the probability that they
match, learned by binary cross-entropy. listwise: a softmax over a matching document and some that do not match (Gao et
al. 2021, "Rethink Training of BERT Rerankers in Multi-Stage Retrieval Pipeline").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError
from artel.models import IGNORED
from artel.objectives.base import Objective, directions
from artel.objectives.decoding import Decoding, python_literal
from artel.objectives.length_groups import as_tensors, group_rows, predict_logits, row_logits
from artel.objectives.pretrained_heads import has_chat_template, has_problem_type, has_score_head, score_config
from artel.objectives.rerank_samples import (
    COLUMNS,
    HAS_SCORE,
    QUERY,
    NegativeSampler,
    PairWriter,
    read_scores,
    split_texts,
)
from artel.objectives.statistics import sigmoid, spearman
from artel.objectives.types import Batch, DocumentSamples, Presentation, Reply, TokenView
from artel.text import Document, DroppedRecord, Match, Rejected
from artel.tokens import Rows, Sample, Samples, StoreSplit, Tokenizer, TokenStore, UnpackedSamples

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.generation.generate import Sampling

_QUERY, _DOCUMENT = "Where is Anna?", "Anna is in the forest."  # an example
_MAX_LISTED = 5
# Documents ranked for each query in validation: the matching ones, the negatives of its record, and drawn ones.
_MAX_CANDIDATES = 20


class Rerank(Objective, Decoding):
    auto_class = "AutoModelForSequenceClassification"
    learns_from = ("matches",)
    presentation = Presentation("orders documents by how well they answer a query", "rank", "text-ranking", 2e-5)
    section = "rerank"
    needs_context = True
    continues = False
    adds_special_tokens = True
    sums = ("loss", "targets")
    tasks = ("rerank", "score")
    prompts_problem = (
        "a query needs a document, so prompts cannot be used",
        "remove them, and use artel generate after training: artel generate --prompt QUERY --context DOCUMENT",
    )
    metric_directions = directions(lower=["loss"], higher=["mrr", "ndcg", "accuracy", "correlation"])

    @classmethod
    def claims(cls, architecture: str, folder: str) -> bool:
        return has_score_head(architecture, folder) and not has_problem_type(folder) and not has_chat_template(folder)

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._rerank = config.rerank
        self._writer = PairWriter(tokenizer, config.data.block)
        self._samplers: list[NegativeSampler] = []
        self.outputs = tuple(f"score_{index}" for index in range(_MAX_CANDIDATES))

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        return [config.data.block, config.rerank.loss == "listwise"]

    @property
    def loss_description(self) -> str:
        if self._rerank.loss == "listwise":
            return "cross-entropy of the document that matches, among those of its query"
        return "binary cross-entropy of each query and document"

    @property
    def head_config(self) -> dict[str, Any]:
        """One output. Other libraries also apply a sigmoid to it."""
        return score_config("relevance", None, self.tokenizer)

    def demo_command(self, folder: str, samples: Samples | None) -> str:
        return f'artel generate {folder} --prompt "{_QUERY}" --context "{_DOCUMENT}"'

    def model_card_code(self) -> str:
        return cleandoc(f"""
            inputs = tokenizer({python_literal(_QUERY)}, {python_literal(_DOCUMENT)}, return_tensors="pt")
            with torch.no_grad():
                print(model(**inputs).logits[0, 0].sigmoid().item())
        """)

    # record -> samples

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        for document, result in zip(documents, self._writer.samples(documents), strict=True):
            record, match = document.record, document.record.fields
            assert isinstance(match, Match)
            if self._rerank.loss == "listwise" and match.score is not None and isinstance(result, DocumentSamples):
                detail = "it has a score, but listwise needs to know which document matches; set rerank.loss: pointwise"
                yield Rejected(record.origin, "score", detail, record.set_name)
            else:
                yield result

    def check_store(self, store: TokenStore) -> None:
        """Raise InputError if no query has a negative, its own or drawn."""
        numbers = store.train.numbers()
        if not store.train.samples or numbers[:, HAS_SCORE].any():
            return
        sampler = NegativeSampler(store.train, self.config.seed)
        samples = range(min(store.train.samples, _MAX_LISTED))
        if not any(sampler.record_negatives(sample) or sampler.draw(sample, 0, 1) for sample in samples):
            what = "no record has negatives, and there are no other documents to draw them from"
            raise InputError.at("data.sources", what, "add negatives, or records with other documents")

    # samples -> batch -> loss

    def dataset(self, split: StoreSplit) -> UnpackedSamples:
        self._samplers.append(NegativeSampler(split, self.config.seed))
        return _SplitSamples(split, len(self._samplers) - 1)

    def batch(self, rows: Rows) -> Batch:
        """Return `group_rows` of each query with its documents, the matching document first, and two more tensors.

        `present` bool and `labels` float32 (samples, documents). Missing documents and padding rows have one token.
        """
        columns = self._num_documents(rows)
        present, labels = np.zeros((len(rows.ids), columns), dtype=bool), np.zeros((len(rows.ids), columns))
        labels[:, 0] = np.nan_to_num(read_scores(rows.numbers), nan=1.0)
        pairs = []
        for row in range(len(rows.ids)):
            query, *documents = self._read_documents(rows, row, columns) if rows.valid[row] else [rows.ids[row, :1]]
            present[row, : len(documents)] = True
            pairs += [self._writer.row(query, document) for document in documents]
            pairs += [(rows.ids[row, :1], np.zeros(1, dtype=np.int64))] * (columns - len(documents))
        ids, types = zip(*pairs, strict=True)
        count = self.group_count(len(ids))
        grouped = group_rows(ids, count, self.tokenizer.pad_id, types if self._writer.has_types else None)
        tensors = as_tensors({"present": present, "labels": labels.astype(np.float32)})
        in_loss = present[:, : self._max_learned]
        targets = in_loss.any(axis=1).sum() if self._rerank.loss == "listwise" else in_loss.sum()
        lengths = np.array(list(map(len, ids))).reshape(present.shape)
        return Batch(grouped.tensors | tensors, int(targets), int(lengths[present].sum()), grouped.groups)

    @property
    def _max_learned(self) -> int:
        """Maximum number of documents per sample in the loss."""
        return 1 + self._rerank.negatives

    def _num_documents(self, rows: Rows) -> int:
        """Return the number of documents per sample: one if all records have scores."""
        sampler = self._find_sampler(rows)
        if not (sampler.has_matches if sampler else (rows.numbers[:, HAS_SCORE] == 0).any()):
            return 1
        return _MAX_CANDIDATES if (rows.epochs < 0).any() else self._max_learned

    def _find_sampler(self, rows: Rows) -> NegativeSampler | None:
        """Return the negative sampler of the rows' split; None for the made-up rows of a plan."""
        return self._samplers[rows.numbers[0, -1]] if rows.numbers.shape[1] > COLUMNS else None

    def _read_documents(self, rows: Rows, row: int, columns: int) -> list[np.ndarray]:
        """Return a sample's query and its documents, the matching document first."""
        assert rows.flags is not None
        length, index, epoch = (int(array[row]) for array in (rows.lengths, rows.indices, rows.epochs))
        query, document, *negatives = split_texts(rows.ids[row, :length], rows.flags[row, :length])
        if rows.numbers[row, HAS_SCORE]:
            return [query, document]
        sampler = self._find_sampler(rows)
        if sampler is None:
            return [query, document, *(negatives + [document] * columns)[: columns - 1]]
        chosen = sampler.choose(negatives, index, epoch, columns - 1)
        drawn = sampler.draw(index, epoch, columns - 1 - len(chosen), negatives)
        return [query, document, *chosen, *drawn]

    def token_views(self, rows: Rows) -> list[TokenView]:
        """Return the query with each document. No token is predicted."""
        query, *documents = self._read_documents(rows, 0, self._num_documents(rows))
        score = float(np.nan_to_num(read_scores(rows.numbers[:1]), nan=1.0)[0])
        goals = [f"the probability {score:g}", "the probability 0"]
        if self._rerank.loss == "listwise":
            goals = ["the highest score", "a lower score"]
        token_views = []
        for index, document in enumerate(documents):
            ids, _ = self._writer.row(query, document)
            name = f"negative {index}" if index else "document"
            goal = goals[min(index, 1)] if index < self._max_learned else "nothing, it is only ranked"
            token_views.append(TokenView(ids, np.full(len(ids), IGNORED), name, goal=goal))
        return token_views

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the sums. A target is a query with a document, or with listwise a query with all its documents."""
        return self.evaluate_batch(model, batch)[0]

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums, and the scores, NaN for a missing document."""
        import torch
        import torch.nn.functional as F

        all_scores = row_logits(model, batch.tensors, batch.groups)[:, 0].view(batch.tensors["present"].shape)
        outputs = all_scores.masked_fill(~batch.tensors["present"], torch.nan)
        scores, present, labels = (
            tensor[:, : self._max_learned] for tensor in (all_scores, batch.tensors["present"], batch.tensors["labels"])
        )
        if self._rerank.loss == "listwise":
            in_loss = present.any(dim=1)
            # Padding rows also need finite numbers.
            masked = scores.masked_fill(~present & in_loss[:, None], -torch.inf)
            losses = -masked.log_softmax(dim=1)[:, 0]
        else:
            losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
            in_loss = present
        sums = torch.stack([torch.where(in_loss, losses, 0.0).sum(), in_loss.sum().float()])
        return sums, F.pad(outputs, (0, len(self.outputs) - outputs.shape[1]), value=torch.nan)

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return `mrr`, `ndcg` (at 10), `accuracy` of rankings, and Spearman's `correlation` with known scores."""
        metrics = {"loss": totals["loss"] / max(1.0, totals["targets"])}
        if ranked := _match_ranks(outputs, split):
            metrics |= ranking_metrics(ranked)
        expected = read_scores(split.numbers()[: len(outputs)])
        scored = ~np.isnan(expected)
        if scored.sum() > 1:
            metrics["correlation"] = spearman(outputs[scored, 0], expected[scored])
        return metrics

    def details(self, outputs: np.ndarray, split: StoreSplit) -> dict[str, Any]:
        firsts = [int(ranked[0]) for ranked in _match_ranks(outputs, split)]
        if not firsts:
            return {}
        counts = [firsts.count(rank) for rank in range(1, _MAX_LISTED + 1)]
        table = [{"rank": str(rank), "queries": count} for rank, count in enumerate(counts, 1)]
        table.append({"rank": f"over {_MAX_LISTED}", "queries": len(firsts) - sum(counts)})
        return {"tables": {"Rank of the first document that matches": table}}

    def run_task(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return {"score": probability of a match} for each (query, document).

        Long documents are cut, as in training. Raise InputError for a query that is too long.
        """
        texts = [text for pair in inputs for text in pair]
        if not all(isinstance(text, str) for text in texts):
            fix = "use two texts; conversations are for models of objective reward"
            raise InputError.at("query", "is a conversation, but a reranker reads a query and a document", fix)
        encoded = list(self.tokenizer.encode(texts)) if texts else []
        queries, documents = encoded[::2], encoded[1::2]
        max_tokens = self._writer.max_query_tokens
        for query in queries:
            if len(query) > max_tokens:
                raise InputError.at("query", f"has {len(query):,} tokens, more than {max_tokens:,}", "shorten it")
        rows = [self._writer.row(query, document) for query, document in zip(queries, documents, strict=True)]
        ids, types = [ids for ids, _ in rows], [types for _, types in rows]
        logits = predict_logits(model, ids, self.tokenizer.pad_id, types if self._writer.has_types else None)
        return [{"score": float(score)} for score in sigmoid(logits[:, 0])]

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        """Return the score of the document `context` for the query."""
        (answer,) = self.run_task(model, "score", [(prompt, context)])
        return Reply([f"{answer['score']:.4f}"], to_json={"query": prompt, "document": context, **answer})


class _SplitSamples(UnpackedSamples):
    """The samples of a split. Their last number identifies the split, from which negatives are drawn."""

    def __init__(self, split: StoreSplit, split_index: int) -> None:
        super().__init__(split)
        self._split_index = split_index

    def read(self, index: int) -> Sample:
        sample = super().read(index)
        return replace(sample, numbers=(*sample.numbers, self._split_index))


def _match_ranks(outputs: np.ndarray, split: StoreSplit) -> list[np.ndarray]:
    """Return the ranks of each query's matching documents, among them and the other documents of its first sample."""
    numbers = split.numbers()[: len(outputs)]
    samples = np.flatnonzero(numbers[:, HAS_SCORE] == 0)
    queries, owners = np.unique(numbers[samples, QUERY], return_inverse=True)
    ranked = []
    for query_index in range(len(queries)):
        scores = outputs[samples[owners == query_index]]
        is_match = np.zeros(scores.shape, dtype=bool)
        is_match[:, 0] = True
        present = ~np.isnan(scores)
        present[1:, 1:] = False
        ranked.append(ranks(scores[present], is_match[present]))
    return ranked


_RANKING_DEPTH = 10


def ranks(scores: np.ndarray, is_match: np.ndarray) -> np.ndarray:
    """Return the ranks of matching documents, from 1, ascending. Among equal scores, they rank last.

    `scores`: float (documents,). `is_match`: bool (documents,).
    """
    order = np.lexsort((is_match, -scores))
    return np.flatnonzero(is_match[order]) + 1


def ndcg(ranked: np.ndarray) -> float:
    """Return nDCG at 10 of `ranks`, with binary relevance (Järvelin and Kekäläinen 2002)."""
    gain = (1 / np.log2(ranked[ranked <= _RANKING_DEPTH] + 1)).sum()
    ideal_gain = (1 / np.log2(np.arange(1, min(len(ranked), _RANKING_DEPTH) + 1) + 1)).sum()
    return float(gain / ideal_gain)


def ranking_metrics(all_ranks: list[np.ndarray]) -> dict[str, float]:
    """Return means over queries, given the `ranks` of each query.

    `mrr` of the first match, `ndcg` at 10, and `accuracy`, the fraction of queries whose first document matches.
    """
    first_ranks = np.array([ranked[0] for ranked in all_ranks])
    return {
        "mrr": float((1 / first_ranks).mean()),
        "ndcg": float(np.mean([ndcg(ranked) for ranked in all_ranks])),
        "accuracy": float((first_ranks == 1).mean()),
    }
