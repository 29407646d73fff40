"""A teacher with another tokenizer: it reads the text of a student's rows, and its ids are mapped by their text.

Tokens are compared by the bytes of their text. A target of the student is aligned if the teacher has a token of the
same bytes at the same position; only aligned targets can be taught, by the teacher's distribution at the token before.
A teacher's id with the text of a student's id counts as that id. All other ids form one class. Special tokens are equal
if they are written the same. The end tokens of texts are always equal.

This is the alignment of trl's GOLD trainer (Patiño et al. 2025, "Unlocking On-Policy Distillation for Any Model
Family"), restricted to pairs of single tokens in the shared part of the vocabularies. Not implemented: groups of
several tokens, whose probabilities GOLD multiplies; the loss of sorted probabilities for ids without a counterpart
(ULD, Boizard et al. 2024); the likelihoods of whole chunks, and their correction for cuts that depend on the text after
them (Minixhofer et al. 2025, "Universal Cross-Tokenizer Distillation via Approximate Likelihood Matching").
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from artel.errors import InputError
from artel.models import IGNORED
from artel.objectives.collate import document_tensors
from artel.objectives.types import Batch
from artel.tokens import Encoding, Tokenizer
from artel.tokens.tokenizer.token_texts import TokenTexts, token_texts

if TYPE_CHECKING:
    import torch

_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The tokens that a student reads or predicts in a row, each token once."""

    ids: np.ndarray
    """int64 (tokens,)."""
    documents: np.ndarray
    """int64 (tokens,): the number of each token's document in its row."""
    targets: np.ndarray
    """int64 (tokens,): index of the token among the targets of the batch; -1 if it is no target."""


@dataclass(frozen=True, slots=True)
class TeacherInput:
    """A teacher's input for a student's batch, and the positions of the student's targets in it."""

    batch: Batch
    """`input_ids` int64 (rows, length); also `documents` and `positions` if documents are isolated."""
    positions: torch.Tensor
    """int64 (aligned,): the positions in the flattened rows that predict the aligned tokens."""
    labels: torch.Tensor
    """int64 (aligned,): the teacher's ids."""
    targets: np.ndarray
    """int64 (aligned,): their indices among the targets of the student's batch."""

    def to(self, device: torch.device) -> TeacherInput:
        return replace(
            self, batch=self.batch.to(device), positions=self.positions.to(device), labels=self.labels.to(device)
        )


