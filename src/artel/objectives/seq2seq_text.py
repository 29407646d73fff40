"""Pairs of texts as an encoder-decoder reads and writes them: ids with special tokens, each cut to its own length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.tokens import Frame, Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.models.generate import Sampling

MULTIPLE = 16
"""Of tokens, up to which unequal lengths are filled."""


class Framed(NamedTuple):
    """A text with its special tokens, int64 (tokens,), and whether its end was cut off."""

    ids: np.ndarray
    is_cut: bool


class PairFraming:
    """The special tokens are those that the tokenizer puts around inputs and outputs; an output ends with its end token
    in any case, since the model must learn to end.
    """

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        """Raises InputError for languages that the tokenizer does not know, and lengths with no room for text."""
        config = run.seq2seq
        self._tokenizer = tokenizer
        self._has_language = bool(config.source_language)
        set_languages(tokenizer, config.source_language, config.target_language)
        self._input, self._output = tokenizer.frame(needed=False), _output_frame(tokenizer)
        self._special, self._prefix = _split_prefix(tokenizer, config.prefix)
        self.longest_input, self.longest_output = run.data.block, config.target or run.data.block
        lengths = (
            ("data.block", self.longest_input, len(self._special) + self._input.size),
            ("seq2seq.target" if config.target else "data.block", self.longest_output, self._output.size),
        )
        problems = [
            Problem(key, f"{most} leaves no room between {size} special tokens", f"write {size + 8} or more")
            for key, most, size in lengths
            if most <= size
        ]
        if problems:
            raise InputError(problems)

    @property
    def language(self) -> int | None:
        """The token of the language with which an output begins; None where it begins with its text or with BART's <s>,
        or where that token is what the decoder starts with (the first mBART).
        """
        return self._output.before[0] if self._has_language and self._output.before else None

    def inputs(self, texts: Sequence[str]) -> list[Framed]:
        """The texts behind the prefix, as the encoder reads them."""
        room = self.longest_input - len(self._special) - self._input.size
        return [
            _framed((*self._input.before, *self._special), ids, self._input.after, room)
            for ids in self._tokenizer.encode([self._prefix + text for text in texts])
        ]

    def outputs(self, texts: Sequence[str]) -> list[Framed]:
        """The texts as the decoder is to write them."""
        room = self.longest_output - self._output.size
        return [
            _framed(self._output.before, ids, self._output.after, room) for ids in self._tokenizer.encode(list(texts))
        ]


def set_languages(tokenizer: Tokenizer, source: str, target: str) -> None:
    """Let a tokenizer of several languages (mBART, NLLB) mark inputs and outputs with theirs. Raises InputError."""
    hf, problems = tokenizer.hf, []
    for name, code in (("source_language", source), ("target_language", target)):
        if code and not hasattr(hf, "src_lang"):
            what, fix = f"the tokenizer marks no languages, and {code!r} is given", "leave it out"
            problems.append(Problem(f"seq2seq.{name}", what, fix))
        elif code and code not in hf.get_vocab():
            what = f"the tokenizer has no language {code!r}"
            problems.append(Problem(f"seq2seq.{name}", what, "write its own codes: ru_RU (mBART), rus_Cyrl (NLLB)"))
    if target and not source:
        problems.append(Problem("seq2seq.source_language", "is empty beside target_language", "write it, too"))
    if problems:
        raise InputError(problems)
    if source:
        hf.src_lang, hf.tgt_lang = source, target or source


def _output_frame(tokenizer: Tokenizer) -> Frame:
    """What the tokenizer puts around a text that is to be written, with the end token."""
    encoded = tokenizer.hf(text_target="a", return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    text = [place for place, mark in enumerate(special) if not mark]
    before, after = ids[: text[0]], ids[text[-1] + 1 :]
    if tokenizer.end_id not in after:
        after = [*after, tokenizer.end_id]
    return Frame(tuple(before), (), tuple(after))


def _split_prefix(tokenizer: Tokenizer, prefix: str) -> tuple[list[int], str]:
    """The ids up to its last special token, and the text behind, which is encoded together with each input."""
    ends = [prefix.rfind(token) + len(token) for token in tokenizer.control_tokens if token in prefix]
    if not ends:
        return [], prefix
    (special,) = tokenizer.encode_with_offsets([prefix[: max(ends)]], control=True)
    return special.ids.tolist(), prefix[max(ends) :]


def _framed(before: Sequence[int], ids: np.ndarray, after: Sequence[int], room: int) -> Framed:
    framed = np.concatenate([np.array(part, dtype=np.int64) for part in (before, ids[:room], after)])
    return Framed(framed, len(ids) > room)


def stacked(rows: Sequence[np.ndarray], filler: int) -> np.ndarray:
    """int64 (rows, longest): of rows of unequal length, with `filler` behind them."""
    longest = max(map(len, rows))
    if min(map(len, rows)) < longest:
        longest = -(-longest // MULTIPLE) * MULTIPLE
    stacked = np.full((len(rows), longest), filler, dtype=np.int64)
    for row, ids in zip(stacked, rows, strict=True):
        row[: len(ids)] = ids
    return stacked


_ROWS = 16  # of texts that are written together


@dataclass(frozen=True, slots=True)
class Asked:
    """A text to write another for."""

    text: str
    sampling: Sampling
    is_over: Callable[[], bool] | None = None
    """Asked after each token; where it is true the writing ends."""
    on_text: Callable[[str], None] | None = None
    """Given each new part of the text as it is written: together they are the text or its beginning. Not called where
    beams are searched, and not for an input that is cut."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a model wrote for a text."""

    text: str
    is_finished: bool
    """False if there was no room for more, or no time."""
    tokens: int
    read: int
    """Tokens of the input."""
    is_cut: bool
    """Whether the input was cut."""


