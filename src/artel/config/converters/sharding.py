"""How other tools spread a run over processes: FSDP of accelerate, DeepSpeed's files."""

from __future__ import annotations

import re
from typing import Any

from artel.config.converters.keys import Section, a_flag, a_text

_FILE = "is a DeepSpeed configuration within the file; save it as JSON, and write parallel.deepspeed: FILE"
_WRAPS = "artel shards layer by layer, whatever their class"
_SAVES = "checkpoints are sharded, and RUN/model is whole"
_OF_FSDP = {
    "transformer_layer_cls_to_wrap": _WRAPS,
    "auto_wrap_policy": _WRAPS,
    "min_num_params": _WRAPS,
    "version": "artel shards by FSDP2",
    "use_orig_params": "artel shards by FSDP2, which keeps the parameters",
    "state_dict_type": _SAVES,
    "final_state_dict_type": _SAVES,
    "cpu_ram_efficient_loading": "each process reads its own shards of the weights",
    "sync_module_states": "each process reads its own shards of the weights",
    "limit_all_gathers": "artel leaves the order of transfers to FSDP2",
    "backward_prefetch": "artel leaves the order of transfers to FSDP2",
    "forward_prefetch": "artel leaves the order of transfers to FSDP2",
}
_STRATEGIES = {
    "FULL_SHARD": "fsdp",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hsdp",
    "HYBRID_SHARD_ZERO2": "hsdp",
}
_NUMBERS = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}


def carry_deepspeed(section: Section, name: str) -> None:
    """The file of DeepSpeed; a configuration written out within the other file is left."""
    if isinstance(section.raw(name), str):
        section.carry(name, "parallel.deepspeed", a_text)
    else:
        section.leave(name, _FILE)
    for key in section.old.below(section.key(name)):
        section.old.leave(key, f"{name} {_FILE}")


def carry_fsdp(section: Section) -> None:
    """`fsdp` (full_shard auto_wrap offload) and `fsdp_config`, with and without the prefix fsdp_ in it."""
    options = _options(section.raw("fsdp"))
    keys = section.old.below(section.key("fsdp_config"))
    written = {key.rpartition(".")[2].removeprefix("fsdp_"): key for key in keys if key.count(".") == 1}
    values = {name: section.old.raw(key) for name, key in written.items()}
    is_sharded = bool(options or (values and section.has("fsdp_version")) or "version" in values)
    strategy = _strategy(options, values)
    if is_sharded:
        section.put("parallel.data", strategy, "fsdp")
    unknown = [option for option in options if option.upper() not in {*_STRATEGIES, "AUTO_WRAP", "OFFLOAD"}]
    if unknown:
        section.leave("fsdp", f"artel has nothing in the place of {', '.join(unknown)}")
    for name in ("sharding_strategy", "reshard_after_forward"):
        if name in written:
            _decide(section, written[name], strategy if is_sharded else "")
    _note_strategy(section, written, values)
    if "offload" in options or values.get("offload_params") is True:
        section.put("parallel.offload", "cpu", "fsdp")
        if "offload_params" in written:
            section.old.put("parallel.offload", "cpu", written["offload_params"])
    elif "offload_params" in written:
        section.old.agree(written["offload_params"], "nothing is offloaded")
    if "activation_checkpointing" in written:
        recomputes = section.old.read(written["activation_checkpointing"], a_flag)
        mode = "full" if recomputes else "none"
        section.old.put("train.activation_checkpointing", mode, written["activation_checkpointing"])
        if section.peek("gradient_checkpointing") not in (None, recomputes):
            section.leave("gradient_checkpointing", f"{written['activation_checkpointing']} decides: {mode}")
    for name, key in written.items():
        if name in _OF_FSDP:
            section.old.agree(key, _OF_FSDP[name])
        elif name == "mixed_precision_policy":
            section.old.leave(key, "train.precision says in what layers compute")
    unasked = set(section.old.unasked())
    for key in keys:
        if key in unasked:
            section.old.leave(key, "artel shards by FSDP2, and has no such option")
    section.agree("fsdp_version", "artel shards by FSDP2")
    section.leave("fsdp_config", "is no list of options within this file; write parallel: {data: fsdp}")
    section.agree("fsdp_transformer_layer_cls_to_wrap", _WRAPS)


def _decide(section: Section, key: str, strategy: str) -> None:
    if strategy:
        section.old.put("parallel.data", strategy, key)
    else:
        section.old.leave(key, "fsdp is not given; write parallel.data: fsdp, zero2 or hsdp")


def _note_strategy(section: Section, written: dict[str, str], values: dict[str, Any]) -> None:
    """What of the two ways to say how weights are shared is unknown, or decides nothing."""
    strategy = values.get("sharding_strategy")
    if strategy is None:
        return
    if _NUMBERS.get(str(strategy), str(strategy).upper()) not in _STRATEGIES:
        section.old.leave(written["sharding_strategy"], f"artel knows {', '.join(_STRATEGIES)}; write parallel.data")
    elif "reshard_after_forward" in written:
        section.old.leave(written["reshard_after_forward"], "sharding_strategy is given, and decides")


def _options(value: Any) -> list[str]:
    """The words of `fsdp`, which may be a text, a list or true."""
    if value is True:
        return ["full_shard"]
    words = value if isinstance(value, list) else re.split(r"[\s,]+", value) if isinstance(value, str) else []
    return [str(word).lower() for word in words if word]


def _strategy(options: list[str], values: dict[str, Any]) -> str:
    """artel's mode of data parallelism: whether weights are kept, shared, or shared within a host."""
    written = str(values.get("sharding_strategy") or "").upper()
    written = _NUMBERS.get(written, written)
    if written in _STRATEGIES:
        return _STRATEGIES[written]
    resharded = values.get("reshard_after_forward")
    for option in options:
        if option.upper() in _STRATEGIES and resharded is not False:
            return _STRATEGIES[option.upper()]
    return "zero2" if resharded is False else "fsdp"
