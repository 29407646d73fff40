"""What LLaMA-Factory learns and from which data sets, in a run file."""

from __future__ import annotations

from artel.config.converters.keys import YamlKeys, a_flag, a_text, at_least_one, not_negative, one_of
from artel.config.converters.llama_factory.data_set import DataSets, Source
from artel.errors import Problem
from artel.registry import OBJECTIVES

_OBJECTIVES = {"pt": "causal", "sft": "chat", "dpo": "preference", "kto": "preference"}
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}


def carry_data(old: YamlKeys) -> None:
    """The objective, the data sets, and what belongs to both."""
    objective = _carry_objective(old)
    known = DataSets.of(old)
    _carry_sources(old, known, objective)
    _carry_validation(old, known, objective)
    old.carry("cutoff_len", "data.block", at_least_one)
    if objective != "causal":
        old.leave("cutoff_len", "what is longer is cut there, and left out here; write chat.too_long: truncate_left")
    _carry_packing(old, objective)
    old.carry("tokenized_path", "data.store", a_text)
    old.carry("preprocessing_num_workers", "prepare.workers", at_least_one)
    old.put("data.dedup.exact", False)
    _carry_learned(old, objective)
    _carry_template(old, objective)


def _carry_objective(old: YamlKeys) -> str:
    stage = old.read("stage", one_of({name: name for name in ("pt", "sft", "rm", "ppo", "dpo", "kto")}))
    objective = _OBJECTIVES.get(stage)
    if objective is None:
        known = ", ".join(OBJECTIVES.names)
        if stage == "rm":
            old.refuse("stage", "rm trains a reward model, which is not carried over: write objective: reward yourself")
        elif stage is not None:
            old.refuse(
                "stage", f"{stage} is nothing that artel learns; write pt, sft, dpo or kto (objectives: {known})"
            )
        return "chat"
    old.put("objective", objective, "stage")
    if objective != "preference":
        return objective
    _carry_preference(old, stage)
    return objective


def _carry_preference(old: YamlKeys, stage: str) -> None:
    if stage == "kto":
        old.put("preference.loss", "kto", "stage")
        old.agree("pref_loss", "stage kto has its own loss")
    else:
        names = ("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo")
        written = old.read("pref_loss", one_of({name: name for name in names}))
        if written is not None:
            old.put("preference.loss", _LOSSES.get(written, "dpo"), "pref_loss")
            if written not in _LOSSES:
                old.leave("pref_loss", f"artel has {', '.join(_LOSSES.values())} of pairs, and dpo is taken")
    old.carry("pref_beta", "preference.beta", not_negative)
    # Its SimPO has beta * (difference - gamma / beta), artel's beta * difference - margin: the same number.
    if stage == "dpo" and old.raw("pref_loss") == "simpo":
        old.carry("simpo_gamma", "preference.margin", not_negative)
    old.carry("dpo_label_smoothing", "preference.smoothing", not_negative)
    old.carry("kto_chosen_weight", "preference.desirable", not_negative)
    old.carry("kto_rejected_weight", "preference.undesirable", not_negative)


def _carry_sources(old: YamlKeys, known: DataSets, objective: str) -> None:
    names = old.read("dataset", _names) or []
    if not names and not old.problems:
        old.problems.append(Problem(old.place, "names no text", "write dataset: NAME, as in dataset_info.json"))
    sources = [known.source(name, objective) for name in names]
    rows = old.read("max_samples", at_least_one)
    for number, source in enumerate(sources):
        _note(old, f"data.sources.{number}.path", source)
        if rows:
            source.keys["rows"] = f"[:{rows}]"
    old.put("data.sources", [source.keys for source in sources], "dataset")
    old.decided("data.sources", "dataset_dir", "max_samples")


def _note(old: YamlKeys, dotted: str, source: Source) -> None:
    if source.doubt:
        old.comment(dotted, source.doubt)
    for line in source.differences:
        old.tell(line)


def _names(value: object) -> list[str]:
    """Names with commas between them, or a list of them."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(name, str) and name.strip() for name in listed):
        raise ValueError(f"{value!r} is not a list of names; write dataset: name, other")
    return [name.strip() for name in listed]


def _carry_validation(old: YamlKeys, known: DataSets, objective: str) -> None:
    evaluated = old.read("eval_dataset", _names)
    if evaluated:
        source = known.source(evaluated[0], objective)
        old.put("data.validation", source.keys["path"], "eval_dataset")
        _note(old, "data.validation", source)
        if len(evaluated) > 1:
            old.leave("eval_dataset", "validation texts are of one path: the first is taken")
        old.leave("val_size", "eval_dataset is given")
        return
    share = old.read("val_size", not_negative)
    if share is None or share < 1:
        old.put("data.validation", share or 0, "val_size")
    else:
        old.put("data.validation", 0.05, "val_size")
        old.leave("val_size", "is a number of rows, and data.validation a share of them: 0.05 is taken")


def _carry_packing(old: YamlKeys, objective: str) -> None:
    packs, neat = old.read("packing", a_flag), old.read("neat_packing", a_flag)
    if objective == "causal":
        if packs is False:
            old.leave("packing", "artel joins texts and cuts them every data.block tokens")
        old.decided("data.packing", "packing")
        old.put("data.packing", "concatenate")  # which LLaMA-Factory does of itself in this stage
        return
    if OBJECTIVES[objective].packs_samples:  # artel's own default may pack them
        old.put("data.packing", "best_fit" if packs or neat else "concatenate", "packing", "neat_packing")
        return
    for key, is_on in (("packing", packs), ("neat_packing", neat)):
        if is_on:
            old.leave(
                key,
                f"a sample of objective {objective} stands alone, and train.batch counts samples, not packed "
                "sequences: multiply it by the samples that fit into cutoff_len",
            )
        else:
            old.agree(key, "samples stand alone")


def _carry_learned(old: YamlKeys, objective: str) -> None:
    """The assistant's turns, the last one only, or everything."""
    prompts, last_only = old.read("train_on_prompt", a_flag), old.read("mask_history", a_flag)
    if objective == "chat" and (prompts or last_only):
        old.put("chat.train_on", "all" if prompts else "last", "train_on_prompt" if prompts else "mask_history")
    for key in ("train_on_prompt", "mask_history"):
        old.agree(key, "the assistant's turns are learned")


def _carry_template(old: YamlKeys, objective: str) -> None:
    name = old.read("template", a_text)
    if objective == "causal":
        old.agree("template", "objective causal has no conversations")
    elif name == "chatml":
        old.put("chat.template", "chatml", "template")
    elif name is not None:
        old.put("chat.template", "auto", "template")
        old.leave(
            "template",
            f"LLaMA-Factory has a template of its own for {name}; here it is the tokenizer's; for another write "
            "chat.template: FILE",
        )
