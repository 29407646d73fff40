"""The text of each id of a vocabulary in bytes of UTF-8, to compare two vocabularies."""

from __future__ import annotations

import re
from dataclasses import dataclass

from artel.errors import InputError
from artel.tokens.tokenizer.tokenizer import Tokenizer, component_types
from artel.tokens.tokenizer.word_cache import byte_letters

_BYTE_OF_LETTER = {chr(letter): bytes([byte]) for byte, letter in byte_letters().items()}
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_TEST_TEXTS = ("a word and another one", "ещё одно слово")


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The texts of a tokenizer's ids."""

    pieces: list[bytes | None]
    """The text of each id, (vocabulary,), not empty. None for special tokens, the unknown token, and unused ids."""
    ids: dict[bytes, int]
    """The id of each text. SentencePiece may have both a letter and its byte: then the letter's."""
    special: dict[int, str]
    """The special tokens, except the unknown token."""
    unknown: int | None
    """The unknown token; None if the vocabulary covers every byte."""
    adds_space: bool
    """True if the tokenizer adds a space before a text (Llama 2, T5)."""


def token_texts(tokenizer: Tokenizer, where: str) -> TokenTexts:
    """Return the text of each id of a byte-level BPE or a SentencePiece tokenizer; raise InputError for others."""
    added = tokenizer.hf.added_tokens_decoder
    unknown = tokenizer.hf.unk_token_id
    if unknown == tokenizer.end_id:  # GPT-2 has one token for all roles
        unknown = None
    special = {token_id: token.content for token_id, token in added.items() if token.special and token_id != unknown}
    special.setdefault(tokenizer.end_id, str(tokenizer.hf.convert_ids_to_tokens(tokenizer.end_id)))
    backend = tokenizer.hf.backend_tokenizer
    to_bytes = _decode_byte_letters if "ByteLevel" in component_types(backend.decoder) else _decode_sentencepiece
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces: list[bytes | None] = [None] * tokenizer.vocabulary
    for piece, token_id in vocabulary.items():
        if token_id not in special and token_id != unknown:
            pieces[token_id] = (piece.encode() if token_id in added else to_bytes(piece)) or None
    by_rank = sorted(vocabulary, key=lambda piece: (not _BYTE_PIECE.fullmatch(piece), -vocabulary[piece]))
    ids = {text: vocabulary[piece] for piece in by_rank if (text := pieces[vocabulary[piece]]) is not None}
    encoded = [encoding.ids.tolist() for encoding in tokenizer.encode_with_offsets(list(_TEST_TEXTS))]
    if not all(_pieces_join(tokenizer, pieces, ids) for ids in encoded):
        what = "its tokens cannot be joined back to their text, like those of WordPiece and whitespace"
        raise InputError.at(where, what, "use a byte-level or a SentencePiece tokenizer")
    first = pieces[next(tokenizer.encode_with_offsets(["a"])).ids[0]] or b""
    return TokenTexts(pieces, ids, special, unknown, first.startswith(b" "))


def _pieces_join(tokenizer: Tokenizer, pieces: list[bytes | None], ids: list[int]) -> bool:
    """True if the pieces of a text join to the decoded text, or if the vocabulary lacks letters of the text."""
    texts = [pieces[token_id] for token_id in ids]
    known_texts = [text for text in texts if text is not None]
    return len(known_texts) < len(texts) or b"".join(known_texts).strip() == tokenizer.decode(ids).encode().strip()


def _decode_byte_letters(piece: str) -> bytes:
    """Convert a token of byte-level BPE, where each letter is a byte. Keep other letters."""
    return b"".join(_BYTE_OF_LETTER.get(letter) or letter.encode() for letter in piece)


def _decode_sentencepiece(piece: str) -> bytes:
    """Convert a token of SentencePiece, where <0xD0> is a byte and ▁ a space."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else piece.replace("▁", " ").encode()
