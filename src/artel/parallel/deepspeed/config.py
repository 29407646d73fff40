"""A user's own DeepSpeed file, checked against the run file and completed from it.

What the file says `"auto"` of is taken from the run file, as in transformers' integration; where the two say different
things, all of it is told at once. What is artel's own affair (order, optimizer, schedule, checkpoints, logs) stays so.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from artel.config import RunConfig
from artel.errors import Problem, missing_extra
from artel.models.device import bf16_is_native, pick_precision
from artel.parallel.deepspeed.keys import (
    ARTELS_OWN,
    AUTO,
    REFUSED,
    TOP_LEVEL,
    Findings,
    check_block,
    integers,
    is_off,
    read_tree,
)
from artel.registry import OPTIMIZERS

# DeepSpeed's schedules, and what artel calls them.
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A DeepSpeed file that goes with a run."""

    file: str
    stage: int
    """Of ZeRO: what processes share; 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also weights."""
    precision: Literal["fp32", "bf16", "fp16"]
    """What weights are held in while layers compute; the optimizer's are float32."""
    micro_batch: int | None
    """Rows that one process runs at a time; None where both files leave it open."""
    notes: tuple[str, ...]
    """What was chosen or changed, a line each, for the log."""
    run: RunConfig
    world: int
    settings: dict[str, Any]
    """What DeepSpeed is given, but for what waits for the model and the length of the run."""

    def complete(self, model_config: Any, steps: int, micro_batch: int) -> dict[str, Any]:
        """The whole of what DeepSpeed is given, for a model, a run of `steps` and micro-batches of that many rows.

        Raises InputError where the file's schedule has another length than the run, or the model has no hidden size
        and the file asks for it.
        """
        found = Findings(self.file)
        zero = dict(self.settings["zero_optimization"])
        width = _hidden_size(model_config)
        of_width = {
            "reduce_bucket_size": lambda size: size * size,
            "stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
            "stage3_param_persistence_threshold": lambda size: 10 * size,
        }
        for key, rule in of_width.items():
            if zero.get(key) != AUTO:
                continue
            if width is None:
                what = '"auto" follows the hidden size, and this model names none'
                found.problem(f"zero_optimization.{key}", what, "write a number")
            else:
                zero[key] = rule(width)
        share = math.ceil(self.run.train.batch / self.world)
        accumulation = math.ceil(share / micro_batch)
        schedule = self.settings.get("scheduler", {}).get("params", {})
        lengths = {"total_num_steps": steps, "warmup_num_steps": max(1, self.run.train.warmup.of(steps))}
        for key, length in lengths.items():
            if schedule.get(key, length) != length:
                what = f"is {schedule[key]:,}, and of this run's {steps:,} steps it would be {length:,}"
                found.problem(f"scheduler.params.{key}", what, 'write "auto"')
        found.refuse()
        settings = {key: value for key, value in self.settings.items() if key != "scheduler"}
        return settings | {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "train_batch_size": micro_batch * accumulation * self.world,  # with the filler of the last micro-batch
        }


def read_deepspeed(file: str, run: RunConfig, world: int, device: torch.device) -> Resolved:
    """A DeepSpeed file for a run on `world` processes.

    Raises InputError with all that is wrong in the file or differs from the run file; where DeepSpeed is not installed.
    """
    _import_deepspeed(file, device)
    return _Reading(file, run, world, device).resolved()


def _import_deepspeed(file: str, device: torch.device) -> None:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it looks for one, and wonders aloud that there is none
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        raise missing_extra("deepspeed", "deepspeed", f"parallel.deepspeed: {file}") from None
    # It tells much that is no matter of its users', on standard output, where results are.
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    # At each step of its own, of functions of PyTorch that it calls.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _can_build(part: str) -> bool:
    """Whether a part of DeepSpeed that is compiled at its first use has what it needs."""
    import deepspeed

    return bool(deepspeed.ops.__compatible_ops__.get(part, False))