@dataclass(slots=True)
class _Row:
    """A teacher's row: ids, their documents, and indices of the student's targets, -1 for none."""

    ids: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, ids: list[int], document: int, targets: list[int] | None = None) -> None:
        self.ids += ids
        self.documents += [document] * len(ids)
        self.targets += [-1] * len(ids) if targets is None else targets


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens [start, end) of a sequence: a special token, or a text between special tokens."""

    start: int
    end: int
    begins_text: bool
    """True if it is the first chunk of a text."""
    text: str
    """Empty for a special token that the teacher also has."""
    spans: np.ndarray
    """int64 (tokens, 2): the bytes [start, end) of each token in the text; empty if it has none."""


class TokenMap:
    """Maps the tokens of a teacher to those of a student, by their text."""

    def __init__(self, student: Tokenizer, teacher: Tokenizer, *, packs_text: bool, key: str) -> None:
        """`packs_text`: True if samples are texts with an end token. `key`: key of the teacher in InputErrors."""
        self._student, self._teacher = token_texts(student, "tokenizer"), token_texts(teacher, key)
        self._tokenizer = teacher
        self._end = student.end_id
        self._packs_text = packs_text
        self._begin = {*student.frame(required=False).before} - {self._end} if packs_text else set()
        self._frame = list(teacher.frame(required=False).before)
        ends = (student.end_id, teacher.end_id) if packs_text else None
        self._special = _shared_special_tokens(self._student, self._teacher, ends)
        self._is_special = np.zeros(student.vocabulary, dtype=bool)
        self._is_special[list(self._student.special)] = True
        ids = (-1 if piece is None else self._student.ids.get(piece, -1) for piece in self._teacher.pieces)
        self.ids = np.array(list(ids), dtype=np.int64)
        """int64 (teacher's vocabulary,): the student's id of the same text; -1 for none."""
        self.ids[list(self._special.values())] = list(self._special)

    @property
    def shared(self) -> float:
        """Fraction of the teacher's ids that have a counterpart."""
        with_text = len(self._teacher.special) + sum(piece is not None for piece in self._teacher.pieces)
        return float((self.ids >= 0).sum()) / with_text

    def note(self, aligned: float) -> str:
        """Return a sentence about the fraction of aligned targets. Raise InputError if it is 0."""
        if not aligned:
            what = "the teacher has no token that is a target of the student: nothing can be learned from it"
            raise InputError.at("distill.tokenizer", what, "use a teacher whose vocabulary is closer to the student's")
        return (
            f"the teacher has its own tokenizer: {aligned:.1%} of the targets are also its tokens, the "
            f"others have only the cross-entropy; {self.shared:.1%} of its ids have a counterpart"
        )

    def read(self, batch: Batch, limit: int | None, *, isolated_documents: bool) -> TeacherInput:
        """Tokenize the texts of a student's batch for the teacher, and align the tokens.

        A row of more than `limit` tokens is read in windows that overlap by half.
        """
        sequences = read_rows(batch, packs_text=self._packs_text)
        chunks_by_row = [self._split_chunks(sequence) for sequence in sequences]
        texts = [chunk.text for chunks in chunks_by_row for chunk in chunks if chunk.text]
        encoded = self._tokenizer.encode_with_offsets(texts)
        rows = []
        for sequence, chunks in zip(sequences, chunks_by_row, strict=True):
            row = _Row()
            for chunk in chunks:
                self._append(row, chunk, sequence, next(encoded) if chunk.text else None)
            rows.append(row)
        return _build_input(rows, limit, isolated_documents)

    def _split_chunks(self, sequence: RowTokens) -> list[_Chunk]:
        """Return the special tokens of a row, and the texts between them, each of one document."""
        ids, documents = sequence.ids, sequence.documents
        special = self._is_special[ids]
        cuts = special[1:] | special[:-1] | (documents[1:] != documents[:-1])
        edges = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(ids)] if len(ids) else []
        chunks = []
        for start, end in pairwise(edges):
            follows = start > 0 and documents[start] == documents[start - 1]
            begins_text = not follows or (self._packs_text and int(ids[start - 1]) in {self._end, *self._begin})
            if int(ids[start]) in self._begin:  # replaced by the teacher's begin token
                continue
            if special[start]:
                is_shared = int(ids[start]) in self._special
                text = "" if is_shared else self._student.special[int(ids[start])]
                chunks.append(_Chunk(start, end, begins_text, text, np.zeros((1, 2), np.int64)))
                continue
            text, spans = self._decode_chunk(ids[start:end].tolist(), begins_text and start > 0)
            if text:
                chunks.append(_Chunk(start, end, begins_text, text, spans))
        return chunks

    def _decode_chunk(self, ids: list[int], begins_text: bool) -> tuple[str, np.ndarray]:
        """Return the text of the student's tokens, without partial characters at its edges, and the tokens' bytes."""
        pieces = [self._student.pieces[token_id] or _UNKNOWN for token_id in ids]
        if begins_text and self._student.adds_space:
            pieces[0] = pieces[0].removeprefix(b" ")
        content = b"".join(pieces)
        head, tail = _whole_character_range(content)
        spans = _piece_spans(pieces) - head
        is_known = np.array([self._student.pieces[token_id] is not None for token_id in ids])
        spans[~is_known | (spans[:, 0] < 0) | (spans[:, 1] > tail - head)] = 0
        text = content[head:tail].decode(errors="replace")
        if text.encode() != content[head:tail]:  # invalid UTF-8, which the teacher reads differently
            spans[:] = 0
        return text, spans

    def _append(self, row: _Row, chunk: _Chunk, sequence: RowTokens, encoded: Encoding | None) -> None:
        """Add a chunk to the teacher's row. `encoded`: its encoded text; None for a special token of the teacher."""
        document, targets = int(sequence.documents[chunk.start]), sequence.targets[chunk.start : chunk.end]
        ids = [self._special[int(sequence.ids[chunk.start])]] if encoded is None else encoded.ids.tolist()
        if chunk.begins_text and self._frame[:1] != ids[:1]:
            row.add(self._frame, document)
        if encoded is None:
            row.add(ids, document, targets.tolist())
            return
        content = chunk.text.encode()
        aligned_targets = np.full(len(ids), -1)
        student_tokens, teacher_tokens = _match_spans(chunk.spans, self._teacher_spans(encoded, chunk.text, content))
        # Bytes may match and ids not: one tokenizer may add a space before a text.
        is_same = self.ids[encoded.ids[teacher_tokens]] == sequence.ids[chunk.start + student_tokens]
        aligned_targets[teacher_tokens[is_same]] = targets[student_tokens[is_same]]
        row.add(ids, document, aligned_targets.tolist())

    def _teacher_spans(self, encoded: Encoding, text: str, content: bytes) -> np.ndarray:
        """Return the bytes [start, end) of each of the teacher's tokens in the text, int64 (tokens, 2)."""
        pieces = [self._teacher.pieces[token_id] or b"" for token_id in encoded.ids.tolist()]
        joined = b"".join(pieces)
        if joined == content:
            return _piece_spans(pieces)
        if joined == b" " + content:
            return (_piece_spans(pieces) - 1).clip(0)
        return _spans_by_offsets(pieces, encoded, text, content)


