"""The `.cfg` of the distributed Natural Questions recipe (neuro-inc/ml-recipe-distributed-pytorch)."""

from __future__ import annotations

import re

from artel.config.converters import readers as read
from artel.config.converters.conversion import Conversion, Converted, KeyTable
from artel.config.converters.tools import Tool
from artel.config.converters.trainer import STARTED
from artel.config.schema.quantities import read_count
from artel.errors import InputError, Problem
from artel.registry import OPTIMIZERS

# A metric of the recipe → artel's, and which values the recipe takes for better ones.
_METRICS = {"map": ("mean_average_precision", ">"), "loss": ("loss", "<"), "f1": ("f1", ">")}


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"{value!r} is neither True nor False")
    return value.lower() == "true"


# fmt: off
TABLE = KeyTable(
    defaults={
        "model": "bert-base-uncased", "n_epochs": "10", "train_batch_size": "128", "lr": "1e-5", "weight_decay": "0.01",
        "warmup_coef": "0.05", "max_seq_len": "384", "max_question_len": "64", "doc_stride": "128", "w_start_reg": "0",
        "w_end_reg": "0", "smooth_alpha": "0.01", "best_metric": "map", "best_order": ">",
    },
    carried={
        "seed": ("seed", read_count),
        "max_seq_len": ("data.block", read_count),
        "model": ("model.from", read.text),
        "max_question_len": ("span_qa.question", read_count),
        "doc_stride": ("span_qa.stride", read_count),
        "w_start": ("span_qa.weights.start", read.number),
        "w_end": ("span_qa.weights.end", read.number),
        "w_start_reg": ("span_qa.weights.start_position", read.number),
        "w_end_reg": ("span_qa.weights.end_position", read.number),
        "w_cls": ("span_qa.weights.answer_class", read.number),
        "loss": ("span_qa.class_loss", read.one_of({"ce": "cross_entropy", "focal": "focal", "smooth": "smooth"})),
        "smooth_alpha": ("span_qa.smoothing", read.number),
        "focal_alpha": ("span_qa.focal_alpha", read.number),
        "focal_gamma": ("span_qa.focal_gamma", read.number),
        "train_label_weights": ("span_qa.class_weights", lambda value: "balanced" if _flag(value) else "none"),
        "train_sampler_weights": ("span_qa.balanced_sampling", _flag),
        "n_epochs": ("train.epochs", read.number),
        "lr": ("train.learning_rate", read.number),
        "weight_decay": ("train.weight_decay", read.number),
        "max_grad_norm": ("train.clip", read.number),
    },
    same={
        "dummy_dataset": "is off",
        "hidden_dropout_prob attention_probs_dropout_prob": "is the model's default",
        "optimizer": "artel uses adamw",
        "best_order": "artel knows for each metric whether higher is better",
    },
    left={
        "dump_dir": "experiment_name is missing; write run: FOLDER",
        "vocab_file merges_file": "artel uses the tokenizer of model.from; for another write tokenizer.from: FOLDER",
        "lowercase handle_chinese_chars":
            "the tokenizer of model.from decides this; for another write tokenizer.from: FOLDER",
        "layer_norm_eps": "change it in the config.json of model.from",
        "bpe_dropout": "artel has no BPE dropout",
        "last": "the same command resumes a stopped run; to start from its weights write model.from: RUN/model",
        "gpu": "artel finds devices; set CUDA_VISIBLE_DEVICES= to run on the CPU",
        "n_jobs": "artel uses all cores; train.threads limits them",
        "test_batch_size": "validation uses the micro-batch of training; write train.micro_batch",
        "apex_verbosity": "artel does not use apex",
        "apex_loss_scale": "bf16 needs no scaling of the loss",
        "processed_data_path": "artel keeps prepared text in data.store or the cache",
        "log_file": "metrics go to metrics.jsonl in the run's folder",
        "config_file model_config_file trainer_config_file": "give that file to artel config convert too",
        "dist_backend": "gloo on CPUs and nccl on GPUs is chosen automatically",
        "local_rank dist_init_method dist_world_size": STARTED,
    },
)
_SWITCHES = {
    "clear_processed": "texts are prepared again automatically when they or the keys change",
    "drop_optimizer": "artel train --restart starts over; to start from a run's weights write model.from: RUN/model",
    "sync_bn": "the model has no batch norm",
    **dict.fromkeys(
        "finetune finetune_transformer finetune_position finetune_position_reg finetune_class".split(),
        "all weights are trained",
    ),
    "split_by_sentence": "documents are cut into windows of tokens, span_qa.stride apart",
    "truncate": "nothing is truncated: windows cover the full document, span_qa.stride apart",
    "debug": "for a short run write train.steps instead of train.epochs",
}
# fmt: on


