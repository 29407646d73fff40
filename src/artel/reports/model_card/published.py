"""What of a run is published: the facts that a model card needs beside the run's folder."""

from __future__ import annotations

from dataclasses import dataclass

MAIN = "main"


@dataclass(frozen=True, slots=True)
class Published:
    """A model of a run, as it will lie on the hub."""

    repo: str
    """OWNER/NAME."""
    auto_class: str
    """The transformers class that opens it."""
    objective: str
    """Its name in the run file."""
    does: str
    """What the model does, as a clause."""
    pipeline_tag: str
    """The hub's task; empty if it has none for it."""
    usage: str
    """Lines of Python that ask `model` with `tokenizer`."""
    command: str
    """A command of artel that asks the model in a folder named as the repository."""
    model_type: str
    """As in config.json; of an adapter that of its base."""
    parameters: int
    """Numbers in the weights' files."""
    step: int | None = None
    """The step of the run that it was saved at; None where the run does not tell."""
    revision: str = MAIN
    is_adapter: bool = False
    base_model: str = ""
    """The hub id of the model that training began with; empty from scratch, or where it is on no hub."""
    license: str = ""
    languages: tuple[str, ...] = ()
