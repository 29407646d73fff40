"""The YAML of impruver (EvilFreelancer/impruver) as a run file: its data sets, tokenizer, model, adapter and trainer.

A key that is neither carried over nor known ends among those that are told: none is lost in silence.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from artel.config.legacy_keys import (
    OldKeys,
    a_flag,
    a_share,
    a_text,
    above_zero,
    at_least_one,
    did_you_mean,
    names,
    one_of,
)
from artel.config.legacy_trainer import STARTED, TRAINER_DEFAULTS, carry_ddp, carry_trainer
from artel.config.load import Key, parse
from artel.errors import InputError, Problem


def convert_impruver(text: str, place: str) -> tuple[dict[str, Any], list[str]]:
    """The run file of impruver's configuration, and `key = value: why, what instead` for what it cannot hold.

    Relative paths are looked for from the current folder, as impruver does. Raises InputError with all problems.
    """
    old = _Impruver(text, place)
    old.put("objective", "chat")
    old.carry("output_dir", "run", a_text)
    _carry_sources(old)
    _carry_tokenizer(old)
    _carry_model(old)
    _carry_quantisation(old)
    _carry_adapter(old)
    _carry_precision(old)
    carry_trainer(old)
    carry_ddp(old, "ddp")
    _leave_unknown(old)
    if old.problems:
        raise InputError(old.problems)
    return old.run_file(_ORDER), old.left_in_order()


class _Impruver(OldKeys):
    """impruver's configuration while it is turned into a run file; `datasets.0.name`, `model.config.n_layer`."""

    def __init__(self, text: str, place: str) -> None:
        super().__init__(place, _DEFAULTS, {})
        tree, self._places = parse(text, place)
        self.datasets = 0
        """How many data sets there are."""
        for name, value in tree.items():
            if name in _SECTIONS:
                self._give_section((name,), value)
            elif name == "datasets":
                self._give_datasets(value)
            else:
                self._give_key((name,), value)

    def where(self, *key: str | int) -> str:
        """`file:line: key` of a key or section that the file gives."""
        return f"{self._places[key]}: {'.'.join(map(str, key))}"

    def _give_section(self, key: Key, section: Any) -> None:
        if section is None:
            return
        if not isinstance(section, dict):
            self.problems.append(
                Problem(self.where(*key), f"{section!r} is not a section", f"write {key[-1]}: with keys below it")
            )
            return
        for name, value in section.items():
            if key == ("model",) and name == "config":
                self._give_section((*key, name), value)
            else:
                self._give_key((*key, name), value)

    def _give_datasets(self, datasets: Any) -> None:
        if datasets is None:
            return
        if not isinstance(datasets, list):
            what = f"{datasets!r} is not a list of data sets"
            self.problems.append(Problem(self.where("datasets"), what, "write - name: FILE below it"))
            return
        self.datasets = len(datasets)
        for number, dataset in enumerate(datasets):
            if dataset and isinstance(dataset, dict):
                self._give_section(("datasets", number), dataset)
            else:
                what = f"{dataset!r} is no data set"
                self.problems.append(Problem(self.where("datasets", number), what, "write - name: FILE, or OWNER/NAME"))

    def _give_key(self, key: Key, value: Any) -> None:
        where = self._places.get(key, self.place)  # a key that is a number or a date stands there under its text
        self.give(".".join(map(str, key)), value, _shown(value), where)


