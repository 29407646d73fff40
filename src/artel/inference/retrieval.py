"""Retrieval with an embedding model or a reranker: search a text, mine hard negatives, evaluate on a corpus.

Hard negatives are documents near a query that are less similar to it than its positives. A document that is as similar
as a positive may well answer the query without being labeled (Moreira et al. 2024, "NV-Retriever", positive-aware
mining).

A corpus (`artel evaluate --corpus`) is a file of texts next to matches, or a folder in the format of BEIR (Thakur et
al. 2021, "BEIR: A Heterogenous Benchmark for Zero-shot Evaluation of Information Retrieval Models"): corpus.jsonl,
queries.jsonl, qrels/test.tsv.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from artel.config import DataConfig
from artel.errors import InputError, Problem
from artel.inference.evaluate import EvaluationResult
from artel.inference.open import OpenedModel
from artel.messages import logger, silence_messages
from artel.objectives.embedding.retrieval import Judgements, retrieval_metrics
from artel.storage import check_new_file, write_output
from artel.text import Document, Ledger, Match, count_drops, read_documents
from artel.training.evaluation import ProgressMessages

_PROGRESS_TEXTS = 1024
"""Texts embedded between two progress messages."""
_MINING_MARGIN = 0.05
"""Minimum difference between the cosine of a query's farthest positive and that of a mined negative."""


def check_can_embed(opened: OpenedModel) -> None:
    """Raise InputError if the model does not embed texts."""
    if "embed" not in opened.decoding.tasks:
        message = f"learned {opened.objective.config.objective}, which does not embed texts"
        raise InputError.at(opened.name, message, "use a model of objective embedding, or of sentence-transformers")


def _read_matches_and_corpus(
    data: str, corpus: str | None
) -> tuple[dict[str, tuple[list[str], list[str]]], list[str], int]:
    """Return ({query: (positives, negatives)}, documents, rejected records) of a file or glob of matches.

    The documents of the matches come first, then the texts of `corpus`. Logs the documents that were dropped.
    """
    data_ledger, corpus_ledger = Ledger(), Ledger()
    matches = _read_merged_matches(data, data_ledger)
    texts = dict.fromkeys(text for positives, negatives in matches.values() for text in [*positives, *negatives])
    if corpus is not None:
        corpus_documents = _read_source({"path": corpus, "document": "line"}, corpus_ledger)
        texts |= dict.fromkeys(document.record.text for document in corpus_documents)
    for path, ledger in ((data, data_ledger), (corpus, corpus_ledger)):
        counts = ledger.total
        if counts.dropped:
            drops = count_drops(counts.dropped)
            logger.info("%s: %s documents read, %s kept, %s", path, f"{counts.read:,}", f"{counts.kept:,}", drops)
        for rejected in ledger.rejected_records:  # the first 1,000
            logger.info("%s: %s", rejected.origin, rejected.detail)
    return matches, list(texts), data_ledger.num_rejected + corpus_ledger.num_rejected


def _read_merged_matches(data: str, ledger: Ledger) -> dict[str, tuple[list[str], list[str]]]:
    """Return {query: (positives, negatives)}, with all matches of a query merged."""
    merged: dict[str, tuple[list[str], list[str]]] = {}
    for document in _read_source({"path": data, "format": "matches"}, ledger):
        match = document.record.fields
        assert isinstance(match, Match)
        if match.score is not None:
            message = "is a pair with a score, which does not say which documents answer a query"
            raise InputError.at(document.record.origin, message, "use queries with matching texts")
        positives, negatives = merged.setdefault(match.query, ([], []))
        positives += [text for text in match.positives if text not in positives]
        negatives += [text for text in match.negatives if text not in negatives]
    return merged


def _read_source(source: dict[str, Any], ledger: Ledger) -> Iterator[Document]:
    data = DataConfig.model_validate({"sources": [source], "validation": 0.0})
    return read_documents(data, ledger)


