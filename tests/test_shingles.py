"""Word n-grams by arrays: the words are those of a regular expression, equal ones and no others have equal hashes."""

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artel.text.dedup.shingles import Shingler, shingle_set

APART = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"[^\W{APART}]+|[{APART}]")  # the plain way to say what a word is


def expected(texts, count):
    """The n-grams of each text as tuples of words."""
    results = []
    for text in texts:
        words = WORD.findall(text.casefold())
        results.append([tuple(words[place : place + count]) for place in range(len(words) - count + 1)])
    return results


def same(texts, count=2, **more):
    """Whether equal n-grams, and no others, have equal hashes, over all texts."""
    plain, hashed = expected(texts, count), Shingler(count, **more).hashes(texts)
    assert [len(each) for each in plain] == [len(each) for each in hashed]
    pairs = {pair for one, other in zip(plain, hashed, strict=True) for pair in zip(one, other.tolist(), strict=True)}
    return len(pairs) == len({gram for gram, _ in pairs}) == len({number for _, number in pairs})


LETTERS = "aAbß1_ \n.-—éеёЖŉﬁ猫あア・ㄅ한글\u0301\u200d\ud800\U00020000𝒳😀\x00"


@given(st.lists(st.text(LETTERS, max_size=40), max_size=6), st.integers(1, 6), st.integers(1, 9))
def test_any_texts_in_any_pieces(texts, count, piece):
    assert same(texts, count, chunk_characters=piece)


def test_a_word_longer_than_a_piece_and_texts_of_many_pieces():
    chance = random.Random(0)
    piece = 65_536
    long = "".join(chance.choices("абвг", k=3 * piece))
    words = " ".join("".join(chance.choices("abcdefgh", k=chance.randrange(1, 9))) for _ in range(60_000))
    assert len(words) > 4 * piece
    assert same([f"start {long} {long[1:]} {long} end", words, "", words[:50], words], 1, chunk_characters=piece)
    assert same([words, words.upper()], 5, chunk_characters=piece)


def test_texts_together_have_the_n_grams_that_each_has_alone(shared_data):
    text = (shared_data / "literature" / "anna_karenina.txt").read_text(encoding="utf-8")
    texts = [text[:300_000], *text[300_000:400_000].splitlines()]
    grams = Shingler(5)
    for together, one in zip(grams.hashes(texts), texts, strict=True):
        (alone,) = grams.hashes([one])
        assert np.array_equal(together, alone)
    assert same(texts, 5)


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_a_set_is_sorted_and_has_each_once(size):
    grams = np.random.default_rng(0).integers(0, 1 << 40, size, np.uint64) << np.uint64(20)
    result = shingle_set(np.concatenate([grams, grams[::2]]))
    assert result.dtype == np.uint32
    assert result.tolist() == sorted({number >> 32 for number in grams.tolist()})
