"""The data sets of axolotl's YAML."""

from __future__ import annotations

import re
from typing import Any

from artel.config.converters import readers as read
from artel.config.converters import trainer
from artel.config.converters.conversion import Conversion
from artel.config.converters.hub_data import SLICED_SPLIT, DataSet, local_or_hub
from artel.errors import Problem
from artel.registry import OBJECTIVES

ORDER = "the order of samples depends on seed only"
_TEXTS = ("completion", "pretrain")  # types of data sets that are plain texts
_LOADERS = ("json", "jsonl", "csv", "parquet", "text", "arrow")  # as `path`, these are names of loaders
# Roles that artel knows by these names.
_ROLES = {
    "system": {"system", "developer"},
    "user": {"user", "human", "prompter", "operator"},
    "assistant": {"assistant", "gpt", "chatgpt", "bot", "model", "char"},
    "tool": {"tool", "function", "observation", "function_response", "tool_response", "ipython"},
}
# (type of a data set, converter, artel's names of its fields). The first pattern that matches is taken.
_ORCA = {"instruction": "question", "output": "response", "system": "system_prompt"}
_ARGILLA = {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"}
_FORMS: dict[str, tuple[tuple[str, str, dict[str, str]], ...]] = {
    "chat": (
        (r"alpaca_chat\.load_qa|jeopardy|jeopardy_bot.*", "alpaca", {"instruction": "question", "output": "answer"}),
        (r"alpaca_chat\.load_camel_ai", "alpaca", {"instruction": "message_1", "output": "message_2"}),
        (r"alpaca_w_system\.load_open_orca.*|orcamini.*", "alpaca", _ORCA),
        (r"(alpaca|gpteacher|reflection|explainchoice|concisechoice|summarizetldr)\b.*|alpaca_\w+.*", "alpaca", {}),
        (r"(sharegpt|llama2_chat|pygmalion)\b.*", "sharegpt", {}),
        (r"(chat_template|messages)\b.*", "messages", {}),
        (r"oasst\b.*", "oasst", {}),
    ),
    "preference": (
        (r"chatml\.intel|llama3\.intel", "auto", {"prompt": "question"}),
        (r"(chatml|llama3)\.argilla", "auto", _ARGILLA),
        (r"(chatml|llama3)\.icr", "auto", {"prompt": "input"}),
        (r"chat_template\.default", "auto", {}),
    ),
}
# artel's names of fields → keys of a data set that name them; the last one that is there decides.
_FIELDS = {
    "messages": ("field_messages",),
    "tools": ("field_tools",),
    "chosen": ("field_chosen", "type.field_chosen"),
    "rejected": ("field_rejected", "type.field_rejected"),
    "role": ("message_field_role", "message_property_mappings.role"),
    "content": ("message_field_content", "message_property_mappings.content"),
    **{name: (f"type.field_{name}",) for name in "instruction input output system prompt completion label".split()},
}
_READ_FIELDS = {
    "message_field_training": ("loss_weight", "weight", "train"),
    "field_thinking": ("reasoning_content", "thinking", "reasoning"),
}


def is_text(kind: object) -> bool:
    return isinstance(kind, str) and kind.partition(":")[0].partition(".")[0] in _TEXTS


def carry_data(old: Conversion, section: str, objective: str) -> None:
    """The data sets, and what belongs to them."""
    sources: list[dict[str, Any]] = []
    for at in (f"{section}.{number}" for number in range(old.members(section))):
        if objective == "chat" and is_text(old.raw(f"{at}.type")):
            for key in old.within(at):
                old.leave(key, "the objective chat trains on conversations; train on plain texts in a separate run")
        else:
            sources.append(_source(old, at, f"data.sources.{len(sources)}", objective))
    if isinstance(old.raw(section), str):  # pretraining_dataset: NAME
        data_set = local_or_hub(old.raw(section))
        sources.append({"path": data_set.path, "format": "parquet" if data_set.is_on_hub else "auto"})
        old.decided("data.sources.0.path", section)
        old.comment("data.sources.0.path", data_set.doubt)
    if not sources:
        old.problems.append(Problem(old.place, "names no text", "write datasets: with - path: FILE below it"))
    old.put("data.sources", sources)
    tests = old.within("test_datasets")
    if tests:
        data_set = local_or_hub(old.get("test_datasets.0.path", read.text) or "", split="test")
        old.put("data.validation", data_set.path, "test_datasets.0.path")
        old.comment("data.validation", data_set.doubt)
        for key in tests:
            old.leave(key, "validation texts come from one path and are read like the first of data.sources")
    else:
        trainer.carry_share(old, "val_set_size")
    _carry_packing(old, objective)
    learns_all = old.get("train_on_inputs", read.flag) if objective == "chat" else None
    if learns_all is not None:
        old.put("chat.train_on", "all" if learns_all else "assistant", "train_on_inputs")
    if old.get("excess_length_strategy", read.one_of("drop truncate raise")) == "drop" or objective == "causal":
        old.agree("excess_length_strategy", "chat.too_long is skip")
    for key in ("shuffle_merged_datasets", "shuffle_before_merging_datasets"):
        if old.raw(key) is False:
            old.leave(key, ORDER)
    for key in old.given() if objective != "causal" else ():
        name = old.raw(key) if key.rpartition(".")[2] == "chat_template" and key.count(".") in (0, 2) else None
        if name is not None:
            old.put("chat.template", "chatml" if name == "chatml" else "auto", key)
        is_default = name == "tokenizer_default" or str(name).startswith("tokenizer_default_fallback_")
        if name not in (None, "chatml") and not is_default:
            what = f"axolotl has its own template for {name}; artel uses the tokenizer's"
            old.leave(key, f"{what}; for another write chat.template: FILE")


def _carry_packing(old: Conversion, objective: str) -> None:
    """Texts fill blocks, and conversations can; other samples stand alone."""
    packs = old.raw("sample_packing")
    if objective == "causal" and packs is False:
        old.leave("sample_packing", "artel joins texts and cuts them every data.block tokens; axolotl pads")
    if (objective == "causal" and packs in (True, False)) or (
        objective != "causal" and OBJECTIVES[objective].packs_samples  # artel's own default may pack them
    ):
        old.put("data.packing", "best_fit" if packs is True else "concatenate", "sample_packing")
    elif packs is True:
        old.leave("sample_packing", trainer.SAMPLES_STAND_ALONE.format(objective, "sequence_len"))


def _source(old: Conversion, at: str, dotted: str, objective: str) -> dict[str, Any]:
    """Return the source of the data set at `at`. `dotted`: its place in the run file."""
    data_set, paths = _files(old, at)
    source: dict[str, Any] = {"path": paths[0] if len(paths) == 1 else paths}
    old.decided(f"{dotted}.path", f"{at}.path")
    old.comment(f"{dotted}.path", data_set.doubt)
    source["format"] = objective if objective != "causal" else "parquet" if data_set.is_on_hub else "jsonl"
    if objective == "causal":
        field = old.get(f"{at}.field", read.text) or old.get(f"{at}.text_column", read.text)
        if field:
            source["field"] = field
            old.decided(f"{dotted}.field", f"{at}.field", f"{at}.text_column")
        if at.startswith("datasets"):
            old.decided("objective", f"{at}.type")
        if old.raw(f"{at}.skip"):
            source["rows"] = f"[{old.raw(f'{at}.skip')}:]"
            old.decided(f"{dotted}.rows", f"{at}.skip")
    else:
        _carry_form(old, at, dotted, source, objective)
    match = SLICED_SPLIT.fullmatch(old.get(f"{at}.split", read.text) or "train")
    if match is None:
        old.leave(f"{at}.split", "artel reads one split and one slice of it: data.sources.rows: '[:1000]'")
    elif match[2]:
        source["rows"] = match[2]
        old.decided(f"{dotted}.rows", f"{at}.split")
    if match and match[1] != "train" and "refs/convert" in str(source["path"]):
        old.decided(f"{dotted}.path", f"{at}.split")
    elif match and match[1] != "train":
        old.leave(f"{at}.split", "give the files of that split in data.sources.path")
    _carry_roles(old, at)
    for name, fields in _READ_FIELDS.items():
        if old.raw(f"{at}.{name}") not in fields:
            old.leave(f"{at}.{name}", f"artel reads {', '.join(fields)}; rename the field")
    return source


def _files(old: Conversion, at: str) -> tuple[DataSet, list[str]]:
    """Return the path or hub id of the data set, and the paths of its files."""
    name, files = old.get(f"{at}.path", read.text) or "", old.get(f"{at}.data_files", read.names) or []
    split = (old.get(f"{at}.split", read.text) or "train").partition("[")[0] or "train"
    data_set = local_or_hub(name, old.get(f"{at}.name", read.text) or "", split)
    if name in _LOADERS and files:
        old.decided("data.sources", f"{at}.path", f"{at}.data_files")
        return DataSet(files[0]), files
    if files:
        folder = f"hf://datasets/{name}" if data_set.is_on_hub else name.rstrip("/")
        old.decided("data.sources", f"{at}.data_files")
        old.leave(f"{at}.name", "data_files is set and takes precedence")
        return DataSet(folder), [file if "://" in file else f"{folder}/{file}" for file in files]
    if data_set.is_on_hub:
        old.decided("data.sources", f"{at}.name")
    else:
        old.leave(f"{at}.name", f"give the files of that subset in path: {name}")
    return data_set, [data_set.path]


def _carry_form(old: Conversion, at: str, dotted: str, source: dict[str, Any], objective: str) -> None:
    """`type` and the names of fields, as `converter` and `mapping`."""
    kind = old.raw(f"{at}.type")
    written = kind.partition(":")[0] if isinstance(kind, str) else ""
    form = next((form for form in _FORMS[objective] if re.fullmatch(form[0], written)), None)
    converter, mapping = (form[1], dict(form[2])) if form else ("auto", {})
    for mine, names in _FIELDS.items():
        for key in (f"{at}.{name}" for name in names if old.has(f"{at}.{name}")):
            mapping |= {mine: old.get(key, read.text)}
            old.decided(f"{dotted}.mapping", key)
            if mapping[mine] in (None, mine):
                del mapping[mine]
    if objective == "chat" and old.within(f"{at}.type"):
        converter = "alpaca"
    if converter == "messages" and "messages" not in mapping and old.raw(f"{at}.conversation"):
        mapping["messages"] = "conversations"
    if converter != "auto":
        source["converter"] = converter
    if mapping:
        source["mapping"] = mapping
    old.decided(f"{dotted}.converter", f"{at}.type")
    if converter == "alpaca" and objective == "chat":
        what = "axolotl puts Alpaca's prompt around each question (Below is an instruction …)"
        instead = "artel formats the same fields with the tokenizer's chat template, or as User: … Assistant: …"
        old.leave(f"{at}.type", f"{what}; {instead} if it has none")
    elif isinstance(kind, str) and form is None:
        fix = "if it does not, write data.sources.mapping, or converter: module:function"
        old.leave(f"{at}.type", f"artel recognizes rows by their fields; {fix}")


def _carry_roles(old: Conversion, at: str) -> None:
    for key in old.within(f"{at}.roles"):
        role = key.split(".")[3]
        known = _ROLES.get(role, set())
        if not set(old.get(key, read.names) or []) <= known:
            old.leave(key, f"artel's names for {role} are {', '.join(sorted(known))}; rename the others")
    trained = old.get(f"{at}.roles_to_train", read.names)
    if trained is not None:
        is_assistant = set(trained) <= _ROLES["assistant"]
        old.put("chat.train_on", "assistant" if is_assistant else "all", f"{at}.roles_to_train")
        if not is_assistant:
            old.leave(f"{at}.roles_to_train", "chat.train_on is assistant, last or all: artel uses all")