def embed_normalized(opened: OpenedModel, texts: Sequence[str], input_type: str) -> np.ndarray:
    """Return normalized vectors, float32 (texts, size)."""
    batches = []
    for start in range(0, len(texts), _PROGRESS_TEXTS):
        inputs = [{"text": text, "input_type": input_type} for text in texts[start : start + _PROGRESS_TEXTS]]
        answers = opened.decoding.run_task(opened.model, "embed", inputs)
        batches.append(np.array([answer["embedding"] for answer in answers], dtype=np.float32))
        logger.info(
            "%s of %s %s texts embedded", f"{min(start + _PROGRESS_TEXTS, len(texts)):,}", f"{len(texts):,}", input_type
        )
    vectors = np.concatenate(batches)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


# Search


_PROGRESS_PAIRS = 64  # pairs scored by a reranker between two progress messages


@dataclass(frozen=True, slots=True)
class Hit:
    """A paragraph of the searched text."""

    line: int
    """Number of its first line, from 1."""
    text: str
    score: float
    """Cosine of query and paragraph (embedder), or the probability that they match (reranker)."""


def can_search(opened: OpenedModel) -> bool:
    """True if the model ranks texts by a query."""
    return not {"embed", "rerank"}.isdisjoint(opened.decoding.tasks)


def search(opened: OpenedModel, query: str, text: str) -> list[Hit]:
    """Rank the paragraphs of `text` by how well they match `query`, best first.

    Raise InputError if the query is empty or the text has no words.
    """
    if not query.strip():
        raise InputError.at("--prompt", "is empty", 'use --prompt "WHAT TO LOOK FOR"')
    numbered_paragraphs = list(paragraphs(text))
    if not numbered_paragraphs:
        raise InputError.at("--context", "the text to search has no words", "use another text or file")
    texts = [text for _, text in numbered_paragraphs]
    if "embed" in opened.decoding.tasks:
        with silence_messages():
            (vector,) = embed_normalized(opened, [query], "query")
        scores = (embed_normalized(opened, texts, "document") @ vector).tolist()
    else:
        scores = _score_pairs(opened, query, texts)
    hits = [Hit(line, text, score) for (line, text), score in zip(numbered_paragraphs, scores, strict=True)]
    return sorted(hits, key=lambda hit: -hit.score)  # equal scores stay in the order of the text


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, paragraph). Without blank lines, each line is a paragraph."""
    separator = r"\n[ \t]*\n" if re.search(r"\S[ \t]*\n[ \t]*\n\s*\S", text) else r"\n"
    line_number, start = 1, 0
    for end, next_start in [*(match.span() for match in re.finditer(separator, text)), (len(text), len(text))]:
        paragraph = text[start:end]
        if paragraph.strip():
            blank_length = len(paragraph) - len(paragraph.lstrip())
            yield line_number + paragraph.count("\n", 0, blank_length), paragraph.strip()
        line_number += text.count("\n", start, next_start)
        start = next_start


def _score_pairs(opened: OpenedModel, query: str, texts: list[str]) -> list[float]:
    progress = ProgressMessages("scoring paragraphs:")
    scores: list[float] = []
    for start in range(0, len(texts), _PROGRESS_PAIRS):
        pairs = [(query, text) for text in texts[start : start + _PROGRESS_PAIRS]]
        scores += [answer["score"] for answer in opened.decoding.run_task(opened.model, "rerank", pairs)]
        progress(len(scores) / len(texts))
    return scores


# Hard negatives


_MAX_COSINES = 1 << 24
"""Cosines in memory at a time."""


@dataclass(frozen=True, slots=True)
class MiningCounts:
    """Counts of a file of mined negatives."""

    queries: int
    documents: int
    """Documents of data and corpus together."""
    negatives: int
    without: int
    """Number of queries without a negative."""
    rejected: int
    """Unusable records of data and corpus."""


def mine(opened: OpenedModel, data: str, out: Path, *, negatives: int, corpus: str | None = None) -> MiningCounts:
    """Add negatives from among all documents to the matches of `data`, and write them as JSON lines (format `matches`).

    Args:
        opened: an embedding model.
        data: a file or glob of matches.
        out: the file to write.
        negatives: maximum number of negatives per query, nearest first.
        corpus: a file or glob of further documents, one per line, or JSON lines.

    Raise InputError if the model, the data or the output file is unsuitable.
    """
    check_can_embed(opened)
    check_new_file(out)
    matches, documents, rejected = _read_matches_and_corpus(data, corpus)
    indices = {text: index for index, text in enumerate(documents)}
    corpus_vectors = embed_normalized(opened, documents, "document")
    query_vectors = embed_normalized(opened, list(matches), "query")
    lines = []
    negative_count = queries_without_negatives = 0
    chunk_size = max(1, _MAX_COSINES // len(documents))
    for query_index, (query, (positives, known_negatives)) in enumerate(matches.items()):
        if query_index % chunk_size == 0:
            cosines = query_vectors[query_index : query_index + chunk_size] @ corpus_vectors.T
        row = cosines[query_index % chunk_size]
        answers = [indices[text] for text in positives]
        limit = row[answers].min() - _MINING_MARGIN
        row[answers] = -np.inf
        row[[indices[text] for text in (query, *known_negatives) if text in indices]] = -np.inf
        nearest = np.argsort(-np.where(row <= limit, row, -np.inf), kind="stable")[:negatives]
        mined = [documents[index] for index in nearest if -np.inf < row[index] <= limit]
        negative_count += len(mined)
        queries_without_negatives += not mined
        lines.append(orjson.dumps({"query": query, "pos": positives, "neg": [*known_negatives, *mined]}))
    write_output(out, b"\n".join(lines) + b"\n")
    return MiningCounts(len(matches), len(documents), negative_count, queries_without_negatives, rejected)


# Evaluation on a corpus


_SPLITS = ("test", "dev", "validation", "train")
_MAX_PROBLEMS = 20  # problems reported for a folder


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents, and queries with judged documents."""

    documents: list[str]
    queries: list[str]
    judged: list[Judgements]
    """Per query: {index of a document: relevance, above 0}. Indices beyond the documents stand for missing
    documents, which are never found."""
    self_documents: dict[int, int]
    """{query index: index of the document that is the query itself, which the query does not search}."""


