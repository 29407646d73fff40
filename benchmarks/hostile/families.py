"""The families, in the order of the table; importing this module makes their cases known."""

from hostile import (  # noqa: F401
    checkpoints,
    containers,
    encodings,
    limits,
    model_folders,
    network,
    run_files,
    run_folders,
    served,
    signals,
    sources,
    stores,
    templates,
    tokenizers,
)
from hostile.case import CASES, Case

FAMILIES = (
    "sources", "containers", "encodings", "run files", "model folders", "tokenizers", "templates", "checkpoints",
    "stores", "run folders", "limits", "network", "signals",
)  # fmt: skip


def all_cases() -> list[Case]:
    """By family, as they stand in its file."""
    return sorted(CASES.values(), key=lambda case: FAMILIES.index(case.family))
