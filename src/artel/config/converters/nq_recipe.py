"""The `.cfg` of the distributed Natural Questions recipe (neuro-inc/ml-recipe-distributed-pytorch) as a run file.

A key that cannot be carried over is reported, never lost silently.
"""

from __future__ import annotations

import difflib
import re

from artel.config.converters.keys import Converted, OldKeys, Reader, a_number, a_text, at_least_one, one_of
from artel.config.converters.tool import Tool
from artel.config.schema.quantities import read_count
from artel.errors import InputError, Problem
from artel.registry import OPTIMIZERS


def convert_cfg(text: str, place: str) -> Converted:
    """The run file of the recipe's configuration. Raises InputError with all its problems."""
    recipe = _Recipe(text, place)
    for key, (dotted, read) in _CARRIED.items():
        recipe.carry(key, dotted, read)
    _carry_folder(recipe)
    _carry_source(recipe)
    _carry_batch(recipe)
    _carry_schedule(recipe)
    _carry_best(recipe)
    _carry_precision(recipe)
    _leave(recipe)
    return recipe.converted(_ORDER)


class _Recipe(OldKeys):
    """A configuration of the recipe while it is converted."""

    def __init__(self, text: str, place: str) -> None:
        super().__init__(place, _DEFAULTS, {"objective": "span_qa", "span_qa": {"heads": "five"}})
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                self._parse(line.strip(), f"{place}:{number}")
        if not set(self.given()) & _KNOWN:
            fix = "artel config convert --help says which configurations it reads; a run file needs no conversion"
            raise InputError.at(place, "is no old configuration that artel knows", fix)

    def _parse(self, line: str, where: str) -> None:
        match = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(\S.*?)(?:\s+#.*)?", line)
        if match is None:
            self.problems.append(
                Problem(where, "is not of the form key = value", "write lr = 1e-5; comments begin with #")
            )
            return
        key, value = match[1], match[2].strip("\"'")
        if key in self._written:
            self.problems.append(Problem(where, f"the key {key} is given twice", "keep one of them"))
        self.give(key, None if value == "None" else value, value, where)


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"{value!r} is neither True nor False")
    return value.lower() == "true"


def _balanced(value: str) -> str:
    return "balanced" if _flag(value) else "none"


def _carry_folder(recipe: _Recipe) -> None:
    folder, name = recipe.read("dump_dir", a_text), recipe.read("experiment_name", a_text)
    if name:
        recipe.put("run", f"{folder.rstrip('/')}/{name}" if folder else name, "dump_dir", "experiment_name")
    else:
        recipe.leave("dump_dir", "there is no experiment_name; write run: FOLDER")


def _carry_source(recipe: _Recipe) -> None:
    path = recipe.read("data_path", a_text)
    if recipe.read("dummy_dataset", _flag):
        recipe.put("data.sources", [{"format": "dummy", "kind": "questions"}], "dummy_dataset")
        recipe.leave(
            "data_path",
            "dummy_dataset is True, and questions are made up instead; for the real ones write "
            f"data.sources: [{{path: {path}, format: nq}}]",
        )
    elif path:
        recipe.put("data.sources", [{"path": path, "format": "nq"}], "data_path")
    recipe.agree("dummy_dataset", "no questions are made up")


