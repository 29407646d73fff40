"""The layers that an adapter of peft adapts, in a run file."""

from __future__ import annotations

import re

from artel.config.converters.keys import OldKeys, names


def carry_target(old: OldKeys, key: str) -> None:
    """`target_modules` of peft: names of layers, a pattern, or all-linear."""
    target = old.read(key, names)
    if target in (["all-linear"], ["all"], ["all_linear"]):
        old.put("model.lora.target", ["auto"], key)
    elif target and all(re.fullmatch(r"[\w.]+", name) for name in target):
        old.put("model.lora.target", target, key)
    elif target:
        old.leave(key, "artel goes by names, and takes all linear layers but the head; write model.lora.target")
    else:
        old.tell(
            f"{key} is not given: peft chooses a few layers by the model's type, artel takes all "
            "linear layers but the head; write model.lora.target"
        )
