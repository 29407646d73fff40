"""The YAML of impruver (EvilFreelancer/impruver) as a run file: its data sets, tokenizer, model, adapter and trainer.

A key that is not carried over is reported, also an unknown one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from artel.config.converters.fitting import fit_together
from artel.config.converters.hub_data import local_or_hub
from artel.config.converters.impruver.keys import SECTIONS, Impruver
from artel.config.converters.impruver.model import (
    carry_adapter,
    carry_model,
    carry_precision,
    carry_quantization,
    carry_tokenizer,
)
from artel.config.converters.keys import (
    Converted,
    Section,
    a_flag,
    a_text,
    at_least_one,
    did_you_mean,
    top_level_keys,
)
from artel.config.converters.tool import Tool
from artel.config.converters.training_arguments import (
    STARTED,
    carry_ddp,
    carry_trainer,
    leave_trainer_rest,
    leave_unknown_arguments,
)
from artel.errors import Problem


def is_impruver(text: str) -> bool:
    """True for impruver's YAML, also a broken one; `model` and `tokenizer` are keys of run files too."""
    keys = top_level_keys(text)
    own = {"output_dir", "train_path", "val_path", "datasets", "lora", "trainer", "ddp"}
    return "data" not in keys and len(keys & own) >= 2


def convert_impruver(text: str, place: str) -> Converted:
    """The run file of impruver's configuration.

    Relative paths start at the current folder, as in impruver. Raises InputError with all problems.
    """
    old = Impruver(text, place)
    old.put("objective", "chat")
    old.carry("output_dir", "run", a_text)
    _carry_sources(old)
    old.put("data.packing", "concatenate")  # a row is a conversation; artel's own default may pack them
    carry_tokenizer(old)
    carry_model(old)
    carry_quantization(old)
    carry_adapter(old)
    carry_precision(old)
    trainer = Section(old, "trainer.")
    carry_trainer(trainer)
    leave_trainer_rest(trainer)
    leave_unknown_arguments(trainer)
    carry_ddp(Section(old, "ddp."))
    _leave_unknown(old)
    fit_together(old)
    return old.converted(_ORDER)


def _mapping(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for pair in value.items() for name in pair):
        raise ValueError(f"{value!r} does not say which field is which; write mapping: {{instruction: question}}")
    return value


def _carry_sources(old: Impruver) -> None:
    block = _carry_block(old)
    if old.datasets:
        old.put("data.sources", [_source(old, number) for number in range(old.datasets)])
        old.put("data.validation", 0.05)  # impruver shuffles, and takes the last twentieth
        for key in ("train_path", "val_path"):
            old.leave(key, "artel keeps what it prepares in its token store, data.store or the cache folder")
        _carry_only_target_loss(old)
    else:
        _carry_files(old)
    if block is not None:
        keys = [
            key for key in ("tokenizer.max_tokens_count", *_of_each(old, "max_tokens_count")) if old.raw(key) == block
        ]
        old.put("data.block", block, *keys)


def _carry_block(old: Impruver) -> int | None:
    """data.block, the most tokens that a conversation of any data set may have; impruver has a number for each."""
    common = old.read("tokenizer.max_tokens_count", at_least_one)
    own = {key: old.read(key, at_least_one) for key in _of_each(old, "max_tokens_count")}
    block = max([count for count in [common, *own.values()] if count is not None], default=None)
    for key, count in own.items():
        if count not in (None, block):
            old.leave(key, f"data.block is one for all data sets: {block}")
    if common not in (None, block):
        old.leave("tokenizer.max_tokens_count", f"a data set has more, and data.block is one for all: {block}")
    return block


def _carry_only_target_loss(old: Impruver) -> None:
    keys = _of_each(old, "only_target_loss")
    all_learned = [key for key in keys if old.read(key, a_flag) is False]
    for key in keys:
        if key not in all_learned:
            old.agree(key, "the assistant's turns are learned")
    if len(all_learned) == old.datasets:
        old.put("chat.train_on", "all", *all_learned)
        return
    for key in all_learned:
        old.leave(key, "chat.train_on is one for all data sets, and others learn the assistant's turns only")


def _of_each(old: Impruver, name: str) -> list[str]:
    keys = [f"datasets.{number}.{name}" for number in range(old.datasets)]
    return [key for key in keys if old.has(key)]


