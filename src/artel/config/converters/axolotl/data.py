"""What axolotl learns and from which data sets, in a run file."""

from __future__ import annotations

from typing import Any

from artel.config.converters.axolotl.data_set import TEXTS, carry_source
from artel.config.converters.hub_data import local_or_hub
from artel.config.converters.keys import YamlKeys, a_flag, a_name, a_text, at_least_one, from_zero, not_negative, one_of
from artel.errors import Problem
from artel.registry import OBJECTIVES

_LOSSES = {name: name for name in ("dpo", "ipo", "kto", "orpo", "simpo")}


def carry_data(old: YamlKeys) -> None:
    """The objective, the data sets, and what belongs to both."""
    section, objective = _objective(old)
    old.put("objective", objective)
    sources: list[dict[str, Any]] = []
    for number in range(old.count(section)):
        at = f"{section}.{number}"
        kind = old.raw(f"{at}.type")
        if objective == "chat" and _is_text(kind):
            for key in old.below(at):
                old.leave(key, "objective chat learns from conversations; texts are learned in a run of their own")
            continue
        sources.append(carry_source(old, at, f"data.sources.{len(sources)}", objective))
    if isinstance(old.raw(section), str):  # pretraining_dataset: NAME
        data_set = local_or_hub(old.raw(section))
        sources.append({"path": data_set.path, "format": "parquet" if data_set.is_on_hub else "auto"})
        old.decided("data.sources.0.path", section)
        if data_set.doubt:
            old.comment("data.sources.0.path", data_set.doubt)
    if not sources:
        old.problems.append(Problem(old.place, "names no text", "write datasets: with - path: FILE below it"))
    old.put("data.sources", sources)
    _carry_validation(old)
    old.carry("sequence_len", "data.block", at_least_one)
    _carry_packing(old, objective)
    old.carry("dataset_prepared_path", "data.store", a_text)
    for key in ("dataset_processes", "dataset_num_proc"):
        old.carry(key, "prepare.workers", at_least_one)
    deduplicates = old.read("dataset_exact_deduplication", a_flag) or False
    old.put("data.dedup.exact", deduplicates, "dataset_exact_deduplication")
    _carry_learned(old, objective)
    _carry_template(old, objective)
    for key in ("shuffle_merged_datasets", "shuffle_before_merging_datasets"):
        if old.raw(key) is False:
            old.leave(key, "the order of all samples is a function of seed")
        else:
            old.agree(key, "the order of all samples is a function of seed")


def _objective(old: YamlKeys) -> tuple[str, str]:
    """(section of the data sets, objective). What artel does not learn is refused."""
    rl = old.read("rl", a_name)
    if rl in _LOSSES:
        old.put("preference.loss", rl, "rl")
        betas = ["rl_beta", "dpo_beta", *(["orpo_alpha"] if rl == "orpo" else [])]
        if old.has("trl.beta"):
            old.carry("trl.beta", "preference.beta", not_negative)
            for key in filter(old.has, betas):
                old.leave(key, "trl.beta is given, and axolotl takes that")
        else:
            for key in betas:
                old.carry(key, "preference.beta", not_negative)
        _carry_simpo(old, rl)
        if rl == "simpo" and old.value("preference.beta") is None:
            old.put("preference.beta", 0.1)  # the default of trl's CPOConfig, by which axolotl trains
        old.carry("kto_desirable_weight", "preference.desirable", not_negative)
        old.carry("kto_undesirable_weight", "preference.undesirable", not_negative)
        old.carry("dpo_label_smoothing", "preference.smoothing", not_negative)
        return "datasets", "preference"
    known = ", ".join(OBJECTIVES.names)
    if rl:
        old.refuse("rl", f"{rl!r} is nothing that artel learns; write dpo, ipo, kto, orpo or simpo")
    for key, what in _OTHER_OBJECTIVES.items():
        if old.raw(key) is True or old.below(key):
            place = key if old.has(key) else old.below(key)[0]
            old.refuse(place, f"trains {what}; artel's objectives are {known}")
    if old.has("pretraining_dataset") or old.below("pretraining_dataset"):
        for key in old.below("datasets"):
            old.leave(key, "pretraining_dataset is given, and axolotl takes that")
        return "pretraining_dataset", "causal"
    kinds = [old.raw(f"datasets.{number}.type") for number in range(old.count("datasets"))]
    return "datasets", "causal" if kinds and all(map(_is_text, kinds)) else "chat"