def convert_cfg(text: str, place: str) -> Converted:
    """Convert the recipe's configuration. Raises InputError with all its problems."""
    old = Conversion(place, TABLE)
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line and not line.startswith("#"):
            _add(old, line, f"{place}:{number}")
    old.put("objective", "span_qa")
    old.put("span_qa.heads", "five")
    old.carry_table()
    folder, name = old.get("dump_dir", read.text), old.get("experiment_name", read.text)
    if name:
        old.put("run", f"{folder.rstrip('/')}/{name}" if folder else name, "dump_dir", "experiment_name")
    _carry_source(old)
    _carry_training(old)
    _carry_best(old)
    for key, reason in _SWITCHES.items():
        old.leave_unless(not old.get(key, _flag), key, reason)
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if old.get(key, read.number) not in (None, 0.1):  # 0.1 is what BERT and RoBERTa have of themselves
            old.leave(key, "change it in the config.json of model.from")
    if old.get("optimizer", read.one_of("adam adamod")) == "adamod":
        known = ", ".join(OPTIMIZERS.names)
        old.leave("optimizer", f"artel does not have AdaMod and uses adamw; write train.optimizer: {known}")
    if not any(map(old.knows, old.given())):
        fix = "artel config convert --help says which configurations it reads; a run file needs no conversion"
        raise InputError.at(place, "is not a configuration that artel knows", fix)
    return old.finish()


def _add(old: Conversion, line: str, where: str) -> None:
    match = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(\S.*?)(?:\s+#.*)?", line)
    if match is None:
        fix = "write lr = 1e-5; comments begin with #"
        old.problems.append(Problem(where, "is not of the form key = value", fix))
        return
    key, value = match[1], match[2].strip("\"'")
    if key in old.given():
        old.problems.append(Problem(where, f"the key {key} is given twice", "keep one of them"))
    old.add(key, None if value == "None" else value, value, where)


def _carry_source(old: Conversion) -> None:
    path = old.get("data_path", read.text)
    if old.get("dummy_dataset", _flag):
        old.put("data.sources", [{"format": "dummy", "kind": "questions"}], "dummy_dataset")
        fix = f"data.sources: [{{path: {path}, format: nq}}]"
        what = "dummy_dataset is True, so questions are generated"
        old.leave("data_path", f"{what}; for the real ones write {fix}")
    elif path:
        old.put("data.sources", [{"path": path, "format": "nq"}], "data_path")


def _carry_training(old: Conversion) -> None:
    """The recipe's AdamW (transformers' old one) and its linear schedule; without warmup it has no schedule."""
    old.put("train.betas", [0.9, 0.999])
    old.put("train.epsilon", 1e-6)
    batch, parts = old.get("train_batch_size", read.at_least_one), old.get("batch_split", read.at_least_one)
    if batch:
        old.put("train.batch", batch, "train_batch_size")
        what = "the recipe used this batch in each process, but train.batch is the total"
        old.leave("train_batch_size", f"{what}; multiply it by the recipe's number of processes")
    if batch and parts:
        old.put("train.micro_batch", max(1, batch // parts), "batch_split")
    share = old.get("warmup_coef", read.number)
    if share is not None:
        old.put("train.schedule", "linear" if share else "constant", "warmup_coef")
        if 0 <= share < 1:
            old.put("train.warmup", share, "warmup_coef")
        else:
            old.leave("warmup_coef", "is not a fraction from 0 to below 1; write train.warmup")
    level = old.get("apex_level", read.one_of("O0 O1 O2 O3"))
    old.put("train.precision", "fp32" if level in (None, "O0") else "auto", "apex_level")
    if level not in (None, "O0"):
        what = "train.precision is auto: bf16 where the device multiplies it natively, weights in fp32"
        old.leave("apex_level", f"{what}; write fp32 for no mixed precision")


def _carry_best(old: Conversion) -> None:
    written = old.get("best_metric", read.text)
    if written not in _METRICS:
        known = ", ".join(metric for metric, _ in _METRICS.values())
        old.leave("best_metric", f"artel has no such metric; write checkpoint.best: {known}")
        old.leave("best_order", "artel knows for each metric whether higher is better")
        return
    metric, better = _METRICS[written]
    old.put("checkpoint.best", metric, "best_metric")
    if old.get("best_order", read.one_of("> <")) != better:
        better_is = "higher" if better == ">" else "lower"
        old.leave("best_order", f"for {metric}, {better_is} is better; this cannot be reversed")


NQ_RECIPE = Tool("the Natural Questions recipe", lambda text: True, convert_cfg, takes_any=True)
