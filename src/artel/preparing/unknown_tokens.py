"""Counts characters without a token in each input shard, and checks the counts of all shards.

A WordPiece vocabulary turns a Georgian word into [UNK], T5's a line feed into <unk>. A BPE over characters without an
unknown token drops it. A model learns nothing from such characters, and texts that differ only in them become equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import xxhash

from artel.config import RunConfig
from artel.errors import InputError
from artel.messages import Phrase
from artel.objectives import Objective
from artel.preparing.run_tokenizer import tokenizer_location
from artel.text import Record
from artel.tokens import Sample, Tokenizer

_WARNING_FRACTION = 0.01
"""Fraction of unknown tokens above which the user is warned."""
_MAX_EQUAL_FRACTION = 0.5
"""Maximum fraction of documents with the same ids as another text."""
_MAX_COMPARED_DOCUMENTS = 1000
"""Maximum number of documents to compare across shards. A shard with more compares only its own documents."""
_MAX_EXAMINED_DOCUMENTS, _MAX_EXAMINED_CHARACTERS, _MAX_LISTED_CHARACTERS = 50, 2000, 5
"""Documents of a shard whose unknown characters are looked up, characters of each, and characters in a message."""
_COUNT_NAMES = ("documents", "documents_with_unknown", "equal_documents", "tokens", "unknown", "unknown_in_outputs")


class UnknownTokens:
    """Counts the unknown tokens in the documents of one input shard, by set."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._tokenizer = objective.tokenizer
        self._unknown_id = self._tokenizer.unknown_id
        self._is_lost = _lost_character_test(self._tokenizer)
        self._sets: dict[str, Counter[str]] = {}
        self._characters: Counter[str] = Counter()
        self._num_examined = 0
        self._documents: list[tuple[int, int, str]] = []

    def add(self, record: Record, samples: Iterable[Sample]) -> None:
        """Count a document."""
        if self._unknown_id is None and self._is_lost is None:
            return
        samples = list(samples)
        text, set_name = record.text, record.set_name
        counts = self._sets.setdefault(set_name, Counter())
        counts.update(documents=1, tokens=sum(len(sample.ids) for sample in samples))
        if self._unknown_id is None:
            lost = Counter({character: text.count(character) for character in set(text) if self._is_lost(character)})
            num_unknown, num_in_outputs = lost.total(), 0
            self._characters.update(lost)
        else:
            num_unknown = sum(int(np.count_nonzero(sample.ids == self._unknown_id)) for sample in samples)
            outputs = filter(None.__ne__, map(self._objective.output_ids, samples)) if num_unknown else ()
            num_in_outputs = sum(int(np.count_nonzero(ids == self._unknown_id)) for ids in outputs)
        if not num_unknown:
            return
        counts.update(unknown=num_unknown, unknown_in_outputs=num_in_outputs, documents_with_unknown=1)
        all_ids = np.concatenate([sample.ids for sample in samples]).astype("<i8")
        ids_digest = xxhash.xxh3_64_intdigest(all_ids.tobytes())
        # The input of a pair is its group. Labels do not count: a text with two labels is one text.
        text_digest = xxhash.xxh3_64_intdigest(f"{record.group}\n{text}".encode())
        self._documents.append((ids_digest, text_digest, set_name))
        if self._unknown_id is not None and self._num_examined < _MAX_EXAMINED_DOCUMENTS:
            self._num_examined += 1
            text = text[:_MAX_EXAMINED_CHARACTERS]
            (encoded,) = self._tokenizer.encode_with_offsets([text])
            for index in np.flatnonzero(encoded.ids == self._unknown_id):
                self._characters.update(text[encoded.starts[index] : encoded.ends[index]].strip(" "))

    def to_json(self) -> dict[str, Any]:
        """Return counts by set, the most common unknown characters, and digests of documents to compare."""
        documents = self._documents
        if len(documents) > _MAX_COMPARED_DOCUMENTS:
            for set_name, count in _equal_documents(documents).items():
                self._sets[set_name]["equal_documents"] = count
            documents = []
        return {"sets": self._sets, "characters": dict(self._characters.most_common(100)), "documents": documents}


def _equal_documents(documents: list[tuple[int, int, str]]) -> Counter[str]:
    """Count by set the documents, (digest of ids, digest of text, set), that have the ids of another text."""
    texts: dict[int, set[int]] = {}
    for ids, text, _ in documents:
        texts.setdefault(ids, set()).add(text)
    return Counter(set_name for ids, _, set_name in documents if len(texts[ids]) > 1)


def check_unknown_tokens(config: RunConfig, shards: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the ledger's entry about unknown tokens, and notes for the user; both empty if there are none.

    `shards`: `UnknownTokens.to_json` of each input shard. Raise InputError if most documents get equal ids.
    """
    sets: dict[str, Counter[str]] = {}
    characters: Counter[str] = Counter()
    documents: list[tuple[int, int, str]] = []
    for shard in shards:
        characters.update(shard["characters"])
        documents += shard["documents"]
        for name, counts in shard["sets"].items():
            sets.setdefault(name, Counter()).update(counts)
    for name, count in _equal_documents(documents).items():
        sets[name]["equal_documents"] += count
    total: Counter[str] = sum(sets.values(), Counter())
    if not total["unknown"]:
        return {}, []
    examples = ", ".join(map(repr, dict(characters.most_common(_MAX_LISTED_CHARACTERS))))
    fraction = total["unknown"] / max(total["tokens"], 1)
    entry = {
        "sets": {name: {key: counts[key] for key in _COUNT_NAMES} for name, counts in sets.items()},
        "share": fraction,
        "characters": dict(characters.most_common(20)),
    }
    if total["equal_documents"] > _MAX_EQUAL_FRACTION * total["documents"]:
        what = (
            f"the tokenizer has no token for {examples}: {total['equal_documents']:,} of {total['documents']:,} "
            "documents get the same ids as another one, so nothing can be learned from them"
        )
        fix = "use a tokenizer for this alphabet: a byte-level or multilingual one, or train one on the text"
        raise InputError.at(tokenizer_location(config)[0], what, fix)
    arguments = {"found": total["documents_with_unknown"], "documents": total["documents"], "characters": examples}
    if total["unknown_in_outputs"]:
        template = (
            "{count:,} tokens of the outputs are unknown ({characters}), in {found:,} of {documents:,} documents: the "
            "model learns to write the unknown token there"
        )
        return entry, [Phrase(template, count=total["unknown_in_outputs"], **arguments)]
    if fraction > _WARNING_FRACTION:
        template = (
            "{share:.1%} of the tokens are unknown, in {found:,} of {documents:,} documents: the tokenizer has none "
            "for {characters}"
        )
        return entry, [Phrase(template, share=fraction, **arguments)]
    return entry, []


def _lost_character_test(tokenizer: Tokenizer) -> Any:
    """Return a function that is True for characters that the tokenizer drops; None if it drops none."""
    backend = tokenizer.hf.backend_tokenizer
    model, normalizer, pre_tokenizer = backend.model, backend.normalizer, backend.pre_tokenizer
    if type(model).__name__ != "BPE" or model.unk_token is not None or model.byte_fallback:
        return None
    if pre_tokenizer is not None and b"ByteLevel" in pre_tokenizer.__getstate__():
        return None

    @cache
    def is_lost(character: str) -> bool:
        text = character if normalizer is None else normalizer.normalize_str(character)
        pieces = [text] if pre_tokenizer is None else [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
        return any(sum(len(token.value) for token in model.tokenize(piece)) < len(piece) for piece in pieces)

    return is_lost