_OTHER_OBJECTIVES = {
    "reward_model": "a reward model, which is not carried over: write objective: reward yourself",
    "process_reward_model": "a reward model of single steps, which artel does not",
    "diffusion": "a diffusion model of texts, which artel does not",
}


def _carry_simpo(old: YamlKeys, rl: str) -> None:
    """trl's loss has beta * (difference - gamma / beta), artel's beta * difference - margin: the same number."""
    if rl == "simpo":
        old.carry("simpo_gamma", "preference.margin", not_negative)


def _is_text(kind: object) -> bool:
    return isinstance(kind, str) and kind.partition(":")[0].partition(".")[0] in TEXTS


def _carry_validation(old: YamlKeys) -> None:
    tests = old.below("test_datasets")
    if tests:
        data_set = local_or_hub(old.read("test_datasets.0.path", a_text) or "", split="test")
        old.put("data.validation", data_set.path, "test_datasets.0.path")
        if data_set.doubt:
            old.comment("data.validation", data_set.doubt)
        for key in tests:
            old.leave(key, "validation texts are read as the first of data.sources is, from one path")
        old.leave_if_on("val_set_size", "test_datasets are given, and are what is validated")
        return
    share = old.read("val_set_size", not_negative)
    if share is None or share < 1:
        old.put("data.validation", share or 0, "val_set_size")
    else:
        old.put("data.validation", 0.05, "val_set_size")
        old.leave("val_set_size", "is a number of rows, and data.validation a share of them: 0.05 is taken")


def _carry_packing(old: YamlKeys, objective: str) -> None:
    """Texts fill blocks, and conversations can; other samples stand alone."""
    packs = old.raw("sample_packing")
    if objective == "causal":
        if packs is True:
            old.put("data.packing", "best_fit", "sample_packing")
        elif packs is False:
            old.put("data.packing", "concatenate", "sample_packing")
            old.leave("sample_packing", "artel joins texts and cuts them every data.block tokens, where axolotl pads")
    elif OBJECTIVES[objective].packs_samples:  # artel's own default may pack them
        old.put("data.packing", "best_fit" if packs is True else "concatenate", "sample_packing")
    elif packs is True:
        old.leave(
            "sample_packing",
            f"a sample of objective {objective} stands alone, and train.batch counts samples, not packed sequences: "
            "multiply it by the samples that fit into sequence_len",
        )
    old.agree("sample_packing", "samples stand alone")
    for key in ("eval_sample_packing", "pad_to_sequence_len", "pad_to_multiple_of", "streaming"):
        old.agree(key, "changes the speed, and nothing that is learned")


def _carry_learned(old: YamlKeys, objective: str) -> None:
    """train_on_inputs, and what is done with conversations that are too long."""
    if objective == "chat":
        learns_all = old.read("train_on_inputs", a_flag)
        if learns_all is not None:
            old.put("chat.train_on", "all" if learns_all else "assistant", "train_on_inputs")
    else:
        old.agree("train_on_inputs", f"objective {objective} has nothing of the kind")
    strategy = old.read("excess_length_strategy", one_of({name: name for name in ("drop", "truncate", "raise")}))
    if strategy == "drop" or objective == "causal":
        old.agree("excess_length_strategy", "chat.too_long is skip")
    else:
        old.leave("excess_length_strategy", "chat.too_long is skip; write split or truncate_left")


def _carry_template(old: YamlKeys, objective: str) -> None:
    keys = [key for key in old.given() if key.rpartition(".")[2] == "chat_template" and key.count(".") in (0, 2)]
    for key in keys:
        name = old.raw(key)
        if objective == "causal":
            old.agree(key, "objective causal has no conversations")
        elif name == "chatml":
            old.put("chat.template", "chatml", key)
        elif name == "tokenizer_default" or str(name).startswith("tokenizer_default_fallback_"):
            old.put("chat.template", "auto", key)
        else:
            old.put("chat.template", "auto", key)
            old.leave(
                key,
                f"axolotl has a template of its own for {name}; here it is the tokenizer's; for another write "
                "chat.template: FILE",
            )
    for key in old.given():
        if key.rpartition(".")[2] == "chat_template_jinja" and old.has(key):
            old.leave(key, "save it as a file, and write chat.template: FILE")
    old.read("max_prompt_len", from_zero)
    old.leave("max_prompt_len", "data.block bounds prompt and answer together")
