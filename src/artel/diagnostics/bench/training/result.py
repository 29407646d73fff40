"""What was measured of the contestants, with definitions: as JSON and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from artel.diagnostics.bench.figures import GIBIBYTE, median
from artel.diagnostics.bench.training.processes import Contestant
from artel.models.flops import peak_flops, tokens_a_second, utilisation

DEFINITIONS = {
    "tokens_per_second": "input tokens, without padding and filler, of whole optimizer steps over elapsed seconds, the "
    "device at rest when the clock starts and when it stops; the median of the rounds, in which the contestants take "
    "turns, each in a process of its own while the others sleep",
    "ratio_to_peers": "artel's tokens_per_second over the peer's",
    "mfu": "model FLOPs utilisation, 0 to 1: flops_a_token x tokens_per_second over the device's dense peak in the "
    "contestant's precision; null where the peak or the FLOPs are unknown",
    "flops_a_token": "of training: three times the matrix products of the model's forward, attention among them, pairs "
    "of tokens that a causal mask hides left out, nothing computed again counted; null where the model does not tell",
    "peak_memory_gib": "GiB since the process began: the most that PyTorch had allocated on the GPU, or on a CPU the "
    "largest resident size of the process",
    "first_step_seconds": "from the start of the process to the end of its first step, imports, loading the model and "
    "compiling included, and nobody else at work; compile_seconds of it in torch.compile, by its own count",
    "steps_of_rounds": "optimizer steps that each round's figure is of: fewer than asked for where the time limit was "
    "reached, and one round only where a single step takes longer",
    "loss_after": "mean loss in nats of the last step that all have done, all having begun with the same weights: what "
    "is nearly the same did the same work",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """All contestants, and what they were measured on."""

    contestants: list[Contestant]
    precisions: dict[str, str]
    """What each computes in."""
    device: str
    """Its name."""
    tokens: int
    """Of a step."""
    flops: float | None
    """Of training on a token."""
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        rates = {each.name: self.rate(each) for each in self.contestants}
        mine = rates.pop("artel", None)
        ratios = {name: mine / rate if mine and rate else None for name, rate in rates.items()}
        return {
            "ratio_to_peers": ratios,
            **self.about,
            "flops_a_token": self.flops,
            "contestants": {each.name: self._figures(each) for each in self.contestants},
            "loss_after": self.losses(),
            "definitions": DEFINITIONS,
        }

    def rates(self, contestant: Contestant) -> list[float]:
        """Tokens a second of each round."""
        found = [tokens_a_second(len(turn.losses) * self.tokens, turn.seconds) for turn in contestant.turns]
        return [rate for rate in found if rate is not None]

    def rate(self, contestant: Contestant) -> float | None:
        found = self.rates(contestant)
        return median(found) if found and not contestant.why else None

    def mfu(self, contestant: Contestant) -> float | None:
        peak = peak_flops(self.device, self.precisions[contestant.name])
        return utilisation(self.flops, self.rate(contestant), peak)

    def losses(self) -> dict[str, Any]:
        """The last step that all have done, counted from 1, and each one's loss there."""
        present = [each for each in self.contestants if each.losses and not each.why]
        step = min((len(each.losses) for each in present), default=0)
        return {"step": step, **{each.name: each.losses[step - 1] for each in present}}

    def table(self) -> str:
        """For people: a line for each contestant, and below it what the columns are."""
        losses = self.losses()
        heads = ["", "tokens/s", "artel is", "MFU", "peak GiB", "first step s", "compiling s", "steps",
                 f"loss at step {losses['step']}"]  # fmt: skip
        ratios = self.to_json()["ratio_to_peers"]
        lines = [heads]
        for each in self.contestants:
            if each.why:
                lines.append([each.name, f"not measured: {each.why.splitlines()[-1]}"])
                continue
            rate, ratio, mfu = self.rate(each), ratios.get(each.name), self.mfu(each)
            lines.append(
                [each.name, _number(rate, ",.0f"), "" if ratio is None else f"{ratio:.2f} x",
                 _number(mfu, ".1%"), f"{each.peak_memory / GIBIBYTE:.2f}", _number(each.first_step_seconds, ".1f"),
                 _number(each.first_compile_seconds, ".1f"), " + ".join(str(len(turn.losses)) for turn in each.turns),
                 f"{losses[each.name]:.4f}"]
            )  # fmt: skip
        whole = [line for line in lines if len(line) == len(heads)]
        widths = [max(len(line[column]) for line in whole) for column in range(len(heads))]
        widths[0] = max(len(line[0]) for line in lines)
        shown = ["  ".join(cell.rjust(width) if at else cell.ljust(width)
                           for at, (cell, width) in enumerate(zip(line, widths, strict=False))).rstrip()
                 for line in lines]  # fmt: skip
        return "\n".join([*shown, "", *(f"{name}: {said}" for name, said in DEFINITIONS.items())])

    def _figures(self, contestant: Contestant) -> dict[str, Any]:
        if contestant.why:
            return {"tokens_per_second": None, "why": contestant.why}
        precision = self.precisions[contestant.name]
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
