"""Convert the `.cfg` of the distributed Natural Questions recipe (neuro-inc/ml-recipe-distributed-pytorch)."""

from __future__ import annotations

import re

from artel.config.converters import readers as read
from artel.config.converters.conversion import Conversion, ConvertedConfig, KeyTable
from artel.config.converters.tools import Tool
from artel.config.converters.trainer import LAUNCH_ADVICE
from artel.config.schema.quantities import read_count
from artel.errors import InputError, Problem
from artel.registry import OPTIMIZERS

# Metric of the recipe → (artel's metric, order in which the recipe's values improve).
_METRICS = {"map": ("mean_average_precision", ">"), "loss": ("loss", "<"), "f1": ("f1", ">")}


def _read_flag(value: str) -> bool:
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
    converted={
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
        "train_label_weights": ("span_qa.class_weights", lambda value: "balanced" if _read_flag(value) else "none"),
        "train_sampler_weights": ("span_qa.balanced_sampling", _read_flag),
        "n_epochs": ("train.epochs", read.number),
        "lr": ("train.learning_rate", read.number),
        "weight_decay": ("train.weight_decay", read.number),
        "max_grad_norm": ("train.clip", read.number),
    },
    implied={
        "dummy_dataset": "no effect: it is off",
        "hidden_dropout_prob attention_probs_dropout_prob": "no effect: it is the model's default",
        "optimizer": "artel uses adamw",
        "best_order": "ignored: artel knows for each metric whether higher is better",
    },
    unsupported={
        "dump_dir": "experiment_name is missing; write run: FOLDER",
        "vocab_file merges_file": "artel uses the tokenizer of model.from; for another write tokenizer.from: FOLDER",
        "lowercase handle_chinese_chars":
            "the tokenizer of model.from decides this; for another write tokenizer.from: FOLDER",
        "layer_norm_eps": "change it in the config.json of model.from",
        "bpe_dropout": "not supported: artel has no BPE dropout",
        "last": "the same command resumes a stopped run; to start from its weights write model.from: RUN/model",
        "gpu": "artel finds devices; set CUDA_VISIBLE_DEVICES= to run on the CPU",
        "n_jobs": "artel uses all cores; train.threads limits them",
        "test_batch_size": "validation uses the micro-batch of training; write train.micro_batch",
        "apex_verbosity": "ignored: artel does not use apex",
        "apex_loss_scale": "not needed: bf16 needs no scaling of the loss",
        "processed_data_path": "artel keeps prepared text in data.store or the cache",
        "log_file": "metrics go to metrics.jsonl in the run's folder",
        "config_file model_config_file trainer_config_file": "give that file to artel config convert too",
        "dist_backend": "not needed: gloo on CPUs and nccl on GPUs is chosen automatically",
        "local_rank dist_init_method dist_world_size": LAUNCH_ADVICE,
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


def convert_cfg(text: str, location: str) -> ConvertedConfig:
    """Convert the recipe's configuration. Raise InputError with all problems."""
    conversion = Conversion(location, TABLE)
    for line_number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line and not line.startswith("#"):
            _add_line(conversion, line, f"{location}:{line_number}")
    conversion.put("objective", "span_qa")
    conversion.put("span_qa.heads", "five")
    conversion.convert_table()
    folder = conversion.get("dump_dir", read.text)
    name = conversion.get("experiment_name", read.text)
    if name:
        conversion.put("run", f"{folder.rstrip('/')}/{name}" if folder else name, "dump_dir", "experiment_name")
    _convert_source(conversion)
    _convert_training(conversion)
    _convert_best(conversion)
    for key, reason in _SWITCHES.items():
        conversion.report_unless(not conversion.get(key, _read_flag), key, reason)
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if conversion.get(key, read.number) not in (None, 0.1):  # 0.1 is the default of BERT and RoBERTa
            conversion.report(key, "change it in the config.json of model.from")
    if conversion.get("optimizer", read.one_of("adam adamod")) == "adamod":
        known = ", ".join(OPTIMIZERS.names)
        conversion.report("optimizer", f"artel does not have AdaMod and uses adamw; write train.optimizer: {known}")
    if not any(map(conversion.knows, conversion.source_keys())):
        fix = "artel config convert --help lists the supported tools; a run file needs no conversion"
        raise InputError.at(location, "is not a known configuration", fix)
    return conversion.finish()


def _add_line(conversion: Conversion, line: str, location: str) -> None:
    """Add a line `key = value` to the conversion."""
    match = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(\S.*?)(?:\s+#.*)?", line)
    if match is None:
        fix = "write e.g. lr = 1e-5; comments start with #"
        conversion.problems.append(Problem(location, "is not of the form key = value", fix))
        return
    key, value = match[1], match[2].strip("\"'")
    if key in conversion.source_keys():
        conversion.problems.append(Problem(location, f"the key {key} is given twice", "keep one of them"))
    conversion.add(key, None if value == "None" else value, value, location)


def _convert_source(conversion: Conversion) -> None:
    path = conversion.get("data_path", read.text)
    if conversion.get("dummy_dataset", _read_flag):
        conversion.put("data.sources", [{"format": "dummy", "kind": "questions"}], "dummy_dataset")
        fix = f"data.sources: [{{path: {path}, format: nq}}]"
        what = "dummy_dataset is True, so questions are generated"
        conversion.report("data_path", f"{what}; for the real ones write {fix}")
    elif path:
        conversion.put("data.sources", [{"path": path, "format": "nq"}], "data_path")


def _convert_training(conversion: Conversion) -> None:
    """Convert the recipe's AdamW (transformers' former one) and schedule: linear, or none without warmup."""
    conversion.put("train.betas", [0.9, 0.999])
    conversion.put("train.epsilon", 1e-6)
    batch = conversion.get("train_batch_size", read.positive_int)
    accumulation_steps = conversion.get("batch_split", read.positive_int)
    if batch:
        conversion.put("train.batch", batch, "train_batch_size")
        what = "the recipe used this batch in each process, but train.batch is the total"
        conversion.report("train_batch_size", f"{what}; multiply it by the recipe's number of processes")
    if batch and accumulation_steps:
        conversion.put("train.micro_batch", max(1, batch // accumulation_steps), "batch_split")
    warmup = conversion.get("warmup_coef", read.number)
    if warmup is not None:
        conversion.put("train.schedule", "linear" if warmup else "constant", "warmup_coef")
        if 0 <= warmup < 1:
            conversion.put("train.warmup", warmup, "warmup_coef")
        else:
            conversion.report("warmup_coef", "is not a fraction (at least 0, below 1); write train.warmup")
    level = conversion.get("apex_level", read.one_of("O0 O1 O2 O3"))
    conversion.put("train.precision", "fp32" if level in (None, "O0") else "auto", "apex_level")
    if level not in (None, "O0"):
        what = "train.precision is auto: bf16 if the device supports it natively, weights in fp32"
        conversion.report("apex_level", f"{what}; write fp32 for no mixed precision")


def _convert_best(conversion: Conversion) -> None:
    recipe_metric = conversion.get("best_metric", read.text)
    if recipe_metric not in _METRICS:
        metrics = ", ".join(metric for metric, _ in _METRICS.values())
        conversion.report("best_metric", f"artel has no such metric; write checkpoint.best: {metrics}")
        conversion.report("best_order", "ignored: artel knows for each metric whether higher is better")
        return
    metric, order = _METRICS[recipe_metric]
    conversion.put("checkpoint.best", metric, "best_metric")
    if conversion.get("best_order", read.one_of("> <")) != order:
        better = "higher" if order == ">" else "lower"
        conversion.report("best_order", f"for {metric}, {better} is better; this cannot be reversed")


NQ_RECIPE = Tool("the Natural Questions recipe", lambda text: True, convert_cfg, is_fallback=True)
