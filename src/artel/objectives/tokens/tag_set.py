"""The labels of a run, and the tags of its head in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from artel.config import RunConfig
from artel.errors import InputError
from artel.objectives.pretrained_heads import order_like
from artel.text import Record, TaggedText
from artel.text.tags import BEGIN, END, INSIDE, OUTSIDE, SINGLE, WORDS, split_tag

_LETTERS = {"bio": ("B", "I"), "bilou": ("B", "I", "L", "U")}


@dataclass(frozen=True)
class TagSet:
    """The tags of a head, by id."""

    tags: tuple[str, ...]
    word_tags: bool
    """True if every word has a tag; False if tags mark names, and O all other words."""

    @classmethod
    def from_config(cls, config: RunConfig) -> TagSet:
        """Return the tags of a run. Until its records decide the labels, only O: `artel plan` needs no more."""
        labels, word_tags = config.tokens.labels, uses_word_tags(config)
        if labels == "auto":
            return cls((OUTSIDE,), word_tags=False)
        if word_tags or OUTSIDE in labels:
            return cls(tuple(labels), word_tags)
        return cls(tuple(_build_tags(labels, config.tokens.scheme)), word_tags)

    @cached_property
    def labels(self) -> list[str]:
        """The labels of names, or the tags of words; without O."""
        labels = self.tags if self.word_tags else [split_tag(tag)[1] for tag in self.tags]
        return list(dict.fromkeys(label for label in labels if label))

    @cached_property
    def _id_by_tag(self) -> dict[tuple[str, str], int]:
        return {split_tag(tag): tag_id for tag_id, tag in enumerate(self.tags)}

    @property
    def outside(self) -> int | None:
        """The id of O; None if every word has a tag."""
        return None if self.word_tags else self._id_by_tag.get((OUTSIDE, ""))

    def tag_ids(self, label: str, words: int) -> list[int]:
        """Return the tag ids of a name of `words` words. Raise KeyError for an unknown label."""
        if self.word_tags:
            return [self._word_ids[label]] * words
        if any((prefix, label) in self._id_by_tag for prefix in (END, SINGLE)):
            prefixes = [SINGLE] if words == 1 else [BEGIN, *[INSIDE] * (words - 2), END]
        else:
            prefixes = [BEGIN, *[INSIDE] * (words - 1)]
        return [self._tag_id(prefix, label) for prefix in prefixes]

    def _tag_id(self, prefix: str, label: str) -> int:
        """Return the id of a tag. If the head has only I- (or only B-) for a label, return that id."""
        candidates = ((letter, label) for letter in (prefix, INSIDE, BEGIN))
        return next(self._id_by_tag[tag] for tag in candidates if tag in self._id_by_tag)

    @cached_property
    def _word_ids(self) -> dict[str, int]:
        return {tag: tag_id for tag_id, tag in enumerate(self.tags)}

    def names(self, ids: Iterable[int]) -> list[str]:
        return [self.tags[tag_id] for tag_id in ids]


def labels_or_tags(labels: Sequence[str], config: RunConfig, base: Sequence[str]) -> list[str]:
    """Return the labels of records in the order of a pretrained head with the tags `base`.

    Return the tags `base` if the run has the same tags, but `tokens.scheme` would order them differently.
    """
    if uses_word_tags(config):
        return order_like(labels, base)
    ordered = order_like(labels, list(dict.fromkeys(split_tag(tag)[1] for tag in base)))
    tags = _build_tags(ordered, config.tokens.scheme)
    return list(base) if set(tags) == set(base) and tags != list(base) else ordered


def _build_tags(labels: Sequence[str], scheme: str) -> list[str]:
    return [OUTSIDE, *(f"{letter}-{label}" for label in labels for letter in _LETTERS[scheme])]


def uses_word_tags(config: RunConfig) -> bool:
    """True if every word has a tag, according to the sources or `tokens.scheme`."""
    return config.tokens.scheme == "words" or any(source.yields == WORDS for source in config.data.sources)


def collect_labels(records: Iterable[Record], *, word_tags: bool) -> list[str]:
    """Return the labels of records in alphabetical order.

    Raise InputError if there are none, if names have the label O, or if every word is marked, like tags of words.
    """
    labels: set[str] = set()
    is_covered = True
    for record in records:
        assert isinstance(record.fields, TaggedText)
        labels.update(label for *_, label in record.fields.spans)
        is_covered = is_covered and covers(record.fields.text, record.fields.spans)
    if not labels:
        fix = "check the format and the tags of the sources, or write tokens: {labels: […]}"
        raise InputError.at("tokens.labels", "no record has a marked span", fix)
    if OUTSIDE in labels and not word_tags:
        what = "a label is 'O', but that is the tag of words outside of names"
        raise InputError.at("tokens.labels", what, "use another label")
    if is_covered and not word_tags:
        what = f"every word of every record is marked ({', '.join(sorted(labels)[:5])} …), as tags of words are"
        fix = "write kind: words in the source, where each word has a tag; or the labels: tokens: {labels: […]}"
        raise InputError.at("tokens.labels", what, fix)
    return sorted(labels)


def covers(text: str, spans: Sequence[tuple[int, int, str]]) -> bool:
    """True if there is only white space outside the (ordered) spans."""
    position = 0
    for start, end, _ in spans:
        if text[position:start].strip():
            return False
        position = max(position, end)
    return not text[position:].strip()