def read_rows(batch: Batch, *, packs_text: bool) -> list[RowTokens]:
    """Return the rows of a batch, including tokens that are only targets.

    Such a token ends a row or, unless `packs_text`, a sample.
    """
    tensors = {name: tensor.cpu().numpy() for name, tensor in batch.tensors.items()}
    ids, targets = tensors["input_ids"], tensors["targets"]
    indices = np.full(targets.shape, -1)
    indices[targets != IGNORED] = np.arange(int((targets != IGNORED).sum()))
    documents = tensors.get("documents", np.ones_like(ids))
    sequences = []
    for row, real in enumerate(tensors.get("real", np.ones_like(ids, dtype=bool))):
        positions = np.flatnonzero(real)
        row_documents = documents[row, positions]
        is_last = (
            np.append(row_documents[1:] != row_documents[:-1], True) if len(positions) else np.zeros(0, dtype=bool)
        )
        if packs_text:
            is_last[:-1] = False
        is_only_target = is_last & (targets[row, positions] != IGNORED)
        read_targets = np.append(-1, np.where(is_only_target, -1, indices[row, positions])[:-1])[: len(positions)]
        insert_at = np.flatnonzero(is_only_target) + 1
        sequences.append(
            RowTokens(
                np.insert(ids[row, positions], insert_at, targets[row, positions[is_only_target]]),
                np.insert(row_documents, insert_at, row_documents[is_only_target]),
                np.insert(read_targets, insert_at, indices[row, positions[is_only_target]]),
            )
        )
    return sequences


def _shared_special_tokens(student: TokenTexts, teacher: TokenTexts, ends: tuple[int, int] | None) -> dict[int, int]:
    """Return the special tokens that student and teacher share: student's id → teacher's id.

    `ends`: ids of the two end tokens, which are equal to each other and to no other token.
    """
    student_end, teacher_end = ends or (-1, -1)
    teacher_ids = {content: token_id for token_id, content in teacher.special.items() if token_id != teacher_end}
    contents = {token_id: content for token_id, content in student.special.items() if token_id != student_end}
    shared = {token_id: teacher_ids[content] for token_id, content in contents.items() if content in teacher_ids}
    return shared if ends is None else shared | {ends[0]: ends[1]}


