"""An architecture whose own code fails on plain token ids, in words: what it needs besides, nobody here can know."""

from __future__ import annotations

import traceback
from pathlib import Path

import transformers
from transformers import PreTrainedModel

import artel
from artel.errors import InputError

_LIBRARY = Path(transformers.__file__).parent
_ARTEL = Path(artel.__file__).parent


def architecture_error(error: Exception, model: PreTrainedModel) -> InputError | None:
    """The error as one of the run's model, if it was raised in transformers' code of architectures; None elsewhere.

    Calls of other libraries within that code count as it: a shape that does not fit was made there.
    """
    own = None
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.is_relative_to(_LIBRARY):
            own = f"{file.name}, line {frame.lineno}"
        elif file.is_relative_to(_ARTEL):
            own = None
    if own is None:
        return None
    words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    what = f"{model.config.model_type} cannot be trained on this: its code in transformers fails ({own}): {words}"
    return InputError.at("model", what, "check its sizes, or take another architecture")
