"""What text each id of a vocabulary stands for, in bytes of UTF-8: so that two vocabularies can be compared."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from artel.errors import InputError
from artel.tokens.tokenizer.byte_letters import letters_of_bytes
from artel.tokens.tokenizer.tokenizer import Tokenizer

_BYTES = {chr(letter): bytes([byte]) for byte, letter in letters_of_bytes().items()}
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_TEXTS = ("a word and another one", "ещё одно слово")


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The texts of a tokenizer's ids."""

    pieces: list[bytes | None]
    """Of each id, (vocabulary,), not empty. None: it is a special token, the unknown token, or no token."""
    ids: dict[bytes, int]
    """The id of each text. Of a letter and its byte, which SentencePiece may have both, the letter's."""
    special: dict[int, str]
    """The special tokens as they are written, but for the unknown token."""
    unknown: int | None
    """The token of what the vocabulary has no token for; None: it has one for every byte."""
    adds_space: bool
    """True if a text begins with a space that it does not have (Llama 2, T5)."""


def token_texts(tokenizer: Tokenizer, where: str) -> TokenTexts:
    """The text of each id: of byte-level BPE, and of SentencePiece's spelling with ▁ and <0xD0>.

    Raises InputError, at `where`, for a tokenizer whose tokens do not join to the text: WordPiece, pattern whitespace.
    """
    added = tokenizer.hf.added_tokens_decoder
    unknown = tokenizer.hf.unk_token_id
    if unknown == tokenizer.end_id:  # GPT-2 names one token for all roles
        unknown = None
    special = {number: token.content for number, token in added.items() if token.special and number != unknown}
    special.setdefault(tokenizer.end_id, str(tokenizer.hf.convert_ids_to_tokens(tokenizer.end_id)))
    backend = tokenizer.hf.backend_tokenizer
    read = _bytes_of_letters if "ByteLevel" in _kinds(backend.decoder) else _bytes_of_piece
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces: list[bytes | None] = [None] * tokenizer.vocabulary
    for piece, number in vocabulary.items():
        if number not in special and number != unknown:
            pieces[number] = (piece.encode() if number in added else read(piece)) or None
    by_rank = sorted(vocabulary, key=lambda piece: (not _BYTE.fullmatch(piece), -vocabulary[piece]))
    ids = {text: vocabulary[piece] for piece in by_rank if (text := pieces[vocabulary[piece]]) is not None}
    encoded = [encoding.ids.tolist() for encoding in tokenizer.encode_with_offsets(list(_TEXTS))]
    if not all(_joins(tokenizer, pieces, of_text) for of_text in encoded):
        what = "its tokens do not join to the text that they stand for, as those of WordPiece and whitespace do not"
        raise InputError.at(where, what, "take a byte-level or a SentencePiece tokenizer")
    first = pieces[next(tokenizer.encode_with_offsets(["a"])).ids[0]] or b""
    return TokenTexts(pieces, ids, special, unknown, first.startswith(b" "))


def _joins(tokenizer: Tokenizer, pieces: list[bytes | None], ids: list[int]) -> bool:
    """Whether the pieces of a text give what the tokenizer decodes; True where the vocabulary lacks its letters."""
    texts = [pieces[number] for number in ids]
    known = [text for text in texts if text is not None]
    return len(known) < len(texts) or b"".join(known).strip() == tokenizer.decode(ids).encode().strip()


def _kinds(decoder: Any) -> set[str]:
    """The names of a decoder's parts; none where there is no decoder."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _bytes_of_letters(piece: str) -> bytes:
    """Of byte-level BPE: each letter is a byte. A letter that is none stands for itself."""
    return b"".join(_BYTES.get(letter) or letter.encode() for letter in piece)


def _bytes_of_piece(piece: str) -> bytes:
    """Of SentencePiece: <0xD0> is a byte, ▁ a space."""
    match = _BYTE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else piece.replace("▁", " ").encode()
