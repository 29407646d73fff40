"""Bytes as vocabularies write them: letters of byte-level BPE, or <0xD0>."""

from __future__ import annotations

import re
from functools import cache


@cache
def letters_of_bytes() -> dict[int, int]:
    """The letter of each byte: itself where it is printable, else one from 256 on (GPT-2's bytes_to_unicode)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {byte: 256 + place for place, byte in enumerate(others)}


def bytes_of_piece(piece: str) -> bytes | None:
    """The bytes of an entry of a vocabulary, such as a part of a character; None for one in plain letters."""
    if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(match[1])
    bytes_of_letters = {chr(letter): byte for byte, letter in letters_of_bytes().items()}
    return bytes(bytes_of_letters[letter] for letter in piece) if set(piece) <= bytes_of_letters.keys() else None
