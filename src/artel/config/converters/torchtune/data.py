"""What a recipe of torchtune learns and from which data sets, in a run file."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from artel.config.converters.hub_data import local_or_hub
from artel.config.converters.keys import YamlKeys, a_flag, a_text, at_least_one, names, not_negative, one_of
from artel.errors import Problem
from artel.registry import OBJECTIVES

_LOADERS = ("json", "csv", "text", "parquet")  # as `source`, these are names of loaders
_USUAL_BLOCK = 2048


class Builder(NamedTuple):
    """A data set builder of torchtune."""

    objective: str
    source: str = ""
    subset: str = ""
    keys: dict[str, Any] = {}  # noqa: RUF012 - read only
    """Keys of the source in the run file."""
    learns_prompts: bool = False
    """What `train_on_input` is by itself."""


_BUILDERS = {
    "alpaca_dataset": Builder("chat", "tatsu-lab/alpaca", "", {"converter": "alpaca"}, learns_prompts=True),
    "alpaca_cleaned_dataset": Builder("chat", "yahma/alpaca-cleaned", "", {"converter": "alpaca"}, learns_prompts=True),
    "chat_dataset": Builder("chat"),
    "instruct_dataset": Builder("chat", "", "", {"converter": "alpaca", "mapping": {"instruction": "input"}}),
    "grammar_dataset": Builder(
        "chat", "liweili/c4_200m", "", {"converter": "alpaca", "mapping": {"instruction": "input"}}
    ),
    "samsum_dataset": Builder(
        "chat",
        "Samsung/samsum",
        "",
        {"converter": "alpaca", "mapping": {"instruction": "dialogue", "output": "summary"}},
    ),
    "slimorca_dataset": Builder("chat", "Open-Orca/SlimOrca-Dedup", "", {"converter": "sharegpt"}),
    "text_completion_dataset": Builder("causal"),
    "wikitext_dataset": Builder("causal", "EleutherAI/wikitext_document_level", "wikitext-103-v1", {"field": "page"}),
    "cnn_dailymail_articles_dataset": Builder("causal", "ccdv/cnn_dailymail", "", {"field": "article"}),
    "preference_dataset": Builder("preference"),
    "stack_exchange_paired_dataset": Builder(
        "preference",
        "lvwerra/stack-exchange-paired",
        "",
        {"mapping": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}},
    ),
    "hh_rlhf_helpful_dataset": Builder("preference", "RLHFlow/HH-RLHF-Helpful-standard"),
}
_FORMATS = {"chat": "chat", "preference": "preference"}
_PREFERENCE_LOSSES = {"DPOLoss": "dpo", "SimPOLoss": "simpo"}


def carry_data(old: YamlKeys) -> None:
    """The objective, the data sets, and what belongs to both."""
    places = ["dataset"] if old.has("dataset._component_") else [f"dataset.{n}" for n in range(old.count("dataset"))]
    if not places:
        old.problems.append(Problem(old.place, "names no text", "write dataset: {_component_: …, source: …}"))
        return
    builders = [_BUILDERS.get(_last(old.read(f"{at}._component_", a_text))) for at in places]
    usual = "preference" if _last(str(old.peek("loss._component_"))) in _PREFERENCE_LOSSES else "chat"
    objective = next((builder.objective for builder in builders if builder), usual)
    old.put("objective", objective)
    sources: list[dict[str, Any]] = []
    for at, builder in zip(places, builders, strict=True):
        if builder and builder.objective != objective:
            for key in old.below(at):
                old.leave(key, f"is for objective {builder.objective}, and the first data set for {objective}")
            continue
        sources.append(_source(old, at, f"data.sources.{len(sources)}", builder or Builder(objective), objective))
    old.put("data.sources", sources)
    _carry_loss(old, objective)
    _carry_validation(old, places[0], sources)
    _carry_length(old)
    _carry_packing(old, places, objective)
    old.put("data.dedup.exact", False)
    _carry_learned(old, places, builders, objective)


def _last(component: str | None) -> str:
    return (component or "").rpartition(".")[2]


def _source(old: YamlKeys, at: str, dotted: str, builder: Builder, objective: str) -> dict[str, Any]:
    """The source of the data set at `at`; `dotted` is its place in the run file."""
    name = old.read(f"{at}.source", a_text) or builder.source
    files = old.read(f"{at}.data_files", names) or []
    subset = old.read(f"{at}.subset", a_text) or old.read(f"{at}.name", a_text) or builder.subset
    split, rows = _split(old, f"{at}.split")
    data_set = local_or_hub(files[0] if name in _LOADERS and files else name, subset, split)
    source: dict[str, Any] = {"path": data_set.path, "format": _FORMATS.get(objective, "")}
    if len(files) > 1:
        source["path"] = files
    old.decided(f"{dotted}.path", f"{at}._component_", f"{at}.source", f"{at}.data_files", f"{at}.subset", f"{at}.name")
    if not data_set.path:
        source["path"] = "TEXTS.jsonl"
        old.comment(
            f"{dotted}.path", f"your file: {old.raw(f'{at}._component_')} is a builder that artel does not know"
        )
        old.leave(f"{at}._component_", "artel does not know this builder: write data.sources.path, and its form")
    elif data_set.doubt:
        old.comment(f"{dotted}.path", data_set.doubt)
    if data_set.path and _last(str(old.peek(f"{at}._component_"))) not in _BUILDERS:
        old.leave(f"{at}._component_", "artel does not know this builder: rows are recognized by their fields")
    if not source["format"]:
        source["format"] = "parquet" if data_set.is_on_hub else "auto"
    source |= {key: dict(value) if isinstance(value, dict) else value for key, value in builder.keys.items()}
    _carry_columns(old, at, dotted, source)
    if rows:
        source["rows"] = rows
        old.decided(f"{dotted}.rows", f"{at}.split")
    if data_set.is_on_hub and split != "train":
        old.decided(f"{dotted}.path", f"{at}.split")
    old.agree(f"{at}.split", "all records are taken")
    for key, reason in _OF_DATA_SET.items():
        old.leave_if_on(f"{at}.{key}", reason)
    for key in old.below(at):
        if key in old.unasked() and not key.endswith((".packed", ".train_on_input", ".split_across_pack")):
            old.leave(key, "artel has nothing in its place; write converter: module:function for what rows need")
    return source


_OF_DATA_SET = {
    "new_system_prompt": "write it into the conversations, or into chat.template: FILE",
    "filter_fn": "write data.clean.drop_documents, or converter: module:function",
    "add_eos": "documents end with the tokenizer's end token",
    "data_dir": "write the folder in data.sources.path",
    "partition": "write data.sources.rows: '[:10%]' for a part",
    "weight": "write data.sources.weight, how often the samples of a source come",
}


def _split(old: YamlKeys, key: str) -> tuple[str, str]:
    """(split, slice of it)."""
    written = old.read(key, a_text) or "train"
    match = re.fullmatch(r"([\w.-]+)(\[(?:-?\d+%?)?:(?:-?\d+%?)?\])?", written)
    if match is None:
        old.leave(key, "artel takes one split and one slice of it: data.sources.rows: '[:1000]'")
        return "train", ""
    return match[1], match[2] or ""


def _carry_columns(old: YamlKeys, at: str, dotted: str, source: dict[str, Any]) -> None:
    """Names of columns, and the form of conversations."""
    for key in ("column", "text_column"):
        column = old.read(f"{at}.{key}", a_text)
        if column:
            source["field"] = column
            old.decided(f"{dotted}.field", f"{at}.{key}")
    mapping = dict(source.get("mapping", {}))
    renamed = {"input": "instruction"} if source.get("converter") == "alpaca" and "input" in mapping.values() else {}
    for key in old.below(f"{at}.column_map"):
        name = key.rpartition(".")[2]
        mapping[renamed.get(name, name)] = old.read(key, a_text)
        old.decided(f"{dotted}.mapping", key)
    style = old.read(f"{at}.conversation_style", one_of({name: name for name in ("sharegpt", "openai")}))
    column = old.read(f"{at}.conversation_column", a_text)
    if style or column:
        is_sharegpt = style == "sharegpt" and column in (None, "conversations", "conversation")
        source["converter"] = "sharegpt" if is_sharegpt else "messages"
        if not is_sharegpt and column not in (None, "messages"):
            mapping["messages"] = column
        old.decided(f"{dotted}.converter", f"{at}.conversation_style", f"{at}.conversation_column")
    mapping = {mine: theirs for mine, theirs in mapping.items() if mine != theirs}
    if mapping:
        source["mapping"] = mapping


def _carry_loss(old: YamlKeys, objective: str) -> None:
    component = old.read("loss._component_", a_text)
    name = _last(component)
    if objective == "preference":
        loss = _PREFERENCE_LOSSES.get(name)
        old.put("preference.loss", loss or "dpo", "loss._component_")
        if loss is None:
            old.leave("loss._component_", "artel has dpo, ipo, kto, orpo and simpo, and dpo is taken")
        old.carry("loss.beta", "preference.beta", not_negative)
        old.carry("loss.label_smoothing", "preference.smoothing", not_negative)
        if loss == "simpo":
            old.put("preference.margin", 0.5)  # the default of torchtune's SimPOLoss
            old.carry("loss.gamma", "preference.margin", not_negative)
    elif re.search(r"CrossEntropy|CEWith", name) or component is None:
        old.agree("loss._component_", "the loss is the mean cross-entropy of the tokens that are learned")
    else:
        known = ", ".join(OBJECTIVES.names)
        old.refuse("loss._component_", f"{name} is a loss that artel does not have; its objectives are {known}")


def _carry_validation(old: YamlKeys, at: str, sources: list[dict[str, Any]]) -> None:
    """`train[:95%]` for training and `train[95%:]` for validation are a share that is held out."""
    if not old.below("dataset_val"):
        old.put("data.validation", 0)
        return
    same = all(old.peek(f"dataset_val.{key}") == old.peek(f"{at}.{key}") for key in ("_component_", "source", "subset"))
    patterns = ((at, r"train\[:(\d+)%\]"), ("dataset_val", r"train\[(\d+)%:\]"))
    slices = [re.fullmatch(pattern, str(old.peek(f"{section}.split"))) for section, pattern in patterns]
    if same and slices[0] and slices[1] and slices[0][1] == slices[1][1]:
        share = round(1 - int(slices[0][1]) / 100, 4)
        old.put("data.validation", share, *old.below("dataset_val"))
        old.decided("data.validation", f"{at}.split")
        sources[0].pop("rows", None)
        return
    builder = _BUILDERS.get(_last(old.read("dataset_val._component_", a_text)), Builder(""))
    split, rows = _split(old, "dataset_val.split")
    name = old.read("dataset_val.source", a_text) or builder.source
    files = old.read("dataset_val.data_files", names) or []
    subset = old.read("dataset_val.subset", a_text) or builder.subset
    data_set = local_or_hub(files[0] if files else name, subset, split)
    old.put("data.validation", data_set.path, *old.below("dataset_val"))
    if data_set.doubt:
        old.comment("data.validation", data_set.doubt)
    if rows:
        old.leave("dataset_val.split", "validation texts are those of a whole file")


def _carry_length(old: YamlKeys) -> None:
    block = old.read("tokenizer.max_seq_len", at_least_one)
    old.put("data.block", block or _USUAL_BLOCK, "tokenizer.max_seq_len")
    if block is None:
        old.comment("data.block", "the longest sample in tokens: tokenizer.max_seq_len is null, and sets no bound")
    elif old.raw("tokenizer.max_seq_len"):
        old.leave("tokenizer.max_seq_len", "what is longer is cut there; for conversations here see chat.too_long")


def _carry_packing(old: YamlKeys, places: list[str], objective: str) -> None:
    for at in places:
        packed = old.read(f"{at}.packed", a_flag)
        across = old.read(f"{at}.split_across_pack", a_flag)
        if objective == "causal":
            old.put("data.packing", "best_fit" if packed and across is False else "concatenate", f"{at}.packed")
            if packed is False:
                old.leave(f"{at}.packed", "artel joins texts and cuts them every data.block tokens")
            old.decided("data.packing", f"{at}.split_across_pack")
        elif OBJECTIVES[objective].packs_samples:  # artel's own default may pack them
            old.put("data.packing", "best_fit" if packed else "concatenate", f"{at}.packed")
        elif packed:
            old.leave(
                f"{at}.packed",
                f"a sample of objective {objective} stands alone, and train.batch counts samples, not packed "
                "sequences: multiply it by the samples that fit into max_seq_len",
            )
        else:
            old.agree(f"{at}.packed", "samples stand alone")


def _carry_learned(old: YamlKeys, places: list[str], builders: list[Builder | None], objective: str) -> None:
    """Whether prompts are learned too, which Alpaca's builders do by themselves."""
    learned = []
    for at, builder in zip(places, builders, strict=True):
        written = old.read(f"{at}.train_on_input", a_flag)
        learned.append(builder.learns_prompts if written is None and builder else bool(written))
    keys = [f"{at}.train_on_input" for at in places]
    if objective == "chat":
        old.put("chat.train_on", "all" if all(learned) else "assistant", *keys)
        if len(set(learned)) > 1:
            for key in keys:
                old.leave(key, "chat.train_on is one for all data sets: the assistant's turns are learned")
            old.tell("the data sets differ in whether prompts are learned; chat.train_on: assistant is taken")
    else:
        for key in keys:
            old.agree(key, f"objective {objective} has nothing of the kind")