def _shown(value: Any) -> str:
    """A value on one line; a chat template is longer than anyone wants to see again."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def _mapping(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for pair in value.items() for name in pair):
        raise ValueError(f"{value!r} does not say which field is which; write mapping: {{instruction: question}}")
    return value


# Texts


def _carry_sources(old: _Impruver) -> None:
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
        old.put("data.block", block)


def _carry_block(old: _Impruver) -> int | None:
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


def _carry_only_target_loss(old: _Impruver) -> None:
    keys = _of_each(old, "only_target_loss")
    all_learned = [key for key in keys if old.read(key, a_flag) is False]
    if len(all_learned) == old.datasets:
        old.put("chat.train_on", "all")
        return
    for key in all_learned:
        old.leave(key, "chat.train_on is one for all data sets, and others learn the assistant's turns only")


def _of_each(old: _Impruver, name: str) -> list[str]:
    keys = [f"datasets.{number}.{name}" for number in range(old.datasets)]
    return [key for key in keys if old.has(key)]


def _source(old: _Impruver, number: int) -> dict[str, Any]:
    at = f"datasets.{number}"
    name = old.read(f"{at}.name", a_text)
    if old.below(at) and not old.has(f"{at}.name"):
        old.problems.append(Problem(old.where("datasets", number), "has no name", "write name: FILE, or OWNER/NAME"))
    source = {"path": _address(name or ""), "format": "chat"}
    if source["path"].startswith("hf://"):
        old.leave(f"{at}.name", f"artel cannot read {source['path']} yet; download its files, and write "
                                f"data.sources.{number}.path: FILES")  # fmt: skip
    # without a converter impruver takes the field `messages`
    source["converter"] = old.read(f"{at}.converter", _converter) or "messages"
    mapping = old.read(f"{at}.mapping", _mapping)
    if mapping:
        source["mapping"] = mapping
    split, rows = old.read(f"{at}.split", _split) or ("train", "")
    if rows:
        source["rows"] = rows
    if split != "train":
        old.leave(f"{at}.split", f"name the files of that split: data.sources.{number}.path, and .rows for a slice")
    old.leave(f"{at}.subset", f"name the files of that subset: data.sources.{number}.path")
    for end in ("bos", "eos"):
        old.leave(f"{at}.add_global_{end}", "the chat template decides with what a conversation begins and ends")
    return source


def _address(name: str) -> str:
    """A data set's name as a path: a file or folder that is there or is written as one, else a data set of the hub."""
    local = name.startswith((".", "/", "~")) or name.endswith((".json", ".jsonl", ".jsonl.gz", ".jsonl.zst"))
    return name if local or "://" in name or Path(name).exists() else f"hf://datasets/{name}"


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
    found = re.fullmatch(r"([\w.-]+)(\[(?:-?\d+%?)?:(?:-?\d+%?)?\])?", value.strip())
    return (found[1], found[2] or "") if found else (value, "")


def _carry_files(old: _Impruver) -> None:
    """Without data sets: files of conversations, which impruver calls composed."""
    path = old.read("train_path", a_text)
    if not old.has("train_path"):
        fix = "write datasets: with - name: FILE and converter: below it"
        old.problems.append(Problem(old.place, "names no text", fix))
    for key in ("train_path", "val_path"):
        file = old.read(key, a_text)
        if file is not None and _holds_tokens(Path(file)):
            old.refuse(key, f"{file} holds token ids and no texts; give the datasets that it was composed of")
    old.put("data.sources", [{"path": path, "format": "chat"}])
    old.put("data.validation", old.read("val_path", a_text) or 0.05)


