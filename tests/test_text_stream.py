"""Text out of tokens: what is streamed is what the tokens are decoded to, also of bytes that are no text."""

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from artel.generation.text_stream import TextStream
from artel.tokens.tokenizer.tokenizer import Tokenizer
from artel.tokens.tokenizer.word_cache import byte_letters, piece_bytes


@pytest.fixture(scope="module")
def tokenizer():
    """Of Llama 2's kind: words begin with U+2581, and what the vocabulary lacks is written in bytes."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefgh"]
    backend = Backend(BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = Sequence([Replace("\u2581", " "), ByteFallback(), Fuse()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"), "here")


def streamed(tokenizer, prompt, tokens):
    stream = TextStream(tokenizer, prompt, ())
    return "".join(stream.add(token).text for token in tokens) + stream.flush()


def test_bytes_that_are_no_text_end_nothing(tokenizer):
    """A run of byte tokens that is not UTF-8 becomes U+FFFD as a whole, so its first bytes are not shown early."""
    newline, half, letter = 1 + 0x0A, 1 + 0xD0, 1 + 256 + 1
    assert streamed(tokenizer, [], [letter, newline, half, letter]) == "a\ufffd\ufffda"
    for seed in range(300):
        tokens = np.random.default_rng(seed).integers(1, tokenizer.vocabulary, 40).tolist()
        assert streamed(tokenizer, [letter], [*tokens, letter]) == tokenizer.decode([letter, *tokens, letter])[1:]


def test_a_stop_text_within_a_run_of_bytes_is_found_at_once(tokenizer):
    stream = TextStream(tokenizer, [], ("\n",))
    pieces = [stream.add(token) for token in (1 + 256 + 1, 1 + 0x0A)]
    assert ["".join(piece.text for piece in pieces), *(piece.stopped for piece in pieces)] == ["a", False, True]


@pytest.mark.parametrize("stop", ["конец", "🤗🤗"])
def test_a_long_run_of_bytes_is_decoded_once(tokenizer, monkeypatch, stop):
    decoded, decode = [], tokenizer.hf.decode
    monkeypatch.setattr(tokenizer.hf, "decode", lambda ids, **keys: decoded.extend(ids) or decode(ids, **keys))
    stream = TextStream(tokenizer, [], (stop,))
    pieces = [stream.add(1 + byte) for byte in ("это не 🤗 коне" * 200 + stop).encode()]
    assert [piece.stopped for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    assert "".join(piece.text for piece in pieces) == "это не 🤗 коне" * 200
    assert len(decoded) <= len(pieces)


def test_a_prompt_that_ends_within_a_character_is_not_shown_again(tokenizer):
    letter = 1 + 256 + 1
    assert streamed(tokenizer, [letter, letter, 1 + 0xE2], [letter + 1]) == "b"


def test_bytes_of_pieces():
    assert piece_bytes("<0xD0>") == b"\xd0"
    letters = "".join(chr(byte_letters()[byte]) for byte in " €".encode()[:2])
    assert piece_bytes(letters) == " €".encode()[:2]
    assert piece_bytes("\u2581a") is None