def evaluate_on_corpus(opened: OpenedModel, corpus: str, data: str | None) -> EvaluationResult:
    """Compute recall, MRR and nDCG of an embedding model, with the queries of `data` or of a folder in BEIR's format.

    All documents of `corpus` are searched. Raise InputError if the model or the corpus is unsuitable.
    """
    check_can_embed(opened)
    is_folder = Path(corpus).is_dir()
    if is_folder and data is not None:
        message = f"{corpus} is a folder in BEIR's format, which has its own queries"
        raise InputError.at("--data", message, "remove it, or use a file of texts as --corpus")
    loaded = read_beir(Path(corpus)) if is_folder else _read_corpus_of_matches(corpus, data)
    started = time.monotonic()
    documents = embed_normalized(opened, loaded.documents, "document")
    queries = embed_normalized(opened, loaded.queries, "query")
    metrics = retrieval_metrics(queries, documents, loaded.judged, loaded.self_documents)
    seconds = time.monotonic() - started
    objective = opened.objective.config.objective
    return EvaluationResult(opened.name, objective, metrics, len(loaded.queries), len(loaded.documents), None, seconds)


def _read_corpus_of_matches(corpus: str, data: str | None) -> Corpus:
    """Return the queries of `data`, with its documents and the texts of the file or glob `corpus`."""
    if data is None:
        fix = "add --data FILE with matches, whose queries are used; or give a folder in BEIR's format"
        raise InputError.at("--corpus", f"{corpus} has texts, but no queries", fix)
    matches, documents, _ = _read_matches_and_corpus(data, corpus)
    indices = {text: index for index, text in enumerate(documents)}
    judged = [dict.fromkeys((indices[text] for text in positives), 1.0) for positives, _ in matches.values()]
    self_documents = {
        query_index: indices[query]
        for query_index, query in enumerate(matches)
        if query in indices and indices[query] not in judged[query_index]
    }
    return Corpus(documents, list(matches), judged, self_documents)