def _holds_tokens(file: Path) -> bool:
    """Whether the file is what impruver's compose_dataset writes."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return '"input_ids"' in lines.readline(1000)
    except OSError:  # it is not there, or not to be read: that is told when its text is
        return False


# Tokenizer and model


def _carry_tokenizer(old: _Impruver) -> None:
    name = old.read("tokenizer.name", a_text)
    if name is not None and name != old.read("model.name", a_text):
        old.put("tokenizer.from", name)
    if old.read("tokenizer.class", a_text) not in (None, "transformers.AutoTokenizer"):
        old.leave("tokenizer.class", "the tokenizer's own files say which class it has")
    old.leave("tokenizer.special_tokens", "the special tokens are those of the tokenizer's own files")
    template = old.read("tokenizer.chat_template", a_text)
    if template is not None and not re.search(r"\{[{%]", template):  # a name or a file, not the template itself
        old.put("chat.template", template)
    elif template is not None:
        old.leave("tokenizer.chat_template", "save it as a file, and write chat.template: FILE")
    else:
        old.tell("tokenizer.chat_template is not given: for a tokenizer without one impruver writes each message as "
                 "bos, role, line feed, text, eos, artel as chatml; for another write chat.template: FILE")  # fmt: skip


def _carry_model(old: _Impruver) -> None:
    name = old.read("model.name", a_text)
    if name is not None:
        old.put("model.from", name)
        for key in ("model.config_class", *old.below("model.config")):
            old.leave(key, "model.name is given, and its own config.json is taken")
        if old.read("model.class", a_text) not in (None, "transformers.AutoModelForCausalLM"):
            old.leave("model.class", "the model's config.json says which class it has; code beside it is not run")
    elif old.has("model.config_class") or old.below("model.config"):
        _carry_architecture(old)
    elif not old.has("model.name"):
        fix = "write model: {name: FOLDER-OR-HUB-ID}, or config_class and config for one from scratch"
        old.problems.append(Problem(old.place, "names no model", fix))
    old.leave("model.attn_implementation", "artel chooses how attention is computed by device and model")


def _carry_architecture(old: _Impruver) -> None:
    """A model from scratch: the model type of its config class, and the keys that this type has."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = set(CONFIG_MAPPING_NAMES.values())
    module, _, class_name = (old.read("model.config_class", a_text) or "").rpartition(".")
    written = old.read("model.config.model_type", one_of({name: name for name in CONFIG_MAPPING_NAMES}))
    model_type = getattr(transformers, class_name).model_type if class_name in classes else written
    if model_type is None:
        if class_name:
            near = difflib.get_close_matches(class_name, sorted(classes), 1)
            fix = f"did you mean transformers.{near[0]}?" if near else "write model.config.model_type: gpt2, llama …"
            old.refuse("model.config_class", f"transformers has no {class_name}; {fix}")
        elif not old.has("model.config.model_type"):
            old.problems.append(
                Problem(old.where("model"), "does not say of what type the model is",
                        "write config_class: transformers.GPT2Config")
            )  # fmt: skip
        return
    old.put("model.config.model_type", model_type)
    if class_name and (module != "transformers" or class_name not in classes):
        old.leave("model.config_class", f"code of one's own is not run; transformers' {model_type} is taken")
    if written not in (None, model_type):
        old.leave("model.config.model_type", f"config_class says {model_type}")
    usual = (None, f"transformers.{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)}",
             "transformers.AutoModelForCausalLM")  # fmt: skip
    if old.read("model.class", a_text) not in usual:
        old.leave("model.class", f"transformers' causal model of type {model_type} is taken")
    plain = CONFIG_MAPPING[model_type]()
    known = {*plain.to_dict(), *plain.attribute_map}
    for key in old.below("model.config"):
        name = key.removeprefix("model.config.")
        if name == "model_type":
            continue
        if name in _CONFIG_LEFT:
            old.leave(key, _CONFIG_LEFT[name])
        elif name in known:
            old.put(key, old.raw(key))
        else:
            reason = f"{model_type} has no such key{did_you_mean(name, known)}"
            old.leave(key, _CONFIG_GONE.get(name, reason))


def _carry_quantisation(old: _Impruver) -> None:
    four, eight = old.read("model.load_in_4bit", a_flag), old.read("model.load_in_8bit", a_flag)
    if not four and not eight:
        return
    key, kind = ("model.load_in_8bit", "int8") if eight else ("model.load_in_4bit", "nf4")
    if four and eight:
        old.leave("model.load_in_4bit", "load_in_8bit is true too, and is what impruver takes")
    if not old.has("model.name"):
        old.leave(key, "a model from scratch has no weights to hold in fewer bits")
    elif not old.below("lora"):
        old.leave(key, "such weights are not trained themselves, and artel holds them so only under an adapter; write "
                       f"model.lora: {{rank: 16}} and model.quantise: {kind}")  # fmt: skip
    else:
        old.put("model.quantise", kind)


def _carry_adapter(old: _Impruver) -> None:
    given = old.below("lora")
    if not given:
        return
    if not old.has("model.name"):
        for key in given:
            old.leave(key, "an adapter changes a pretrained model, and this one is from scratch")
        return
    old.carry("lora.r", "model.lora.rank", at_least_one)
    old.carry("lora.lora_alpha", "model.lora.alpha", above_zero)
    old.carry("lora.lora_dropout", "model.lora.dropout", a_share)
    old.carry("lora.use_rslora", "model.lora.rslora", a_flag)
    old.carry("lora.use_dora", "model.lora.dora", a_flag)
    old.carry("lora.modules_to_save", "model.lora.save", names)
    target = old.read("lora.target_modules", names)
    if target == ["all-linear"]:
        old.put("model.lora.target", ["auto"])
    elif target is not None and all(re.fullmatch(r"[\w.]+", name) for name in target):
        old.put("model.lora.target", target)
    elif target is not None:
        old.leave("lora.target_modules", "artel goes by names, and takes all linear layers but the head; write "
                                         "model.lora.target")  # fmt: skip
    else:
        old.tell("lora.target_modules is not given: peft chooses a few layers by the model's type, artel takes all "
                 "linear layers but the head; write model.lora.target")  # fmt: skip
    if old.read("lora.bias", one_of({kind: kind for kind in ("none", "all", "lora_only")})) != "none":
        old.leave("lora.bias", "biases are not trained")
    if old.read("lora.task_type", a_text) != "CAUSAL_LM":
        old.leave("lora.task_type", "the objective decides: chat")
    if old.read("lora.inference_mode", a_flag):
        old.leave("lora.inference_mode", "an adapter that is not trained needs no run")