def _whole_character_range(content: bytes) -> tuple[int, int]:
    """Return the start of the first whole character and the end of the last."""
    head, tail = 0, len(content)
    while head < min(3, tail) and content[head] & 0xC0 == 0x80:
        head += 1
    for cut in range(1, min(4, tail - head + 1)):
        byte = content[tail - cut]
        if byte & 0xC0 == 0x80:
            continue
        num_bytes = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return head, tail if num_bytes <= cut else tail - cut
    return head, tail


def _piece_spans(pieces: list[bytes]) -> np.ndarray:
    """Return the bytes [start, end) of each piece in their concatenation, int64 (pieces, 2)."""
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    return np.stack([np.append(0, ends[:-1])[: len(ends)], ends], axis=1)


def _spans_by_offsets(pieces: list[bytes], encoded: Encoding, text: str, content: bytes) -> np.ndarray:
    """Return spans for a tokenizer that changes text (normalization, missing tokens): empty for changed tokens."""
    byte_offsets = np.append(0, np.cumsum([len(character.encode()) for character in text]))
    spans = np.zeros((len(pieces), 2), dtype=np.int64)
    position = 0
    for index, piece in enumerate(pieces):
        left, right = byte_offsets[encoded.starts[index]], byte_offsets[encoded.ends[index]]
        stripped = piece[1:] if position == 0 and piece.startswith(b" ") and not content.startswith(b" ") else piece
        end = position + len(stripped)
        overlaps = not stripped.strip() or (position < right and end > left)
        if stripped and overlaps and content[position:end] == stripped:
            spans[index] = position, end
            position = end
        else:
            position = max(position, int(right))
    return spans


def _match_spans(student: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of tokens with equal spans in two tokenizations, int64 (count,) each."""
    student_tokens, teacher_tokens = (np.flatnonzero(spans[:, 0] < spans[:, 1]) for spans in (student, teacher))
    width = max(int(student.max(initial=0)), int(teacher.max(initial=0))) + 1
    student_keys = student[student_tokens, 0] * width + student[student_tokens, 1]
    teacher_keys = teacher[teacher_tokens, 0] * width + teacher[teacher_tokens, 1]
    _, first, second = np.intersect1d(student_keys, teacher_keys, assume_unique=True, return_indices=True)
    return student_tokens[first], teacher_tokens[second]


def _build_input(rows: list[_Row], limit: int | None, isolated_documents: bool) -> TeacherInput:
    """Return the teacher's tensors, padded on the right, where a causal mask hides padding."""
    import torch

    windows: list[tuple[_Row, int, int, int]] = []  # tokens [start, end) of a row; those from `first_new` on are used
    for row in rows:
        start, end, first_new = 0, min(limit or len(row.ids), len(row.ids)), 1
        windows.append((row, start, end, first_new))
        while limit is not None and end < len(row.ids):
            first_new, end = end, min(end + max(1, limit // 2), len(row.ids))
            windows.append((row, end - limit, end, first_new))
    length = max(1, *(end - start for _, start, end, _ in windows))
    ids = np.zeros((len(windows), length), dtype=np.int64)
    documents = np.zeros_like(ids)
    positions, labels, targets = [], [], []
    for index, (row, start, end, first_new) in enumerate(windows):
        ids[index, : end - start] = row.ids[start:end]
        documents[index, : end - start] = row.documents[start:end]
        row_targets = np.array(row.targets, dtype=np.int64)
        aligned = np.flatnonzero(row_targets[first_new:end] >= 0) + first_new
        positions.append(index * length + aligned - 1 - start)
        labels.append(np.array(row.ids, dtype=np.int64)[aligned])
        targets.append(row_targets[aligned])
    tensors = {"input_ids": torch.from_numpy(ids)} | (document_tensors(documents) if isolated_documents else {})
    all_positions, all_labels, all_targets = (
        np.concatenate([np.zeros(0, np.int64), *arrays]) for arrays in (positions, labels, targets)
    )
    batch = Batch(tensors, len(all_positions), int((documents > 0).sum()))
    return TeacherInput(batch, torch.from_numpy(all_positions), torch.from_numpy(all_labels), all_targets)
