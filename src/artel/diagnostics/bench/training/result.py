"""The measurements of all contestants with their definitions, as JSON and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from artel.diagnostics.bench.figures import GIBIBYTE, median
from artel.diagnostics.bench.training.processes import Contestant
from artel.models.flops import peak_flops, tokens_a_second, utilization

DEFINITIONS = {
    "tokens_per_second": "input tokens, without padding and filler, of whole optimizer steps over elapsed seconds; the "
    "device is idle when the clock starts and when it stops; the median of the rounds, in which the contestants take "
    "turns, each in a process of its own while the others sleep",
    "ratio_to_peers": "artel's tokens_per_second over the peer's",
    "mfu": "model FLOPs utilisation, 0 to 1: flops_a_token x tokens_per_second over the device's dense peak in the "
    "contestant's precision; null where the peak or the FLOPs are unknown",
    "flops_a_token": "of training: three times the matrix products of the model's forward pass with attention; pairs "
    "of tokens that a causal mask hides and what is recomputed are not counted; null where unknown",
    "peak_memory_gib": "GiB since the process began: the most that PyTorch had allocated on the GPU, or on a CPU the "
    "largest resident size of the process",
    "first_step_seconds": "from the start of the process to the end of its first step, with imports, loading the model "
    "and compiling, while the others do not work; compile_seconds of them in torch.compile, by its own count",
    "steps_of_rounds": "optimizer steps in each round: fewer than --steps where the time limit was reached, and one "
    "round only where a single step takes longer",
    "loss_after": "mean loss in nats of the last step that all have done, from the same first weights: contestants "
    "whose losses are nearly the same did the same work",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """All contestants, and what they trained on."""

    contestants: list[Contestant]
    precision: str
    """What artel computes in, and every peer that does not name another."""
    device: str
    """The name of the device."""
    tokens: int
    """In a step."""
    flops: float | None
    """Of training on one token."""
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        rates = {each.name: self.rate(each) for each in self.contestants}
        artel = rates.pop("artel", None)
        ratios = {name: artel / rate if artel and rate else None for name, rate in rates.items()}
        return {
            "ratio_to_peers": ratios,
            **self.about,
            "flops_a_token": self.flops,
            "contestants": {each.name: self._figures(each) for each in self.contestants},
            "loss_after": self.losses(),
            "definitions": DEFINITIONS,
        }

    def rates(self, contestant: Contestant) -> list[float]:
        """Tokens per second of each round."""
        rates = [tokens_a_second(len(turn.losses) * self.tokens, turn.seconds) for turn in contestant.turns]
        return [rate for rate in rates if rate is not None]

    def rate(self, contestant: Contestant) -> float | None:
        rates = self.rates(contestant)
        return median(rates) if rates and not contestant.why else None

    def mfu(self, contestant: Contestant) -> float | None:
        peak = peak_flops(self.device, contestant.precision or self.precision)
        return utilization(self.flops, self.rate(contestant), peak)

    def losses(self) -> dict[str, Any]:
        """The last step that all have done, counted from 1, and the loss of each at that step."""
        present = [each for each in self.contestants if each.losses and not each.why]
        step = min((len(each.losses) for each in present), default=0)
        return {"step": step, **{each.name: each.losses[step - 1] for each in present}}

    def table(self) -> str:
        """For people: a line for each contestant, with the definitions of the columns below."""
        losses, ratios = self.losses(), self.to_json()["ratio_to_peers"]
        columns = ["tokens/s", "artel is", "MFU", "peak GiB", "first step s", "compiling s", "steps"]
        lines = [["", *columns, f"loss at step {losses['step']}"]]
        for each in self.contestants:
            if each.why:
                lines.append([each.name, f"not measured: {each.why.splitlines()[-1]}"])
                continue
            ratio = ratios.get(each.name)
            lines.append(
                [
                    each.name,
                    _number(self.rate(each), ",.0f"),
                    "" if ratio is None else f"{ratio:.2f} x",
                    _number(self.mfu(each), ".1%"),
                    f"{each.peak_memory / GIBIBYTE:.2f}",
                    _number(each.first_step_seconds, ".1f"),
                    _number(each.first_compile_seconds, ".1f"),
                    " + ".join(str(len(turn.losses)) for turn in each.turns),
                    f"{losses[each.name]:.4f}",
                ]
            )
        complete = [line for line in lines if len(line) == len(lines[0])]
        widths = [max(len(line[column]) for line in complete) for column in range(len(lines[0]))]
        widths[0] = max(len(line[0]) for line in lines)
        table = []
        for name, *cells in lines:
            padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=False)]
            table.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
        return "\n".join([*table, "", *(f"{name}: {text}" for name, text in DEFINITIONS.items())])

    def _figures(self, contestant: Contestant) -> dict[str, Any]:
        if contestant.why:
            return {"tokens_per_second": None, "why": contestant.why}
        precision = contestant.precision or self.precision
        return {
            "tokens_per_second": self.rate(contestant),
            "tokens_per_second_of_rounds": self.rates(contestant),
            "steps_of_rounds": [len(turn.losses) for turn in contestant.turns],
            "precision": precision,
            "mfu": self.mfu(contestant),
            "peak_flops": peak_flops(self.device, precision),
            "peak_memory_gib": contestant.peak_memory / GIBIBYTE,
            "first_step_seconds": contestant.first_step_seconds,
            "compile_seconds": contestant.first_compile_seconds,
        }


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
