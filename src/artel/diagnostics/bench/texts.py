"""Made-up text for measurements. A seed gives the same text on every machine, and its speed is that of real text.

Words of two alphabets follow Zipf's law with a long tail: the most frequent hundred words are over a third of a text
and one word in 150 occurs only once, so that a cache of words hits no more often than in novels. Words form sentences
with capitals and commas, sentences form paragraphs, paragraphs form documents of unequal length. Of a hundred
documents two are copies of an earlier one and three are near-copies, so that deduplication has something to drop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

_ALPHABETS = (
    (
        "о е а и я у ы ё ю э".split(),
        "н т с р в л к м д п з б г ж ч х ш ст пр тр".split(),
        "й ть л м х ц ть ет ный".split(),
    ),
    ("e a o i u y ea ou io".split(), "t n s r h l d c m f p g w b th st tr ch".split(), "s d n r ng nt ly ed".split()),
)
_WORDS = 60_000  # of each alphabet; rarer ones are joined from two of them
_RARE = 1 / 150
_PIECE = 200_000  # words drawn at a time
# The forms of a word, by its place in a sentence; the last one begins a paragraph.
_PLAIN, _COMMA, _FIRST, _LAST, _PARAGRAPH = range(5)


def documents(size: int, seed: int = 0) -> Iterator[str]:
    """Texts of `size` bytes of UTF-8, or up to one document more; memory does not grow with `size`."""
    random = np.random.default_rng(seed)
    languages = [_Language(alphabet, random) for alphabet in _ALPHABETS]
    earlier: list[str] = []
    while size > 0:
        for text in languages[int(random.random() < 0.4)].documents(random):
            for document in (text, *_copies(earlier, random)):
                yield document
                size -= len(document.encode())
                if size <= 0:
                    return
            if len(earlier) < 1000:
                earlier.append(text)
            else:
                earlier[int(random.integers(1000))] = text


def pages(texts: list[str]) -> Iterator[bytes]:
    """Each text as a web page: paragraphs with links among scripts, styles and menus, three quarters of its bytes."""
    menu = "".join(
        f'<li class="menu-item"><a href="/section/{number}/">Section {number}</a></li>' for number in range(20)
    )
    script = "".join(f"window.data[{number}] = {{id: {number}, name: 'item-{number}'}};\n" for number in range(90))
    style = "".join(f".block-{number} > p {{ margin: {number}px 0; color: #{number:06x}; }}\n" for number in range(90))
    for number, text in enumerate(texts):
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        body = "".join(
            f'<p class="block-{at % 30}">{paragraph.replace(", ", ", <a href=x>", 1).replace(". ", "</a>. ", 1)}</p>\n'
            for at, paragraph in enumerate(escaped.split("\n\n"))
        )
        yield (
            f'<!DOCTYPE html>\n<html lang="ru"><head><meta charset="utf-8"><title>Page {number}</title>\n<style>{style}'
            f"</style>\n<script>{script}</script></head>\n<body><header><nav><ul>{menu}</ul></nav></header>\n"
            f'<main><article id="a{number}"><h1>Page {number}</h1>\n{body}</article></main>\n'
            f"<footer><ul>{menu}</ul><p>&copy; 2026</p></footer></body></html>\n"
        ).encode()


class _Language:
    """The words of one alphabet, each in the five forms that depend on its place in a sentence."""

    def __init__(self, alphabet: tuple[list[str], list[str], list[str]], random: np.random.Generator) -> None:
        words = _words(alphabet, random)
        self._words = words
        self._forms: list[str] = [
            *(f" {word}" for word in words),
            *(f" {word}," for word in words),
            *(f" {word.capitalize()}" for word in words),
            *(f" {word}." for word in words),
            *(f"\n\n{word.capitalize()}" for word in words),
        ]
        # Zipf and Mandelbrot: the frequency of the word of rank r is proportional to 1 / (r + 2.7).
        shares = 1 / (np.arange(len(words)) + 2.7)
        self._up_to = np.cumsum(shares / shares.sum())

    def documents(self, random: np.random.Generator) -> Iterator[str]:
        """Texts from about 200,000 words; their median is 1,500 characters, their mean 2,500."""
        ranks = np.minimum(np.searchsorted(self._up_to, random.random(_PIECE)), len(self._words) - 1)
        ends = np.cumsum(np.clip(random.lognormal(2.4, 0.6, _PIECE // 10), 2, 60).astype(np.int64))
        ends = ends[ends < _PIECE]
        forms = np.where(random.random(_PIECE) < 0.08, _COMMA, _PLAIN)
        forms[ends - 1] = _LAST
        forms[np.append(0, ends[:-1])] = np.where(random.random(len(ends)) < 0.2, _PARAGRAPH, _FIRST)
        pieces = list(map(self._forms.__getitem__, (forms * len(self._words) + ranks).tolist()))
        rare = np.flatnonzero((random.random(_PIECE) < _RARE) & (forms == _PLAIN))
        halves = random.integers(200, len(self._words), (2, len(rare)))
        for place, first, second in zip(rare.tolist(), *halves.tolist(), strict=True):
            pieces[place] = f" {self._words[first]}{self._words[second]}"
        # Documents end where sentences do.
        sizes = np.clip(random.lognormal(2.9, 1.0, len(ends)), 1, 2000).astype(int).tolist()
        last = len(ends) - 1
        bounds = [int(ends[at]) for at in accumulate(sizes) if at <= last]
        for start, stop in pairwise([0, *bounds]):
            yield "".join(pieces[start:stop]).strip()


def _words(alphabet: tuple[list[str], list[str], list[str]], random: np.random.Generator) -> list[str]:
    """Distinct words, shorter where they are more frequent; one in forty is a number."""
    vowels, consonants, ends = alphabet
    words: dict[str, None] = {}
    while len(words) < _WORDS:
        rank = len(words)
        if rank > 100 and rank % 40 == 0:
            words[str(int(random.integers(1, 10 ** int(random.integers(1, 6)))))] = None
        syllables = 1 + int(random.integers(0, 2 + (rank > 60) + (rank > 2000)))
        picked = random.integers(0, 1 << 30, 2 * syllables + 1).tolist()
        word = "".join(
            consonants[one % len(consonants)] + vowels[other % len(vowels)]
            for one, other in zip(picked[:-1:2], picked[1::2], strict=True)
        )
        if picked[-1] % 3 < 2:
            word += ends[picked[-1] // 3 % len(ends)]
        words[word[picked[-1] % 7 == 0 :]] = None  # some words begin with a vowel
    return list(words)[:_WORDS]


def _copies(earlier: list[str], random: np.random.Generator) -> Iterator[str]:
    """Now and then a copy of an earlier document, or one with up to a word in a hundred changed."""
    chance = random.random()
    if not earlier or chance >= 0.05:
        return
    text = earlier[int(random.integers(len(earlier)))]
    if chance < 0.02:
        yield text
        return
    words = text.split(" ")
    for place in random.integers(0, len(words), max(1, len(words) // 100)).tolist():
        words[place] = f"{words[place]}{int(random.integers(100))}"
    yield " ".join(words)
