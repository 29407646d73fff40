"""Texts that an encoder and a decoder write for others, by transformers' `generate`: framed, in groups, read back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.objectives.seq2seq.framing import PairFraming, stacked
from artel.tokens import Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.models.generate import Sampling

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