class Writer:
    """Writes with a model what `framing` and `tokenizer` make of texts."""

    def __init__(self, tokenizer: Tokenizer, framing: PairFraming) -> None:
        self._tokenizer, self._framing = tokenizer, framing

    def write(self, model: PreTrainedModel, asked: Sequence[Asked]) -> list[Written]:
        """What the model writes for each text. Those that are sampled are written alone, each by its own seed."""
        framed = self._framing.inputs([one.text for one in asked])
        made: dict[int, Written] = {}
        for places in _together([len(one.ids) for one in framed], asked):
            is_cut = any(framed[place].is_cut for place in places)
            written = self._write_together(model, [framed[place].ids for place in places], asked[places[0]], is_cut)
            for place, ids in zip(places, written, strict=True):
                made[place] = self._finished(model, framed[place].ids, framed[place].is_cut, ids)
        return [made[place] for place in range(len(asked))]

    def text(self, ids: np.ndarray) -> str:
        """The text of ids, without special tokens and white space around it."""
        return str(self._tokenizer.hf.decode(ids.tolist(), skip_special_tokens=True)).strip()

    def special_ids(self, model: PreTrainedModel) -> dict[str, Any]:
        """What the decoder starts with, as in training, and what ends a text; the language that it begins with."""
        import torch

        from artel.models.encoder_decoder import decoder_inputs
        from artel.models.generate import end_ids

        (example,) = self._framing.outputs(["a"])
        start = decoder_inputs(model, torch.from_numpy(example.ids)[None])[0, 0]
        ends = sorted({self._tokenizer.end_id, *end_ids(model)})
        ids: dict[str, Any] = {"decoder_start_token_id": int(start), "eos_token_id": ends}
        language = self._framing.language
        return ids | ({"forced_bos_token_id": language} if language is not None else {})

    def _write_together(
        self, model: PreTrainedModel, rows: list[np.ndarray], asked: Asked, is_cut: bool
    ) -> list[np.ndarray]:
        import torch

        from artel.models.encoder_decoder import write_rows
        from artel.models.generate import check_embedded

        for row in rows:
            check_embedded(model, self._tokenizer, row.tolist())
        device = model.get_input_embeddings().weight.device
        ids = torch.from_numpy(stacked(rows, self._tokenizer.pad_id)).to(device)
        lengths = torch.tensor([len(row) for row in rows], device=device)[:, None]
        mask = (torch.arange(ids.shape[1], device=device)[None] < lengths).long()
        on_row = None if asked.on_text is None or is_cut else self._reporter(asked.on_text)
        special_ids = self.special_ids(model)
        written = write_rows(model, ids, mask, asked.sampling, special_ids, is_over=asked.is_over, on_row=on_row)
        return list(written.cpu().numpy())

    def _reporter(self, on_text: Callable[[str], None]) -> Callable[[torch.Tensor], None]:
        """Gives `on_text` what each token adds: whole characters, and whole words where decoding changes their ends."""
        said = ""

        def report(row: torch.Tensor) -> None:
            nonlocal said
            text = self.text(row.cpu().numpy())
            if self._tokenizer.hf.clean_up_tokenization_spaces:  # "do n't" becomes "don't"
                text = text.rpartition(" ")[0]
            if len(text) > len(said) and text.startswith(said) and not text.endswith("\ufffd"):
                on_text(text[len(said) :])
                said = text

        return report

    def _finished(self, model: PreTrainedModel, read: np.ndarray, is_cut: bool, ids: np.ndarray) -> Written:
        ends = np.flatnonzero(np.isin(ids, self.special_ids(model)["eos_token_id"]))
        tokens = int(ends[0]) + 1 if len(ends) else len(ids)
        return Written(self.text(ids[:tokens]), len(ends) > 0, tokens, len(read), is_cut)


def _together(lengths: Sequence[int], asked: Sequence[Asked]) -> Iterator[list[int]]:
    """Places of texts that are written together: of like length, by the same settings; one that is watched, alone."""
    settings = [(one.sampling, one.is_over, one.on_text) for one in asked]
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    while order:
        first = settings[order[0]]
        most = _ROWS if first[0].temperature == 0 and first[2] is None else 1
        chosen = [place for place in order if settings[place] == first][:most]
        order = [place for place in order if place not in chosen]
        yield chosen
