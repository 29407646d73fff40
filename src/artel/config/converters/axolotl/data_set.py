"""One data set of axolotl as a source of a run file."""

from __future__ import annotations

import re
from typing import Any

from artel.config.converters.hub_data import DataSet, local_or_hub
from artel.config.converters.keys import YamlKeys, a_text, names

TEXTS = ("completion", "pretrain")
"""Types of data sets that are plain texts."""

_FORMATS = ("json", "jsonl", "csv", "parquet", "text", "arrow")  # as `path`, these are names of loaders
# Roles that artel knows by these names.
_ROLES = {
    "system": {"system", "developer"},
    "user": {"user", "human", "prompter", "operator"},
    "assistant": {"assistant", "gpt", "chatgpt", "bot", "model", "char"},
    "tool": {"tool", "function", "observation", "function_response", "tool_response", "ipython"},
}
# Fields of the types of data sets, by artel's names for them; (type, converter, mapping).
_FORMS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (r"alpaca_chat\.load_qa|jeopardy|jeopardy_bot.*", "alpaca", {"instruction": "question", "output": "answer"}),
    (r"alpaca_chat\.load_camel_ai", "alpaca", {"instruction": "message_1", "output": "message_2"}),
    (
        r"alpaca_w_system\.load_open_orca.*|orcamini.*",
        "alpaca",
        {"instruction": "question", "output": "response", "system": "system_prompt"},
    ),
    (r"(alpaca|gpteacher|reflection|explainchoice|concisechoice|summarizetldr)\b.*|alpaca_\w+.*", "alpaca", {}),
    (r"(sharegpt|llama2_chat|pygmalion)\b.*", "sharegpt", {}),
    (r"(chat_template|messages)\b.*", "messages", {}),
    (r"oasst\b.*", "oasst", {}),
)
_PREFERENCES: tuple[tuple[str, str, dict[str, str]], ...] = (
    (r"chatml\.intel|llama3\.intel", "auto", {"prompt": "question"}),
    (
        r"(chatml|llama3)\.argilla",
        "auto",
        {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    ),
    (r"(chatml|llama3)\.icr", "auto", {"prompt": "input"}),
    (r"chat_template\.default", "auto", {}),
)
_WORDING = (
    "axolotl writes Alpaca's own words around each question (Below is an instruction …); here the tokenizer's chat "
    "template writes it, from the same fields, or User: … Assistant: … where it has none"
)


def carry_source(old: YamlKeys, at: str, dotted: str, objective: str) -> dict[str, Any]:
    """The source of the data set at `at`; `dotted` is its place in the run file."""
    data_set, paths = _files(old, at)
    source: dict[str, Any] = {"path": paths[0] if len(paths) == 1 else paths}
    old.decided(f"{dotted}.path", f"{at}.path")
    if data_set.doubt:
        old.comment(f"{dotted}.path", data_set.doubt)
    source["format"] = _FORMAT[objective] or ("parquet" if data_set.is_on_hub else "jsonl")
    if objective == "causal":
        _carry_text_field(old, at, dotted, source)
    else:
        _carry_form(old, at, dotted, source, objective)
    _carry_rows(old, at, dotted, source)
    _leave_rest(old, at)
    return source


_FORMAT = {"causal": "", "chat": "chat", "preference": "preference"}


def _files(old: YamlKeys, at: str) -> tuple[DataSet, list[str]]:
    """Where the data set is, and the paths of its files."""
    name = old.read(f"{at}.path", a_text) or ""
    files = old.read(f"{at}.data_files", names) or []
    split = (old.read(f"{at}.split", a_text) or "train").partition("[")[0] or "train"
    subset = old.read(f"{at}.name", a_text) or ""
    data_set = local_or_hub(name, subset, split)
    if name in _FORMATS and files:
        old.decided("data.sources", f"{at}.path", f"{at}.data_files")
        return DataSet(files[0]), files
    if files:
        folder = f"hf://datasets/{name}" if data_set.is_on_hub else name.rstrip("/")
        old.decided("data.sources", f"{at}.data_files")
        old.leave(f"{at}.name", "data_files are given, and are read")
        return DataSet(folder), [file if "://" in file else f"{folder}/{file}" for file in files]
    if data_set.is_on_hub:
        old.decided("data.sources", f"{at}.name")
    else:
        old.leave(f"{at}.name", f"name the files of that subset in path: {name}")
    return data_set, [data_set.path]


def _carry_rows(old: YamlKeys, at: str, dotted: str, source: dict[str, Any]) -> None:
    """`split: train[:10%]`: the part in brackets is `rows`."""
    split = old.read(f"{at}.split", a_text)
    match = re.fullmatch(r"([\w.-]+)(\[(?:-?\d+%?)?:(?:-?\d+%?)?\])?", split or "train")
    if match is None:
        old.leave(f"{at}.split", "artel takes one split and one slice of it: data.sources.rows: '[:1000]'")
        return
    if match[2]:
        source["rows"] = match[2]
        old.decided(f"{dotted}.rows", f"{at}.split")
    if match[1] != "train":
        if "refs/convert" in str(source["path"]):
            old.decided(f"{dotted}.path", f"{at}.split")
        else:
            old.leave(f"{at}.split", "name the files of that split in data.sources.path")
    old.agree(f"{at}.split", "all records are taken")


def _carry_text_field(old: YamlKeys, at: str, dotted: str, source: dict[str, Any]) -> None:
    field = old.read(f"{at}.field", a_text) or old.read(f"{at}.text_column", a_text)
    if field:
        source["field"] = field
        old.decided(f"{dotted}.field", f"{at}.field", f"{at}.text_column")
    if at.startswith("datasets"):
        old.decided("objective", f"{at}.type")
    old.agree(f"{at}.type", "texts are learned")
    if old.read(f"{at}.skip", lambda value: value):
        source["rows"] = f"[{old.raw(f'{at}.skip')}:]"
        old.decided(f"{dotted}.rows", f"{at}.skip")


def _carry_form(old: YamlKeys, at: str, dotted: str, source: dict[str, Any], objective: str) -> None:
    """`type` and the names of fields, as `converter` and `mapping`."""
    kind = old.raw(f"{at}.type")
    forms = _PREFERENCES if objective == "preference" else _FORMS
    converter, mapping, is_known = "auto", dict[str, str](), False
    if isinstance(kind, str):
        for pattern, name, fields in forms:
            if re.fullmatch(pattern, kind.partition(":")[0]):
                converter, mapping, is_known = name, dict(fields), True
                break
    mapping |= _written_fields(old, at)
    if objective == "chat" and old.below(f"{at}.type"):
        converter = "alpaca"
    if converter == "messages" and "messages" not in mapping and old.raw(f"{at}.conversation"):
        mapping["messages"] = "conversations"
    if converter != "auto":
        source["converter"] = converter
    if mapping:
        source["mapping"] = mapping
    old.decided(f"{dotted}.converter", f"{at}.type")
    if converter == "alpaca" and objective == "chat":
        old.leave(f"{at}.type", _WORDING)
    elif isinstance(kind, str) and not is_known:
        old.leave(
            f"{at}.type",
            "rows are recognized by their fields here; where they are not, write data.sources.mapping, or converter: "
            "module:function",
        )
    for name in (
        "field_messages",
        "field_tools",
        "field_chosen",
        "field_rejected",
        "message_field_role",
        "message_field_content",
    ):
        old.decided(f"{dotted}.mapping", f"{at}.{name}")
    for section in ("message_property_mappings", "type"):
        for key in old.below(f"{at}.{section}"):
            if key.rpartition(".")[2] in _MAPPED:
                old.decided(f"{dotted}.mapping", key)
            else:
                old.leave(key, _OF_TYPE.get(key.rpartition(".")[2], "the chat template is given role and content"))


_MAPPED = {
    *("role", "content", "field_instruction", "field_input", "field_output", "field_system", "field_prompt"),
    *("field_chosen", "field_rejected", "field_completion", "field_label"),
}
_OF_TYPE = dict.fromkeys(
    ("format", "no_input_format", "system_format", "prompt_format", "chosen_format", "rejected_format"),
    "how a conversation is written is the chat template's affair: chat.template",
)


def _written_fields(old: YamlKeys, at: str) -> dict[str, str]:
    """Names of fields that the data set gives, by artel's names; usual ones are left out."""
    fields = {
        "messages": f"{at}.field_messages",
        "tools": f"{at}.field_tools",
        "chosen": f"{at}.field_chosen",
        "rejected": f"{at}.field_rejected",
        "role": f"{at}.message_field_role",
        "content": f"{at}.message_field_content",
        "instruction": f"{at}.type.field_instruction",
        "input": f"{at}.type.field_input",
        "output": f"{at}.type.field_output",
        "system": f"{at}.type.field_system",
        "prompt": f"{at}.type.field_prompt",
        "completion": f"{at}.type.field_completion",
        "label": f"{at}.type.field_label",
    }
    mapping = {name: old.read(key, a_text) for name, key in fields.items() if old.has(key)}
    for name in ("chosen", "rejected"):
        if old.has(f"{at}.type.field_{name}"):
            mapping[name] = old.read(f"{at}.type.field_{name}", a_text)
    for name in ("role", "content"):
        key = f"{at}.message_property_mappings.{name}"
        if old.has(key):
            mapping[name] = old.read(key, a_text)
    return {name: field for name, field in mapping.items() if field and field != name}


def _leave_rest(old: YamlKeys, at: str) -> None:
    for key in old.below(f"{at}.roles"):
        role = key.split(".")[3]
        written = set(old.read(key, names) or []) if old.has(key) else set()
        if written <= _ROLES.get(role, set()):
            old.agree(key, "artel knows these roles")
        else:
            fix = f"artel knows as {role}: {', '.join(sorted(_ROLES.get(role, set())))}; rename the others"
            old.leave(key, fix)
    _carry_trained_roles(old, at)
    for name, fields in _READ_FIELDS.items():
        if old.raw(f"{at}.{name}") in fields:
            old.agree(f"{at}.{name}", "artel reads this field of itself")
        else:
            old.leave(f"{at}.{name}", f"artel reads {', '.join(fields)}; rename the field")
    for name, reason in _SAME.items():
        old.agree(f"{at}.{name}", reason)
    for name, reason in _LEFT.items():
        old.leave_if_on(f"{at}.{name}", reason)
    for key in old.unasked(at):
        old.leave(key, "artel has nothing in its place; write converter: module:function for what rows need")


def _carry_trained_roles(old: YamlKeys, at: str) -> None:
    roles = old.read(f"{at}.roles_to_train", names)
    if roles is None:
        return
    if set(roles) <= _ROLES["assistant"]:
        old.put("chat.train_on", "assistant", f"{at}.roles_to_train")
    else:
        old.put("chat.train_on", "all", f"{at}.roles_to_train")
        old.leave(f"{at}.roles_to_train", "chat.train_on is assistant, last or all: all is taken")


_READ_FIELDS = {
    "message_field_training": ("loss_weight", "weight", "train"),
    "field_thinking": ("reasoning_content", "thinking", "reasoning"),
}
_SAME = {
    "ds_type": "the suffix of a file tells what it holds",
    "template_thinking_key": "the chat template is given the thought",
    "preprocess_shards": "parts of a data set are prepared one after another: prepare.part",
    "trust_remote_code": "no code of a data set is run",
    "split_thinking": "a thought in <think> is recognized",
}
_LEFT = {
    "train_on_eos": "the end of each turn that is learned is learned, as with train_on_eos: turn",
    "train_on_eot": "the end of each turn that is learned is learned, as with train_on_eot: turn",
    "revision": "the hub's own parquet files are those of the main branch",
    "shards": "write data.sources.rows: '[:10%]' for a part",
    "shards_idx": "write data.sources.rows: '[:10%]' for a part",
    "drop_system_message": "system messages stay; leave them out of the file",
    "conversation": "the roles of a conversation are known by their names",
    "field_human": "write data.sources.mapping: {instruction: NAME}",
    "field_model": "write data.sources.mapping: {output: NAME}",
    "message_field_training_detail": "a turn is learned whole or not: its field train",
    "input_format": "how a conversation is written is the chat template's affair: chat.template",
    "input_transform": "write converter: module:function",
}
