"""How each printed command is run: which share a folder and in which order, what they read, how they are made small.

A command that is printed in several places is run once. Those that cannot run here name what runs in their place, and
why. A new command in a document needs a line here: the test says which has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from printed.inputs import Make


@dataclass(frozen=True)
class Step:
    """One printed command."""

    text: str
    more: str = ""
    """What the test appends: overrides that make it small."""
    leaves: str = ""
    """A file or folder that is there afterwards."""
    says: str = ""
    """What stands in its output."""
    status: int = 0
    """Its exit status."""
    typed: str = ""
    """What is typed while it runs."""
    instead: str = ""
    """What runs in its place."""
    why: str = ""
    """Why the command itself does not run here."""


@dataclass(frozen=True)
class Walk:
    """Commands in the order they are printed, in one working folder."""

    name: str
    steps: tuple[Step, ...]
    needs: tuple[Make, ...] = ()
    """What a user has in the folder before."""
    hub: tuple[str, ...] = ()
    """Models that were downloaded before."""
    before: tuple[str, ...] = ()
    """Commands printed elsewhere whose results these use, as the test types them."""
    deepspeed: bool = False
    """Needs the extra `deepspeed`."""
    package: str = ""
    """A module that an extra installs. Without it the walk is skipped."""
    long: bool = False
    """Takes a minute or more."""


STEPS = "train.steps=2 train.batch=8 train.compile=off"
SMALL_TEXT = f"tokenizer.train.vocab=400 data.block=32 {STEPS}"
SMALL_GPT2 = f"model.config.n_layer=1 model.config.n_embd=32 model.config.n_head=2 {SMALL_TEXT}"
SMALL_MODERNBERT = (
    "model.config.hidden_size=32 model.config.num_hidden_layers=2 model.config.num_attention_heads=2 "
    f"model.config.intermediate_size=32 {STEPS}"
)
SHORT = f"data.block=128 {STEPS}"
WINDOWS = f"{SHORT} span_qa.stride=16"