def _carry_precision(old: _Impruver) -> None:
    """The trainer's bf16 and fp16 go before the model's dtype, in which impruver loads the weights."""
    precisions = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "auto", "float16": "auto", "fp32": "fp32",
                  "float32": "fp32", "fp64": "fp32"}  # fmt: skip
    dtype = old.read("model.dtype", one_of({name: name for name in precisions}))
    bf16, fp16 = old.read("trainer.bf16", a_flag), old.read("trainer.fp16", a_flag)
    if bf16 or fp16:
        precision = "bf16" if bf16 else "auto"
        if dtype is not None and precisions[dtype] != precision:
            old.leave("model.dtype", "the trainer's bf16 or fp16 decides; artel keeps trained weights in fp32")
    else:
        precision = precisions[dtype] if dtype else ""
    no_fp16 = "train.precision is auto: bf16 where the device multiplies it natively, else fp32; fp16 if you write it"
    if fp16:
        old.leave("trainer.fp16", "trainer.bf16 decides" if bf16 else no_fp16)
    if not (bf16 or fp16) and dtype in ("fp16", "float16"):
        old.leave("model.dtype", no_fp16)
    if not (bf16 or fp16) and dtype == "fp64":
        old.leave("model.dtype", "artel computes in fp32 at most")
    if precision:
        old.put("train.precision", precision)


def _leave_unknown(old: _Impruver) -> None:
    for key in old.unasked():
        section, _, name = key.rpartition(".")
        if section == "ddp":
            old.leave(key, STARTED)
        else:
            known = _KNOWN.get(re.sub(r"\.\d+", "", section), set())
            whose = "artel's adapters have" if section == "lora" else "impruver has"
            old.leave(key, f"{whose} no such key{did_you_mean(name, known)}")


_ORDER = ("run", "seed", "objective", "data", "tokenizer", "model", "chat", "train", "validate", "checkpoint", "log",
          "track")  # fmt: skip
_SECTIONS = ("model", "lora", "tokenizer", "trainer", "ddp")
_DEFAULTS = {
    **TRAINER_DEFAULTS,
    # what peft's LoraConfig does of itself
    "lora.r": 8, "lora.lora_alpha": 8, "lora.lora_dropout": 0, "lora.bias": "none", "lora.task_type": "CAUSAL_LM",
}  # fmt: skip

_CONVERTERS = {
    "instruction_to_messages": "alpaca",
    "reasoning_to_messages": "alpaca",  # which takes the field `reasoning` for a thought
    "dialog_to_messages": "dialog",
    "char_dialog_to_messages": "character",
    "conversations_to_messages": "sharegpt",
    "bot_messages_to_messages": "messages",
}

_ATTENTION = "artel chooses how attention is computed by device and model"
_WEIGHTS = "trained weights are kept in fp32; train.precision says in what is computed"
_ID = "the tokenizer's is taken"
_CONFIG_LEFT = {
    "vocab_size": "the tokenizer's number of tokens is taken; write model.config.vocab_size for a larger one",
    "bos_token_id": _ID,
    "eos_token_id": _ID,
    "pad_token_id": _ID,
    "torch_dtype": _WEIGHTS,
    "dtype": _WEIGHTS,
    "_attn_implementation": _ATTENTION,
    "attn_implementation": _ATTENTION,
}
# Keys of older transformers, where the model type has them no more.
_CONFIG_GONE = {
    "n_ctx": "transformers has dropped it; max_position_embeddings (n_positions) is the length",
    "rope_theta": "write model.config.rope_parameters: {rope_type: default, rope_theta: …}",
    "rope_scaling": "write model.config.rope_parameters: {rope_type: …}",
}

# Where a slip of the pen is looked for; those of the trainer have a file of their own.
_KNOWN = {
    "": {"output_dir", "train_path", "val_path", "datasets", *_SECTIONS},
    "datasets": {"name", "converter", "split", "subset", "mapping", "add_global_bos", "add_global_eos",
                 "only_target_loss", "max_tokens_count"},
    "model": {"class", "name", "load_in_4bit", "load_in_8bit", "dtype", "config_class", "config",
              "attn_implementation"},
    "lora": {"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "modules_to_save", "bias",
             "task_type", "inference_mode", "use_qalora", "use_bdlora"},
    "tokenizer": {"class", "name", "max_tokens_count", "special_tokens", "chat_template"},
}  # fmt: skip
