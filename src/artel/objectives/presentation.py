"""How an objective is presented to users who have not chosen it yet, and to those who download its models."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Presentation:
    """Facts for `artel new`, model cards and the hub."""

    does: str
    """A clause about what its models do."""
    verb: str = ""
    """The same in one word, offered by `artel new`: write. Defaults to the objective's name."""
    pipeline_tag: str = ""
    """The hub's task for its models: text-generation. Empty if the hub has none."""
    finetuning_rate: float = 5e-5
    """Peak learning rate for finetuning all weights; adapters use four times as much."""
    is_offered: bool = True
    """False if `artel new` does not offer it, because it needs more than texts."""
