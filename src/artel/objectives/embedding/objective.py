"""The objective: texts that match get vectors that are near one another.

The loss of in-batch negatives looks at all vectors of a global batch (`needs_global_outputs`), so a batch of a thousand
is one of a thousand however it is cut into micro-batches and spread over processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models.targets import IGNORED
from artel.models.text_vectors import pools_texts
from artel.objectives.base import Better, Objective
from artel.objectives.batch import Batch, DocumentSamples
from artel.objectives.embedding.folder import folder_files, read_folder
from artel.objectives.embedding.losses import KEYS, MatchKeys, Texts, loss_sum, match_keys
from artel.objectives.embedding.matches import (
    DOCUMENT,
    NEGATIVE,
    PADDING,
    POSITIVE,
    QUERY,
    ROLE,
    SCORE,
    MatchReader,
    choose,
    text_hash,
)
from artel.objectives.embedding.retrieval import DEPTH, retrieval_figures, unit
from artel.objectives.embedding.rows import keeps_texts_apart, packed_rows, padded_rows, sees_before_alone, vectors
from artel.objectives.embedding.validated import ValidatedTexts
from artel.objectives.replies import Reading, Reply
from artel.objectives.statistics import spearman
from artel.objectives.usage import in_python
from artel.text import Document, Rejected
from artel.tokens import Rows, Samples, StoreSplit, Tokenizer, WholeSamples

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.models.generate import Sampling

_QUERIES, _DOCUMENTS = "query_", ""
"""What the names of tensors begin with: of rows of queries, and of rows of documents, or of all where they share."""
_EXAMPLE = "Where is Anna?"
_AT_ONCE = 8192
"""Tokens of a forward pass, padding counted, where vectors are all that is wanted."""
_NAMES = {QUERY: "query", POSITIVE: "positive", NEGATIVE: "negative"}


class Embedding(Objective):
    auto_class = "AutoModel"
    learns_from = ("matches",)
    verb = "embed"
    does = "turns texts into vectors, near one another where the texts match"
    pipeline_tag = "sentence-similarity"
    finetuning_rate = 2e-5
    section = "embedding"
    continues = False
    encoder = True
    sums = ("loss", "targets")
    document_number = DOCUMENT
    tasks = ("embed",)
    needs_global_outputs = True
    better: ClassVar[dict[str, Better]] = {
        "loss": "lower",
        "recall_at_1": "higher",
        "recall_at_5": "higher",
        f"recall_at_{DEPTH}": "higher",
        f"mrr_at_{DEPTH}": "higher",
        f"ndcg_at_{DEPTH}": "higher",
        "spearman": "higher",
    }

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(run, tokenizer)
        self._config = run.embedding
        self._reader = MatchReader(tokenizer, run.embedding, run.data.block)
        self._packs = False
        self._causal = False
        self.needs_global_outputs = run.embedding.loss in ("in_batch_negatives", "cosent")

    @classmethod
    def problems(cls, run: RunConfig) -> list[Problem]:
        problems, config = super().problems(run), run.embedding
        if config.symmetric and config.loss != "in_batch_negatives":
            problems.append(Problem("embedding.symmetric", f"has no meaning for loss {config.loss}", "leave it out"))
        if config.loss == "in_batch_negatives" and run.train.batch == 1:
            what = "1: no other query's document is in the batch to tell the right one from"
            problems.append(Problem("train.batch", what, "write 32 or more"))
        if config.loss == "triplet" and config.negatives == 0:
            what = "0: a triplet is a query, what matches it, and what does not"
            problems.append(Problem("embedding.negatives", what, "write 1 or more"))
        if run.validate_.prompts:
            what = "a vector shows nothing to a reader"
            problems.append(Problem("validate.prompts", what, "leave them out; validation says what is found"))
        if run.model.from_ is not None and pools_texts(run.model.from_):
            pooling = read_folder(run.model.from_)["embedding"]["pooling"]
            if pooling != config.pooling:
                what = f"{config.pooling}, and {run.model.from_} was trained with {pooling}"
                problems.append(Problem("embedding.pooling", what, f"write pooling: {pooling}"))
        return problems

    @classmethod
    def claims(cls, architecture: str, folder: str) -> bool:
        """A model without a head, or one that sentence-transformers saved, whatever its head."""
        bare = architecture.endswith("Model") and not architecture.endswith("HeadModel")
        return bare or pools_texts(folder)

    @classmethod
    def run_values(cls, config: PreTrainedConfig, folder: str) -> dict[str, Any]:
        return read_folder(folder) if pools_texts(folder) else {}

    @classmethod
    def store_settings(cls, run: RunConfig) -> Any:
        config = run.embedding
        return [run.data.block, config.prompts.model_dump(), config.loss, config.largest_score]

    def check(self, model: PreTrainedModel) -> None:
        """Texts share rows from now on, if the model keeps them apart."""
        size = model.config.get_text_config().hidden_size
        beyond = [dimension for dimension in self._config.matryoshka if dimension > size]
        if beyond:
            what = f"{beyond[0]} is more than the {size} numbers of a vector of this model"
            raise InputError.at("embedding.matryoshka", what, f"write {size} or less")
        self.outputs = tuple(map(str, range(size)))
        self._causal = sees_before_alone(model)
        self._packs = keeps_texts_apart(model, causal=self._causal)

    # record -> samples

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected]:
        return self._reader.samples(documents)

    def dataset(self, part: StoreSplit) -> WholeSamples:
        return WholeSamples(part)

    # samples -> batch -> loss

    def batch(self, rows: Rows) -> Batch:
        """What `packed_rows` gives of all texts, or `padded_rows` of the documents and of the queries (`query_…`); and
        `keys` (texts, len(KEYS)): queries, then positives, then negatives, in the order of their matches; then those of
        the positives that are not in the batch.
        """
        import torch

        valid = np.flatnonzero(rows.valid)
        keep = valid if len(valid) else [0]  # a rank whose share is over still has something to compute
        if rows.numbers[0, ROLE]:
            texts, keys = self._single_texts(rows, keep)
            queries: list[np.ndarray] = []
        else:
            queries, texts, keys = self._matches(rows, keep)
        if not len(valid):
            keys[:, 0] = PADDING
        if self._packs:
            tensors = packed_rows([*queries, *texts])
        else:
            tensors = padded_rows(texts, self.run.data.block)
            if queries:
                tensors |= {
                    f"{_QUERIES}{name}": tensor for name, tensor in padded_rows(queries, self.run.data.block).items()
                }
        tensors["keys"] = torch.from_numpy(keys)
        tokens = sum(map(len, [*queries, *texts])) if len(valid) else 0
        return Batch(tensors, targets=len(valid), tokens=tokens)

    def _single_texts(self, rows: Rows, keep: Sequence[int] | np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """The texts of validation, each a row of its own, and their keys, of which no loss is made."""
        texts = [rows.ids[row, : rows.lengths[row]] for row in keep]
        return texts, np.zeros((len(texts), len(KEYS)), dtype=np.int64)

    def _matches(
        self, rows: Rows, keep: Sequence[int] | np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
        """(queries, documents, keys) of the matches in `keep`."""
        assert rows.flags is not None
        chosen = []
        for row in keep:
            length = rows.lengths[row]
            key = f"match:{self.run.seed}:{rows.epochs[row]}:{rows.indices[row]}"
            chosen.append(choose(rows.ids[row, :length], rows.flags[row, :length], self._most_negatives, key))
        keys = match_keys(
            [
                MatchKeys(
                    text_hash(match.query),
                    text_hash(match.positive),
                    list(map(text_hash, match.negatives)),
                    list(map(text_hash, match.other_positives)),
                    int(rows.numbers[row, SCORE]),
                )
                for row, match in zip(keep, chosen, strict=True)
            ]
        )
        documents = [match.positive for match in chosen] + [text for match in chosen for text in match.negatives]
        return [match.query for match in chosen], documents, keys

    @property
    def _most_negatives(self) -> int:
        return 0 if self._config.loss in ("cosine", "cosent") else self._config.negatives

    def readings(self, rows: Rows) -> list[Reading]:
        """Every text of the first row. Nothing is predicted."""
        ids = rows.ids[0, : rows.lengths[0]]
        if rows.flags is None or rows.numbers[0, ROLE]:
            return [Reading(ids, np.full(len(ids), IGNORED), _NAMES[int(rows.numbers[0, ROLE])])]
        starts = np.flatnonzero(rows.flags[0, : rows.lengths[0]])
        roles = rows.flags[0, starts]
        texts = np.split(ids, starts[1:])
        return [
            Reading(text, np.full(len(text), IGNORED), _NAMES[int(role)])
            for text, role in zip(texts, roles, strict=True)
        ]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """A target is a query: the loss of one, among the texts of this batch alone."""
        outputs = self.batch_outputs(model, batch)
        return self.global_loss(outputs, batch.tensors["keys"], slice(None))

    def batch_outputs(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        import torch

        pooling, causal = self._config.pooling, self._causal
        documents = vectors(model, batch.tensors, pooling, causal=causal)
        if f"{_QUERIES}input_ids" not in batch.tensors:
            return documents
        rows = {
            name.removeprefix(_QUERIES): tensor for name, tensor in batch.tensors.items() if name.startswith(_QUERIES)
        }
        return torch.cat([vectors(model, rows, pooling, causal=causal), documents])

    def output_keys(self, batch: Batch) -> torch.Tensor:
        return batch.tensors["keys"]

    def global_loss(self, outputs: torch.Tensor, keys: torch.Tensor, part: slice) -> torch.Tensor:
        import torch

        texts = Texts.of(outputs, keys)
        loss = loss_sum(texts, self._config, part)
        return torch.stack([loss, loss.new_tensor(float(len(texts.places(QUERY, part=part))))])

    def evaluate_batch(self, model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The vector of each text; what they say is found when all are there (`metrics`)."""

        outputs = self._finished(vectors(model, batch.tensors, self._config.pooling, causal=self._causal))
        return outputs.new_tensor([0.0, float(batch.targets)]), outputs

    def _finished(self, outputs: torch.Tensor) -> torch.Tensor:
        """Vectors as the model's user gets them."""
        import torch

        return torch.nn.functional.normalize(outputs, dim=1) if self._config.normalize else outputs

    # figures

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, part: StoreSplit) -> dict[str, float]:
        """`loss`: of in-batch negatives, among the matches of as many as `train.batch` at a time, in their order.

        The figures are those of looking up the split's queries among all its documents, or, of scored pairs, of the
        order of their cosines.
        """
        found = ValidatedTexts.of(outputs, part)
        return {"loss": self._loss_of(found)} | self._figures(found, found.vectors)

    def details(self, outputs: np.ndarray, part: StoreSplit) -> dict[str, Any]:
        """The size of the corpus, and the figures of shorter vectors (`embedding.matryoshka`)."""
        found = ValidatedTexts.of(outputs, part)
        sizes = [size for size in self._config.matryoshka if size < outputs.shape[1]]
        shorter = [{"dimensions": str(size), **self._figures(found, found.vectors[:, :size])} for size in sizes]
        counts = {"queries": int((found.roles == QUERY).sum()), "documents": len(found.documents)}
        return {"tables": {"Corpus": [counts], **({"Shorter vectors": shorter} if shorter else {})}}

    def _figures(self, found: ValidatedTexts, outputs: np.ndarray) -> dict[str, float]:
        if not len(outputs):
            return {}
        directions = unit(outputs)
        if self._config.loss in ("cosine", "cosent"):
            pairs = [(match[0], match[1]) for match in found.matches]
            cosines = np.array([directions[query] @ directions[document] for query, document in pairs])
            return {"spearman": spearman(cosines, np.array([found.scores[query] for query, _ in pairs]))}
        queries, relevant, left_out = found.questions()
        return retrieval_figures(directions[queries], directions[found.documents], relevant, left_out)

    def _loss_of(self, found: ValidatedTexts) -> float:
        import torch

        total, batch = 0.0, self.run.train.batch
        for start in range(0, len(found.matches), batch):
            matches = [self._kept(found, match) for match in found.matches[start : start + batch]]
            keys = match_keys([keys for keys, _ in matches])
            order = [texts[0] for _, texts in matches] + [texts[1] for _, texts in matches]
            order += [text for _, texts in matches for text in texts[2:]]
            outputs = torch.from_numpy(found.vectors[order])
            with torch.no_grad():
                total += float(self.global_loss(outputs, torch.from_numpy(keys), slice(None))[0])
        return total / max(1, len(found.matches))

    def _kept(self, found: ValidatedTexts, match: list[int]) -> tuple[MatchKeys, list[int]]:
        """The keys of a match, and the places of its query, its first positive and its first negatives."""
        hashes, roles = found.hashes, found.roles
        positives = [text for text in match if roles[text] == POSITIVE]
        negatives = [text for text in match if roles[text] == NEGATIVE][: self._most_negatives]
        others = [int(hashes[text]) for text in positives[1:]]
        keys = MatchKeys(
            int(hashes[match[0]]),
            int(hashes[positives[0]]),
            [int(hashes[text]) for text in negatives],
            others,
            int(found.scores[match[0]]),
        )
        return keys, [match[0], positives[0], *negatives]

    # use

    def embed(
        self,
        model: PreTrainedModel,
        texts: Sequence[str],
        *,
        kind: str = "",
        dimensions: int | None = None,
    ) -> np.ndarray:
        """float32 (texts, size): the vector of each text. The end of a text of over `data.block` tokens is not read.

        `kind`: query or document, for the prompt of each; none when empty. `dimensions`: the first so many numbers of
        each vector. Raises InputError.
        """
        return self.embed_ids(model, [row for row, _ in self._rows(texts, kind)], dimensions=dimensions)

    def _rows(self, texts: Sequence[Any], kind: str) -> list[tuple[np.ndarray, bool]]:
        """Each text as the model reads it, int64 (tokens,), and whether it was cut. Raises InputError."""
        encoded = iter(self._encoded([text for text in texts if isinstance(text, str)], kind))
        rows: list[tuple[np.ndarray, bool]] = []
        for text in texts:
            if isinstance(text, str):
                ids = next(encoded)
                row = self._reader.framed(ids)
                rows.append((row, len(row) < len(ids) + self._reader.frame.size))
            else:
                block = self.run.data.block
                rows.append((np.array(text[:block], dtype=np.int64), len(text) > block))
        return rows

    def _encoded(self, texts: Sequence[str], kind: str) -> list[np.ndarray]:
        """The ids of each text behind the prompt of its kind, without special tokens, int64. Raises InputError."""
        prompts = self._config.prompts
        prompt = {"query": prompts.query, "document": prompts.document, "": ""}.get(kind)
        if prompt is None:
            raise InputError.at(
                "input_type", f"{kind!r} is no kind of text", "write query or document, or leave it out"
            )
        encoded = list(self.tokenizer.encode([prompt + text for text in texts]))
        for number, ids in enumerate(encoded):
            if not len(ids):
                raise InputError.at("input", f"text {number} has no token", "give a text with words in it")
        return encoded

    def embed_ids(
        self, model: PreTrainedModel, rows: Sequence[np.ndarray], *, dimensions: int | None = None
    ) -> np.ndarray:
        """`embed`, of texts as ids, each int64 (tokens,) with its special tokens. Raises InputError."""
        import torch

        size = model.config.get_text_config().hidden_size
        if dimensions is not None and not 0 < dimensions <= size:
            what = f"a vector has {size} numbers, and {dimensions} are asked for"
            raise InputError.at("dimensions", what, f"write a number from 1 to {size}")
        result = np.empty((len(rows), dimensions or size), dtype=np.float32)
        was_training = model.training
        model.eval()
        try:
            for places in _by_length(rows):
                tensors = {
                    name: tensor.to(model.device)
                    for name, tensor in padded_rows([rows[place] for place in places], self.run.data.block).items()
                }
                with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                    outputs = vectors(model, tensors, self._config.pooling)[:, :dimensions]
                result[places] = self._finished(outputs).cpu().numpy()
        finally:
            model.train(was_training)
        return result

    def answers(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """Of a text, or of {"text", "input_type", "dimensions"}: {"embedding", "tokens", "truncated"}.

        A text may be given as ids, with its special tokens.
        """
        asked: list[dict[str, Any]] = [each if isinstance(each, dict) else {"text": each} for each in inputs]
        result = []
        for (kind, dimensions), alike in groupby(asked, lambda each: (each.get("input_type"), each.get("dimensions"))):
            rows = self._rows([each["text"] for each in alike], kind or "")
            found = self.embed_ids(model, [row for row, _ in rows], dimensions=dimensions)
            result += [
                {"embedding": vector.tolist(), "tokens": len(row), "truncated": is_cut}
                for vector, (row, is_cut) in zip(found, rows, strict=True)
            ]
        return result

    def show(self, model: PreTrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
        (vector,) = self.embed(model, [prompt])
        yield f"[{', '.join(f'{number:.4f}' for number in vector[:8])}, …]"

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        (vector,) = self.embed(model, [prompt])
        shown = f"[{', '.join(f'{number:.4f}' for number in vector[:8])}, …]"
        notes = (f"the first 8 of {len(vector)} numbers; all of them with --json",)
        return Reply([shown], notes, {"prompt": prompt, "embedding": vector.tolist()})

    def model_files(self, model: PreTrainedModel) -> dict[str, bytes]:
        from artel.models.loading.structure import position_limit

        block = min(self.run.data.block, position_limit(model) or self.run.data.block)
        return folder_files(self._config, model.config.get_text_config().hidden_size, block)

    def command(self, run: str, samples: Samples | None) -> str:
        return f'artel generate {run} --prompt "{_EXAMPLE}" --json'

    def usage(self) -> str:
        query, document = self._config.prompts.query, self._config.prompts.document
        texts = [query + _EXAMPLE, document + "Anna is in the forest."]
        pooled = {
            "mean": "vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
            "cls": "vectors = states[:, 0]",
            "last": "vectors = states[torch.arange(len(states)), mask.sum(1) - 1]",
        }[self._config.pooling]
        return "\n".join(
            [
                f"texts = [{', '.join(map(in_python, texts))}]",
                'inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")',
                "with torch.no_grad():",
                "    states = model(**inputs).last_hidden_state",
                'mask = inputs["attention_mask"]',
                pooled,
                "vectors = torch.nn.functional.normalize(vectors, dim=1)",
                "print((vectors[0] @ vectors[1]).item())  # the cosine",
            ]
        )


def _by_length(rows: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """The places of texts of like length, so many together that they are `_AT_ONCE` tokens with their padding."""
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
    start = 0
    while start < len(order):
        count = max(1, _AT_ONCE // len(rows[order[start]]))
        yield order[start : start + count]
        start += count