def _source(old: Impruver, number: int) -> dict[str, Any]:
    at = f"datasets.{number}"
    name = old.read(f"{at}.name", a_text)
    if old.below(at) and not old.has(f"{at}.name"):
        old.problems.append(Problem(old.where("datasets", number), "has no name", "write name: FILE, or OWNER/NAME"))
    split, rows = old.read(f"{at}.split", _split) or ("train", "")
    data_set = local_or_hub(name or "", old.read(f"{at}.subset", a_text) or "", split)
    source = {"path": data_set.path, "format": "chat"}
    old.decided(f"data.sources.{number}.path", f"{at}.name")
    if data_set.doubt:
        old.comment(f"data.sources.{number}.path", data_set.doubt)
    if data_set.is_on_hub:
        old.decided(f"data.sources.{number}.path", f"{at}.subset", f"{at}.split")
    # without a converter impruver takes the field `messages`
    source["converter"] = old.read(f"{at}.converter", _converter) or "messages"
    old.decided(f"data.sources.{number}.converter", f"{at}.converter")
    mapping = old.read(f"{at}.mapping", _mapping)
    if mapping:
        source["mapping"] = mapping
        old.decided(f"data.sources.{number}.mapping", f"{at}.mapping")
    if rows:
        source["rows"] = rows
        old.decided(f"data.sources.{number}.rows", f"{at}.split")
    if split != "train" and not data_set.is_on_hub:
        old.leave(f"{at}.split", f"name the files of that split: data.sources.{number}.path, and .rows for a slice")
    else:
        old.agree(f"{at}.split", "all records are taken")
    if not data_set.is_on_hub:
        old.leave(f"{at}.subset", f"name the files of that subset: data.sources.{number}.path")
    for end in ("bos", "eos"):
        old.leave(f"{at}.add_global_{end}", "the chat template decides with what a conversation begins and ends")
    return source


def _converter(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w+(\.\w+)+", value):
        raise ValueError(f"{value!r} is not module.function; write impruver.instruction_to_messages")
    module, _, function = value.rpartition(".")
    own = module.split(".")[0] == "impruver" and function in _CONVERTERS
    return _CONVERTERS[function] if own else f"{module}:{function}"


def _split(value: object) -> tuple[str, str]:
    """The split's name and its slice: `train[:1000]`. What else can be written there is kept as a name."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a split; write train[:1000]")
    match = re.fullmatch(r"([\w.-]+)(\[(?:-?\d+%?)?:(?:-?\d+%?)?\])?", value.strip())
    return (match[1], match[2] or "") if match else (value, "")


def _carry_files(old: Impruver) -> None:
    """Without data sets: files of conversations, which impruver calls composed."""
    path = old.read("train_path", a_text)
    if not old.has("train_path"):
        fix = "write datasets: with - name: FILE and converter: below it"
        old.problems.append(Problem(old.place, "names no text", fix))
    for key in ("train_path", "val_path"):
        file = old.read(key, a_text)
        if file is not None and _holds_tokens(Path(file)):
            old.refuse(key, f"{file} holds token ids and no texts; give the datasets that it was composed of")
    old.put("data.sources", [{"path": path, "format": "chat"}], "train_path")
    old.put("data.validation", old.read("val_path", a_text) or 0.05, "val_path")


def _holds_tokens(file: Path) -> bool:
    """Whether the file is what impruver's compose_dataset writes."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return '"input_ids"' in lines.readline(1000)
    except OSError:  # a missing or unreadable file is reported when its text is read
        return False


def _leave_unknown(old: Impruver) -> None:
    for key in old.unasked():
        section, _, name = key.rpartition(".")
        if section == "ddp":
            old.leave(key, STARTED)
        else:
            known = _KNOWN.get(re.sub(r"\.\d+", "", section), set())
            whose = "artel's adapters have" if section == "lora" else "impruver has"
            old.leave(key, f"{whose} no such key{did_you_mean(name, known)}")


_ORDER = tuple("run seed objective data tokenizer model chat train validate parallel checkpoint log track".split())
_CONVERTERS = {
    "instruction_to_messages": "alpaca",
    "reasoning_to_messages": "alpaca",  # which takes the field `reasoning` for a thought
    "dialog_to_messages": "dialog",
    "char_dialog_to_messages": "character",
    "conversations_to_messages": "sharegpt",
    "bot_messages_to_messages": "messages",
}

# Where a slip of the pen is looked for; those of the trainer have a file of their own.
_KNOWN = {
    "": {"output_dir", "train_path", "val_path", "datasets", *SECTIONS},
    "datasets": set(
        "name converter split subset mapping add_global_bos add_global_eos only_target_loss max_tokens_count".split()
    ),
    "model": set("class name load_in_4bit load_in_8bit dtype config_class config attn_implementation".split()),
    "lora": set(
        (
            "r lora_alpha lora_dropout target_modules use_rslora use_dora modules_to_save bias task_type "
            "inference_mode use_qalora use_bdlora"
        ).split()
    ),
    "tokenizer": {"class", "name", "max_tokens_count", "special_tokens", "chat_template"},
}

IMPRUVER = Tool("impruver", is_impruver, convert_impruver, is_no_run_file=True)
