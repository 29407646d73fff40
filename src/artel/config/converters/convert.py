"""Any configuration that artel can convert, as a run file."""

from __future__ import annotations

import json
from typing import Any

from artel.config.converters.detect import is_impruver, refuse_other_json
from artel.config.converters.impruver import convert_impruver
from artel.config.converters.masked_lm_json import KEYS, from_masked_lm_json, is_masked_lm_json
from artel.config.converters.nq_recipe import convert_cfg
from artel.errors import InputError


def convert(text: str, place: str) -> tuple[dict[str, Any], list[str]]:
    """The run file of another tool's configuration, and a line for each key that could not be carried over."""
    if is_impruver(text):
        return convert_impruver(text, place)
    if not text.lstrip().startswith("{"):
        return convert_cfg(text, place)
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise InputError.at(place, f"is not valid JSON: {error}", "check its commas and quotes") from None
    refuse_other_json(tree, place)
    if not is_masked_lm_json(tree):
        fix = f"its keys are: {', '.join(KEYS)}; a run file needs no conversion"
        raise InputError.at(place, "is not the JSON of the masked-LM script", fix)
    return from_masked_lm_json(tree, place), []
