"""`artel evaluate --corpus`: whether queries find their documents among all those of a corpus.

A corpus is a file of texts beside matches, or a folder in the format of BEIR (Thakur et al. 2021, "BEIR: A Heterogenous
Benchmark for Zero-shot Evaluation of Information Retrieval Models"): corpus.jsonl, queries.jsonl, qrels/test.tsv.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from artel.errors import InputError, Problem
from artel.inference.evaluate import EvaluationResult
from artel.inference.match_files import check_embeds, corpus_texts, merged_matches, tell_dropped, unit_vectors
from artel.inference.open import OpenedModel
from artel.objectives.embedding.retrieval import Judgements, retrieval_metrics
from artel.text import Ledger

Tell = Callable[[str], None]
_SPLITS = ("test", "dev", "validation", "train")
_SHOWN = 20  # problems of a folder


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents, and queries of which it is known what answers them."""

    documents: list[str]
    queries: list[str]
    judged: list[Judgements]
    """Of each query: place of a document -> how well it answers, above 0. Places beyond the documents are of documents
    that are judged and not there: they are never found."""
    own: dict[int, int]
    """query -> the document that is its own text, and is not looked for."""


def evaluate_on_corpus(opened: OpenedModel, corpus: str, data: str | None, tell: Tell) -> EvaluationResult:
    """recall, MRR and nDCG of a model of vectors: the queries of `data`, or of a folder in BEIR's format, among all
    documents of `corpus`.

    Raises InputError.
    """
    check_embeds(opened)
    is_folder = Path(corpus).is_dir()
    if is_folder and data is not None:
        what = f"{corpus} is a folder in BEIR's format, which has queries of its own"
        raise InputError.at("--data", what, "leave it out, or give a file of texts as --corpus")
    read = read_beir(Path(corpus), tell) if is_folder else _read_matches(corpus, data, tell)
    started = time.monotonic()
    documents = unit_vectors(opened, read.documents, "document", tell)
    queries = unit_vectors(opened, read.queries, "query", tell)
    figures = retrieval_metrics(queries, documents, read.judged, read.own)
    seconds = time.monotonic() - started
    objective = opened.objective.config.objective
    return EvaluationResult(opened.name, objective, figures, len(read.queries), len(read.documents), None, seconds)


def _read_matches(corpus: str, data: str | None, tell: Tell) -> Corpus:
    """The queries of `data` among its own documents and the texts of the file or glob `corpus`."""
    if data is None:
        fix = "write --data FILE with matches, whose queries are asked; or a folder in BEIR's format"
        raise InputError.at("--corpus", f"{corpus} has texts, and no queries", fix)
    of_data, of_corpus = Ledger(), Ledger()
    matches = merged_matches(data, of_data)
    texts = dict.fromkeys(text for positives, known in matches.values() for text in [*positives, *known])
    texts |= dict.fromkeys(corpus_texts(corpus, of_corpus))
    for path, ledger in ((data, of_data), (corpus, of_corpus)):
        tell_dropped(path, ledger, tell)
    places = {text: place for place, text in enumerate(texts)}
    judged = [dict.fromkeys((places[text] for text in positives), 1.0) for positives, _ in matches.values()]
    own = {number: places[query] for number, query in enumerate(matches) if query in places}
    own = {number: place for number, place in own.items() if place not in judged[number]}
    return Corpus(list(texts), list(matches), judged, own)


def read_beir(folder: Path, tell: Tell) -> Corpus:
    """A folder in BEIR's format; of its judgements those of test, else dev, validation, train.

    A document is its title and its text, and has words. Queries that no document answers are left out, and a document
    with a query's own id is not looked for, as BEIR does it. Raises InputError with the first 20 lines that are wrong.
    """
    file = next((file for name in _SPLITS if (file := folder / "qrels" / f"{name}.tsv").is_file()), None)
    missing = [name for name in ("corpus.jsonl", "queries.jsonl") if not (folder / name).is_file()]
    if file is None:
        missing.append("qrels/test.tsv")
    if missing or file is None:
        fix = "a folder in BEIR's format has corpus.jsonl, queries.jsonl and qrels/test.tsv"
        raise InputError.at(str(folder), f"has no {', '.join(missing)}", fix)
    problems: list[Problem] = []
    read = dict(_texts(folder / "corpus.jsonl", ("title", "text"), problems))
    documents = {name: text for name, text in read.items() if text}
    queries = {name: text for name, text in _texts(folder / "queries.jsonl", ("text",), problems) if text}
    judgements = list(_judgements(file, queries, problems))
    if not documents and not problems:
        problems.append(Problem(str(folder / "corpus.jsonl"), "has no document with words", "give it texts"))
    if problems:
        raise InputError(problems[:_SHOWN])
    if without := len(read) - len(documents):
        tell(f"{folder / 'corpus.jsonl'}: {without:,} documents without words are left out")
    places = {name: place for place, name in enumerate(documents)}
    by_query: dict[str, Judgements] = {}
    for query, document, score in judgements:
        if score > 0:
            place = places.setdefault(document, len(places))
            by_query.setdefault(query, {})[place] = score
    if not by_query:
        raise InputError.at(str(file), "judges no document to answer a query", "give scores above 0")
    if unknown := len(places) - len(documents):
        tell(f"{file}: {unknown:,} documents that answer a query are not in corpus.jsonl, and are never found")
    own = {number: places[name] for number, name in enumerate(by_query) if name in documents}
    asked = [queries[name] for name in by_query]
    return Corpus(list(documents.values()), asked, list(by_query.values()), own)


def _texts(file: Path, names: tuple[str, ...], problems: list[Problem]) -> Iterator[tuple[str, str]]:
    """(id, text) of each line: the strings of these names, joined."""
    for where, line in _lines(file):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            problems.append(Problem(where, f"is no JSON: {error}", "mend the line"))
            continue
        fields = [row.get(name) or "" for name in names] if isinstance(row, dict) else []
        name = row.get("_id") if isinstance(row, dict) else None
        if not isinstance(name, str) or not all(isinstance(field, str) for field in fields) or "text" not in row:
            problems.append(Problem(where, "has no `_id` and `text` that are strings", 'write {"_id": …, "text": …}'))
            continue
        yield name, " ".join(filter(None, fields)).strip()


def _judgements(file: Path, queries: dict[str, Any], problems: list[Problem]) -> Iterator[tuple[str, str, float]]:
    """(query, document, score) of each line but the heading."""
    for number, (where, line) in enumerate(_lines(file)):
        parts = line.rstrip("\n").split("\t")
        try:
            query, document, score = parts[0], parts[1], float(parts[2])
        except (IndexError, ValueError):
            if number:  # the first is a heading
                problems.append(Problem(where, "is no judgement", "write QUERY, DOCUMENT and SCORE between tabs"))
            continue
        if query not in queries:
            problems.append(Problem(where, f"there is no query {query!r} in queries.jsonl", "mend or remove the line"))
            continue
        yield query, document, score


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """(file:line, the line) of each line that is not empty."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{file}:{number}", line