def _carry_batch(recipe: _Recipe) -> None:
    batch, parts = recipe.read("train_batch_size", at_least_one), recipe.read("batch_split", at_least_one)
    if not batch:
        return
    recipe.put("train.batch", batch, "train_batch_size")
    recipe.leave(
        "train_batch_size",
        "the recipe gave this to each process, and train.batch is shared by all of them; "
        "multiply it by the number of processes that the recipe ran",
    )
    if parts:
        recipe.put("train.micro_batch", max(1, batch // parts), "batch_split")


def _carry_schedule(recipe: _Recipe) -> None:
    """The recipe's AdamW (transformers' old one) and its linear schedule; without warmup it has no schedule."""
    recipe.put("train.betas", [0.9, 0.999])
    recipe.put("train.epsilon", 1e-6)
    share = recipe.read("warmup_coef", a_number)
    if share is None:
        return
    recipe.put("train.schedule", "linear" if share else "constant", "warmup_coef")
    if 0 <= share < 1:
        recipe.put("train.warmup", share, "warmup_coef")
    else:
        recipe.leave("warmup_coef", "is no share of the run from 0 to below 1; write train.warmup")


def _carry_best(recipe: _Recipe) -> None:
    metric = recipe.read("best_metric", a_text)
    if metric not in _BEST:
        recipe.leave("best_metric", f"artel has no such figure; write checkpoint.best: {', '.join(_FIGURES)}")
        recipe.leave("best_order", "each figure of artel knows which way it improves")
        return
    figure, better = _BEST[metric]
    recipe.put("checkpoint.best", figure, "best_metric")
    if recipe.read("best_order", one_of({">": ">", "<": "<"})) != better:
        better_is = "higher" if better == ">" else "lower"
        recipe.leave("best_order", f"of {figure}, {better_is} is better in artel, and cannot be turned round")
    else:
        recipe.agree("best_order", "each figure of artel knows which way it improves")


def _carry_precision(recipe: _Recipe) -> None:
    level = recipe.read("apex_level", one_of({level: level for level in ("O0", "O1", "O2", "O3")}))
    recipe.put("train.precision", "fp32" if level in (None, "O0") else "auto", "apex_level")
    if level not in (None, "O0"):
        recipe.leave(
            "apex_level",
            "train.precision is auto: bf16 where the device multiplies it natively, weights "
            "in fp32; write fp32 for no mixed precision",
        )


def _leave(recipe: _Recipe) -> None:
    """Report keys without a place in a run file: always, or only when they are on."""
    for key, reason in _LEFT.items():
        if recipe.read(key, str) is not None:
            recipe.leave(key, reason)
    for key, reason in _LEFT_WHEN_ON.items():
        if recipe.read(key, _flag):
            recipe.leave(key, reason)
        else:
            recipe.agree(key, "is off")
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if recipe.read(key, a_number) not in (None, 0.1):  # 0.1 is what BERT and RoBERTa have of themselves
            recipe.leave(key, "model.from keeps the dropout of its config.json; change it there")
        else:
            recipe.agree(key, "the model has it of itself")
    if recipe.read("optimizer", one_of({"adam": "adam", "adamod": "adamod"})) == "adamod":
        known = ", ".join(OPTIMIZERS.names)
        recipe.leave("optimizer", f"artel has no AdaMod, and adamw is taken; write train.optimizer: {known}")
    else:
        recipe.agree("optimizer", "adamw is taken")
    for key in recipe.given():
        if key not in _KNOWN:
            near = difflib.get_close_matches(key, sorted(_KNOWN), 1)
            fix = f"did you mean {near[0]}?" if near else "artel config explain prints the keys of a run file"
            recipe.leave(key, f"the recipe has no such key; {fix}")


_ORDER = ("run", "seed", "objective", "data", "model", "span_qa", "train", "checkpoint")

# Defaults of the recipe that differ from artel's, so that the run stays the same.
_DEFAULTS = {
    "model": "bert-base-uncased",
    "n_epochs": "10",
    "train_batch_size": "128",
    "lr": "1e-5",
    "weight_decay": "0.01",
    "warmup_coef": "0.05",
    "max_seq_len": "384",
    "max_question_len": "64",
    "doc_stride": "128",
    "w_start_reg": "0",
    "w_end_reg": "0",
    "smooth_alpha": "0.01",
    "best_metric": "map",
    "best_order": ">",
}

_CARRIED: dict[str, tuple[str, Reader]] = {
    "seed": ("seed", read_count),
    "max_seq_len": ("data.block", read_count),
    "model": ("model.from", a_text),
    "max_question_len": ("span_qa.question", read_count),
    "doc_stride": ("span_qa.stride", read_count),
    "w_start": ("span_qa.weights.start", a_number),
    "w_end": ("span_qa.weights.end", a_number),
    "w_start_reg": ("span_qa.weights.start_position", a_number),
    "w_end_reg": ("span_qa.weights.end_position", a_number),
    "w_cls": ("span_qa.weights.answer_class", a_number),
    "loss": ("span_qa.class_loss", one_of({"ce": "cross_entropy", "focal": "focal", "smooth": "smooth"})),
    "smooth_alpha": ("span_qa.smoothing", a_number),
    "focal_alpha": ("span_qa.focal_alpha", a_number),
    "focal_gamma": ("span_qa.focal_gamma", a_number),
    "train_label_weights": ("span_qa.class_weights", _balanced),
    "train_sampler_weights": ("span_qa.balanced_sampling", _flag),
    "n_epochs": ("train.epochs", a_number),
    "lr": ("train.learning_rate", a_number),
    "weight_decay": ("train.weight_decay", a_number),
    "max_grad_norm": ("train.clip", a_number),
}

_BEST = {"map": ("mean_average_precision", ">"), "loss": ("loss", "<"), "f1": ("f1", ">")}
_FIGURES = [figure for figure, _ in _BEST.values()]

_TOKENIZER = "the tokenizer is that of model.from; for another write tokenizer.from: FOLDER"
_STARTED = "processes are started by artel train --nproc, --nnodes and --node-rank, or by torchrun"
_LEFT = {
    "vocab_file": _TOKENIZER,
    "merges_file": _TOKENIZER,
    "lowercase": "the tokenizer of model.from decides this; for another write tokenizer.from: FOLDER",
    "handle_chinese_chars": "the tokenizer of model.from decides this; for another write tokenizer.from: FOLDER",
    "layer_norm_eps": "model.from keeps that of its config.json; change it there",
    "bpe_dropout": "artel always cuts a text into the same tokens",
    "last": "the same command resumes a stopped run; to begin with its weights write model.from: RUN/model",
    "gpu": "devices are found; CUDA_VISIBLE_DEVICES= keeps a run on the CPU",
    "n_jobs": "all cores are used; train.threads bounds them",
    "test_batch_size": "validation takes as many windows at a time as training; write train.micro_batch",
    "apex_verbosity": "there is no apex",
    "apex_loss_scale": "bf16 needs no scaling of the loss",
    "processed_data_path": "what is prepared is kept by what it was made from, in data.store or the cache folder",
    "log_file": "figures go to metrics.jsonl in the run's folder",
    "config_file": "give that file to artel config convert too",
    "model_config_file": "give that file to artel config convert too",
    "trainer_config_file": "give that file to artel config convert too",
    "local_rank": _STARTED,
    "dist_backend": "gloo on CPUs and nccl on GPUs is chosen automatically",
    "dist_init_method": _STARTED,
    "dist_world_size": _STARTED,
}
_FINETUNE = "all weights are trained"
_LEFT_WHEN_ON = {
    "clear_processed": "texts are prepared again automatically when they or the keys change",
    "drop_optimizer": "artel train --restart starts over; to begin with a run's weights write model.from: RUN/model",
    "sync_bn": "the model has no batch norm",
    "finetune": _FINETUNE,
    "finetune_transformer": _FINETUNE,
    "finetune_position": _FINETUNE,
    "finetune_position_reg": _FINETUNE,
    "finetune_class": _FINETUNE,
    "split_by_sentence": "documents are cut into windows of tokens, span_qa.stride apart",
    "truncate": "nothing is cut off: windows go over the whole document, span_qa.stride apart",
    "debug": "for a short run write train.steps, in place of train.epochs",
}
_KNOWN = {
    *_CARRIED,
    *_LEFT,
    *_LEFT_WHEN_ON,
    *"dump_dir experiment_name data_path dummy_dataset train_batch_size batch_split warmup_coef best_metric".split(),
    *"best_order apex_level hidden_dropout_prob attention_probs_dropout_prob optimizer".split(),
}

NQ_RECIPE = Tool("the Natural Questions recipe", lambda text: True, convert_cfg)