def _hidden_size(config: Any) -> int | None:
    """As transformers' integration finds it: the model's, the largest of several, or its text part's."""
    for each in (config, getattr(config, "text_config", None)):
        size = getattr(each, "hidden_size", None) or max(getattr(each, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return None


class _Reading:
    """One file being read; each method takes a part of it."""

    def __init__(self, file: str, run: RunConfig, world: int, device: torch.device) -> None:
        self._found = Findings(file)
        self._run = run
        self._world = world
        self._device = device
        self._tree = read_tree(file)

    def resolved(self) -> Resolved:
        found, tree = self._found, self._tree
        found.unknown("", tree, TOP_LEVEL | ARTELS_OWN.keys() | REFUSED.keys())
        self._check_run()
        for key, where in ARTELS_OWN.items():
            if not is_off(tree.pop(key, None)):
                found.note(key, f"has no effect, artel sees to it: {where}")
        for key, fix in REFUSED.items():
            if not is_off(tree.pop(key, None)):
                found.problem(key, "is not for a run of artel's", fix)
        zero = self._zero()
        stage = int(zero["stage"])
        micro_batch = self._micro_batch(stage)
        clip = self._run.train.clip or 0.0
        found.compare(
            "", {"gradient_clipping": tree.get("gradient_clipping", AUTO)}, {"gradient_clipping": ("train.clip", clip)}
        )
        self._optimizer()
        self._schedule()
        precision = self._precision()
        if stage == 0 and precision != "fp32":
            # Its optimizer for fp16 without ZeRO divides gradients by a loss scale that nobody has multiplied in.
            what = f"0 in {precision} is run as 1: the same numbers, and the optimizer's state is shared"
            found.note("zero_optimization.stage", what)
            stage = zero["stage"] = 1
        settings = {key: value for key, value in tree.items() if value != AUTO and key not in ("optimizer", "bfloat16")}
        settings |= {
            "zero_optimization": zero,
            "gradient_clipping": clip,
            "zero_allow_untested_optimizer": True,
            # PyTorch's fused Adam steps on the host as fast as DeepSpeed's own, which compiles for a minute first.
            "zero_force_ds_cpu_optimizer": False,
        }
        found.refuse()
        return Resolved(found.file, stage, precision, micro_batch, tuple(found.notes), self._run, self._world, settings)

    def _check_run(self) -> None:
        """What of the run file does not go with DeepSpeed at all."""
        parallel, train = self._run.parallel, self._run.train
        split = [
            f"{name}: {getattr(parallel, name)}"
            for name in ("tensor", "pipeline", "context", "expert")
            if getattr(parallel, name) > 1
        ]
        if isinstance(parallel.data, str) and parallel.data not in ("auto", "ddp"):
            split.append(f"data: {parallel.data}")
        if parallel.offload != "none":
            split.append(f"offload: {parallel.offload}")
        if split:
            fix = "leave it out, or leave parallel.deepspeed out"
            self._found.problems.append(Problem("parallel", f"{', '.join(split)} beside deepspeed, which splits", fix))
        if not OPTIMIZERS[train.optimizer].steps_flat_shards:
            what = f"{train.optimizer} looks at whole matrices, and DeepSpeed hands out flat pieces"
            self._found.problems.append(Problem("train.optimizer", what, "write adamw or sgd"))
        if train.weights != "fp32":
            what = f"{train.weights}: DeepSpeed keeps float32 weights beside those it computes with"
            self._found.problems.append(Problem("train.weights", what, "write fp32"))

    def _zero(self) -> dict[str, Any]:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        found = self._found
        given = self._tree.pop("zero_optimization", {})
        if isinstance(given, bool):  # its first form
            given = {"stage": int(given)}
        if not isinstance(given, dict):
            found.problem("zero_optimization", f"is {given!r}", 'write {"stage": 1}, 2 or 3')
            given = {}
        zero = dict(given)
        for old, new in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_params", "offload_param"),
            ("cpu_offload_param", "offload_param"),
        ):
            if zero.pop(old, False) is True:
                zero.setdefault(new, {"device": "cpu"})
        waits = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        found.defaults("zero_optimization", zero, apart=waits)
        stage = zero.setdefault("stage", 0)
        if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
            found.problem("zero_optimization.stage", f"is {stage!r}", "write 0, 1, 2 or 3")
            zero["stage"] = stage = 0
        for key in ("offload_param", "offload_optimizer"):
            if isinstance(zero.get(key), dict):
                zero[key] = self._offload(f"zero_optimization.{key}", dict(zero[key]))
        if stage < 3 and zero.pop("offload_param", None) is not None:
            found.note("zero_optimization.offload_param", f"has no effect in stage {stage}")
        for key in waits[1:] if stage < 3 else ():
            zero.pop(key, None)
        if zero.get("zenflow") is not None:
            found.problem("zero_optimization.zenflow", "steps with an optimizer of its own", "leave it out")
        checked = {key: value for key, value in zero.items() if value != AUTO}
        check_block(found, "zero_optimization", DeepSpeedZeroConfig, checked)
        return integers(DeepSpeedZeroConfig, zero)

    def _offload(self, where: str, block: dict[str, Any]) -> dict[str, Any]:
        found = self._found
        found.defaults(where, block)
        if self._device.type == "cpu" and block.get("device", "none") != "none":
            if block.get("pin_memory", True):
                found.note(f"{where}.pin_memory", "is off: there is no accelerator to copy to")
            block["pin_memory"] = False
        if block.get("device") == "nvme":
            folder = block.get("nvme_path")
            if folder is None or not Path(str(folder)).is_dir():
                found.problem(f"{where}.nvme_path", f"{folder!r} is no folder", "name a folder on the disk")
            if not _can_build("async_io"):
                what = "nvme is read and written by a part of DeepSpeed that needs libaio, which is not here"
                found.problem(f"{where}.device", what, "apt install libaio-dev, or write cpu")
            elif where.endswith("optimizer"):
                found.note(f"{where}.device", "is nvme: a checkpoint's optimizer state cannot be put back there")
        for key, usual in (("ratio", 1.0), ("super_offload", False)):
            if block.get(key, usual) != usual:
                what = f"{block[key]!r} needs DeepSpeed's own Adam, and artel steps with PyTorch's"
                found.problem(f"{where}.{key}", what, "leave it out")
        return block

    def _micro_batch(self, stage: int) -> int | None:
        """Of the three numbers of a batch the file may give any; artel's batch is the run file's."""
        found, train = self._found, self._run.train
        numbers: dict[str, int | None] = {}
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            value = self._tree.pop(key, AUTO)
            if value in (AUTO, None):
                numbers[key] = None
            elif isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
                found.problem(key, f"is {value!r}", 'write a whole number above 0, or "auto"')
                return None
            else:
                numbers[key] = int(value)
        batch, rows, accumulation = numbers.values()
        if batch is not None and batch != train.batch:
            what = f"is {batch:,}, and train.batch is {train.batch:,}"
            found.problem("train_batch_size", what, f'write "auto", or train.batch: {batch}')
        if isinstance(train.micro_batch, int):
            if rows not in (None, train.micro_batch):
                what = f"is {rows}, and train.micro_batch is {train.micro_batch}"
                fix = f'write "auto", or train.micro_batch: {rows}'
                found.problem("train_micro_batch_size_per_gpu", what, fix)
            rows = train.micro_batch
        share = math.ceil(train.batch / self._world)
        if accumulation is not None:
            if rows is None:
                rows = math.ceil(share / accumulation)
            if math.ceil(share / rows) != accumulation:
                what = (
                    f"is {accumulation}, and a process's {share} rows of a batch of {train.batch} on {self._world} "
                    f"process(es) are {math.ceil(share / rows)} micro-batches of {rows}"
                )
                found.problem("gradient_accumulation_steps", what, 'write "auto"')
        if rows is None and stage == 3:
            found.note("train_micro_batch_size_per_gpu", "is 1: under stage 3 none can be tried; write a number")
            rows = 1
        return rows

    def _optimizer(self) -> None:
        """artel's optimizer steps; a block that says the same does no harm."""
        found, train = self._found, self._run.train
        block = self._tree.pop("optimizer", None)
        if block is None:
            return
        kind = str(block.get("type", "")).lower() if isinstance(block, dict) else ""
        parameters = dict(block.get("params") or {}) if isinstance(block, dict) else {}
        own = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}.get(kind)  # its Adam is AdamW unless told otherwise
        if kind == "adam" and parameters.get("adam_w_mode") is False:
            own = None
        if own != train.optimizer:
            what = f"is {kind or 'not given'}, and train.optimizer is {train.optimizer}"
            found.problem("optimizer.type", what, "leave the block out, or write another train.optimizer")
            return
        ours: dict[str, tuple[str, Any]] = {
            "lr": ("train.learning_rate", train.learning_rate),
            "weight_decay": ("train.weight_decay", train.weight_decay),
        }
        if own == "adamw":
            ours |= {"betas": ("train.betas", list(train.betas)), "eps": ("train.epsilon", train.epsilon)}
        else:
            ours |= {"momentum": ("train.momentum", train.momentum)}
        for key in ("torch_adam", "adam_w_mode", "bias_correction", "fused", "foreach"):  # no other numbers
            parameters.pop(key, None)
        found.compare("optimizer.params", parameters, ours)

    def _schedule(self) -> None:
        """artel's schedule leads; of the block its lengths stay, until the length of the run is known."""
        found, train = self._found, self._run.train
        block = self._tree.get("scheduler")
        if block is None:
            return
        kind = str(block.get("type", "")) if isinstance(block, dict) else str(block)
        if _SCHEDULES.get(kind) != train.schedule:
            what = f"is {kind or 'not given'}, and train.schedule is {train.schedule}"
            known = ", ".join(f"{name} is {ours}" for name, ours in _SCHEDULES.items())
            found.problem("scheduler.type", what, f"leave the block out, or write another train.schedule ({known})")
            return
        parameters = dict(block.get("params") or {})
        lengths = {key: parameters.pop(key) for key in ("total_num_steps", "warmup_num_steps") if key in parameters}
        for key, value in lengths.items():
            if value != AUTO and (isinstance(value, bool) or not isinstance(value, int | float) or value != int(value)):
                found.problem(f"scheduler.params.{key}", f"is {value!r}", 'write a whole number or "auto"')
        if parameters.get("last_batch_iteration") == -1:
            del parameters["last_batch_iteration"]
        ours: dict[str, tuple[str, Any]] = {
            "warmup_min_lr": ("the warmup's start", 0.0),
            "warmup_min_ratio": ("the warmup's start", 0.0),
            "warmup_max_lr": ("train.learning_rate", train.learning_rate),
            "warmup_type": ("the warmup's form", "linear"),
            "cos_min_ratio": ("train.minimum_learning_rate", train.minimum_learning_rate),
        }
        found.compare("scheduler.params", parameters, ours)
        given = {key: int(value) for key, value in lengths.items() if value != AUTO and not found.problems}
        self._tree["scheduler"] = {"params": given}

    def _precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """What both files and the device say; the blocks of the tree are made to say the same."""
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

        found, tree, asked = self._found, self._tree, self._run.train.precision
        if "bfloat16" in tree:  # its old name
            tree["bf16"] = tree.pop("bfloat16")
        if asked == "fp8":
            found.problems.append(Problem("train.precision", "fp8 is not for DeepSpeed", "write bf16, or auto"))
        said: dict[str, object] = {}
        for name, model in (("fp16", DeepSpeedFP16Config), ("bf16", DeepSpeedBF16Config)):
            block = dict(tree.get(name) or {})
            said[name] = block.pop("enabled", AUTO)
            if asked != AUTO and said[name] not in (AUTO, asked == name):
                what = f"is {json.dumps(said[name])}, and train.precision is {asked}"
                found.problem(f"{name}.enabled", what, 'write "auto", or train.precision: auto')
            for key in (f"{name}_master_weights_and_grads", "bf16_optimizer_states"):
                if block.get(key):
                    what = "needs DeepSpeed's own Adam, and artel steps with PyTorch's"
                    found.problem(f"{name}.{key}", what, "leave it out")
            found.defaults(name, block)
            check_block(found, name, model, block)
            tree[name] = integers(model, block)
        if all(value is True for value in said.values()):
            found.problem("fp16.enabled", "and bf16.enabled are both true", "keep one")
        precision = self._possible(said)
        for name in said:
            tree[name]["enabled"] = name == precision
        return precision

    def _possible(self, said: dict[str, object]) -> Literal["fp32", "bf16", "fp16"]:
        """Of what the file says of fp16 and bf16 (true, false, auto) and the run file of both, what the device can."""
        asked, device = self._run.train.precision, self._device
        on = [name for name, value in said.items() if value is True or (value == AUTO and asked == name)]
        if "fp16" in on:
            if device.type != "cpu":
                return "fp16"
            self._found.note("fp16", "is replaced by fp32: this is a CPU")
        elif "bf16" in on:
            if device.type != "cpu" or asked == "bf16" or bf16_is_native(device):
                return "bf16"
            self._found.note("bf16", "is replaced by fp32: this CPU would only emulate it")
        elif asked == AUTO and said["bf16"] == AUTO and pick_precision(AUTO, device) == "bf16":
            return "bf16"
        return "fp32"