def read_beir(folder: Path) -> Corpus:
    """Read a folder in BEIR's format, with the judgements of test, or else dev, validation or train.

    A document is its title and text; empty documents are skipped. As in BEIR, queries without a relevant document are
    skipped, and a query does not search the document with its own id. Raise InputError with the first 20 wrong lines.
    """
    file = next((file for name in _SPLITS if (file := folder / "qrels" / f"{name}.tsv").is_file()), None)
    missing = [name for name in ("corpus.jsonl", "queries.jsonl") if not (folder / name).is_file()]
    if file is None:
        missing.append("qrels/test.tsv")
    if missing or file is None:
        fix = "a folder in BEIR's format has corpus.jsonl, queries.jsonl and qrels/test.tsv"
        raise InputError.at(str(folder), f"has no {', '.join(missing)}", fix)
    problems: list[Problem] = []
    texts = dict(_read_texts(folder / "corpus.jsonl", ("title", "text"), problems))
    documents = {name: text for name, text in texts.items() if text}
    queries = {name: text for name, text in _read_texts(folder / "queries.jsonl", ("text",), problems) if text}
    judgements = list(_read_judgements(file, queries, problems))
    if not documents and not problems:
        problems.append(Problem(str(folder / "corpus.jsonl"), "has no document with words", "add documents with text"))
    if problems:
        raise InputError(problems[:_MAX_PROBLEMS])
    if num_empty := len(texts) - len(documents):
        logger.info("%s: %s documents without words are skipped", folder / "corpus.jsonl", f"{num_empty:,}")
    indices = {name: index for index, name in enumerate(documents)}
    by_query: dict[str, Judgements] = {}
    for query, document, score in judgements:
        if score > 0:
            index = indices.setdefault(document, len(indices))
            by_query.setdefault(query, {})[index] = score
    if not by_query:
        raise InputError.at(str(file), "marks no document as relevant to a query", "use scores above 0")
    if num_missing := len(indices) - len(documents):
        logger.info(
            "%s: %s relevant documents are not in corpus.jsonl, so they are never found", file, f"{num_missing:,}"
        )
    self_documents = {index: indices[name] for index, name in enumerate(by_query) if name in documents}
    return Corpus(
        list(documents.values()), [queries[name] for name in by_query], list(by_query.values()), self_documents
    )


def _read_texts(file: Path, names: tuple[str, ...], problems: list[Problem]) -> Iterator[tuple[str, str]]:
    """Yield (id, text) of each line; the text joins the fields of these names."""
    for location, line in _iterate_lines(file):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            problems.append(Problem(location, f"is not JSON: {error}", "fix the line"))
            continue
        fields = [row.get(name) or "" for name in names] if isinstance(row, dict) else []
        name = row.get("_id") if isinstance(row, dict) else None
        if not isinstance(name, str) or not all(isinstance(field, str) for field in fields) or "text" not in row:
            problems.append(
                Problem(location, "has no `_id` and `text` that are strings", 'write {"_id": …, "text": …}')
            )
            continue
        yield name, " ".join(filter(None, fields)).strip()


def _read_judgements(file: Path, queries: dict[str, Any], problems: list[Problem]) -> Iterator[tuple[str, str, float]]:
    """Yield (query, document, score) of each line except the heading."""
    for index, (location, line) in enumerate(_iterate_lines(file)):
        columns = line.rstrip("\n").split("\t")
        try:
            query, document, score = columns[0], columns[1], float(columns[2])
        except (IndexError, ValueError):
            if index:  # the first line is a heading
                problems.append(Problem(location, "is not a judgement", "write QUERY, DOCUMENT and SCORE between tabs"))
            continue
        if query not in queries:
            problems.append(
                Problem(location, f"there is no query {query!r} in queries.jsonl", "fix or remove the line")
            )
            continue
        yield query, document, score


def _iterate_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (file:line, line) of each line that is not empty."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line_number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{file}:{line_number}", line
