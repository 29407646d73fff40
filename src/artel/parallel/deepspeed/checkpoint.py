"""Reads weights and Adam's averages from a checkpoint written by DeepSpeed.

DeepSpeed's own zero_to_fp32.py unpickles the files, which can execute code. This module reads them with PyTorch's
`weights_only` loader, which creates tensors, numbers and a few plain DeepSpeed classes, and refuses all other objects.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from artel.errors import InputError

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Adam's state per parameter, in PyTorch and in DeepSpeed."""


def read_zero_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, without the optimizer's state. See `ZeroCheckpoint`."""
    return ZeroCheckpoint.read(folder).weights()


def model_files(folder: Path) -> list[Path]:
    """Return the model files of a checkpoint, in order of rank. Raise InputError if there are none.

    `folder`: the one that DeepSpeed saved in, with a file `latest`, or one of its `global_step…` folders.
    """
    latest = folder / "latest"
    if latest.is_file():
        folder = folder / latest.read_text().strip()
    files = sorted(folder.glob("*_model_states.pt"), key=_file_order)
    if not files:
        fix = "name the folder that DeepSpeed saved in, with its file `latest`"
        raise InputError.at(str(folder), "is not a DeepSpeed checkpoint", fix)
    return files


@dataclass(frozen=True, slots=True)
class ZeroCheckpoint:
    """The files of a checkpoint of any ZeRO stage."""

    folder: Path
    models: list[dict[str, Any]]
    """Model states. In stage 3 by process, since each has shards of the frozen weights. Otherwise only the first."""
    states: list[dict[str, Any]]
    """Optimizer states by process. Empty without ZeRO."""

    @classmethod
    def read(cls, folder: Path) -> ZeroCheckpoint:
        """Read the folder of `model_files`. Raise InputError if files are missing or hold more than plain data."""
        first, *others = model_files(folder)
        shards = sorted(first.parent.glob("*_optim_states.pt"), key=_file_order)
        states = [_load_plain(shard)["optimizer_state_dict"] for shard in shards]
        num_processes = states[0]["partition_count"] if states else 0
        num_processes = max(num_processes) if isinstance(num_processes, list) else num_processes
        if num_processes != len(shards):
            what = f"has files of {len(shards)} processes and was written by {num_processes}"
            raise InputError.at(str(first.parent), what, "copy all of its files")
        models = [first, *others] if states and states[0]["zero_stage"] == 3 else [first]
        return cls(folder, [_load_plain(path) for path in models], states)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return weights, float32, and buffers by name. A tied weight may appear under one of its names only."""
        model = self.models[0]
        if not self.states:  # without ZeRO, or saved without an optimizer
            return {name: tensor.float() for name, tensor in model["module"].items()}
        buffers = {name: tensor for name, tensor in model["module"].items() if name in set(model["buffer_names"])}
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in buffers.items()}
        if self._stage == 3:
            weights |= self._join_by_parameter([state["fp32_flat_groups"] for state in self.states])
            frozen = [state.get("frozen_param_fragments") or {} for state in self.models]
            for name, shape in (model.get("frozen_param_shapes") or {}).items():
                weights[name] = _join_shards([fragments[name].flatten() for fragments in frozen], shape).float()
        else:
            weights |= self._join_by_parameter([state["single_partition_of_fp32_groups"] for state in self.states])
            weights |= {name: tensor.float() for name, tensor in (model.get("frozen_param_fragments") or {}).items()}
        return weights

    def adam(self) -> tuple[dict[str, torch.Tensor], int]:
        """Return (Adam's state `NAME|exp_avg`, `NAME|exp_avg_sq`, `NAME|step` in float32, step of the checkpoint).

        `NAME|step` leaves out steps that were skipped because of the loss scale. Raise InputError for a checkpoint of
        another optimizer, or without ZeRO.
        """
        states = [
            state.get("optimizer_state_dict" if self._stage == 3 else "base_optimizer_state") for state in self.states
        ]
        groups = [list(state["state"].values()) if isinstance(state, dict) else [] for state in states]
        if not groups or not all(
            key in group for rank_groups in groups for group in rank_groups or [{}] for key in AVERAGES
        ):
            fix = f"export a model and start from it: artel export {self.folder} FOLDER; then model.from: FOLDER"
            raise InputError.at(str(self.folder), "has no Adam moments in ZeRO's shards", fix)
        state: dict[str, torch.Tensor] = {}
        for key in AVERAGES:
            averages = self._join_by_parameter([[group[key] for group in rank_groups] for rank_groups in groups])
            state |= {f"{name}|{key}": tensor.float() for name, tensor in averages.items()}
        step = int(self.models[0]["global_steps"])
        applied_steps = torch.tensor(float(step - self.models[0]["skipped_steps"]))
        names = {name.rpartition("|")[0] for name in state}
        return state | {f"{name}|step": applied_steps.clone() for name in names}, step

    @property
    def _stage(self) -> int:
        return int(self.states[0]["zero_stage"])

    def _join_by_parameter(self, flat: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return full tensors by parameter name. `flat`: each process's flat tensors, one per parameter group."""
        shapes: list[dict[str, torch.Size]] = self.models[0]["param_shapes"]
        if self._stage == 3:
            return _join_stage_3(flat, shapes)
        return _join_stages_1_2(flat, shapes, self.states[0].get("param_alignment_paddings"))


def _join_stages_1_2(
    flat: list[list[torch.Tensor]], shapes: list[dict[str, torch.Size]], paddings: list[list[int]] | None
) -> dict[str, torch.Tensor]:
    """Join for stages 1 and 2: the joined shards of a group hold its parameters one after another."""
    tensors = {}
    for group_index, group in enumerate(shapes):
        group_tensor = torch.cat([shards[group_index] for shards in flat])
        start = 0
        for index, (name, shape) in enumerate(group.items()):
            numel = math.prod(shape)
            tensors[name] = group_tensor[start : start + numel].reshape(shape).clone()
            start += numel + (paddings[group_index][index] if paddings else 0)
    return tensors


def _join_stage_3(flat: list[list[torch.Tensor]], shapes: list[dict[str, torch.Size]]) -> dict[str, torch.Tensor]:
    """Join for stage 3: each parameter has equal shards, and a process concatenates its shards of all parameters."""
    rank_tensors = [torch.cat([shard.flatten() for shard in shards]) for shards in flat]
    tensors = {}
    start = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        shard_numel = math.ceil(math.prod(shape) / len(rank_tensors))
        tensors[name] = _join_shards([shard[start : start + shard_numel] for shard in rank_tensors], shape)
        start += shard_numel
    return tensors


def _join_shards(shards: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    return torch.cat(shards)[: math.prod(shape)].reshape(shape)


def _file_order(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _load_plain(path: Path) -> dict[str, Any]:
    try:
        with safe_globals(_plain_classes()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # one of many classes, with advice to load the file anyway
        reason = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        what = f"holds a {reason[1]}" if reason else f"cannot be read: {str(error).splitlines()[0]}"
        fix = "only plain data is loaded, since a pickled object may run code; convert it where it was written"
        if reason and reason[1].startswith("deepspeed.") and find_spec("deepspeed") is None:
            fix = "its classes are deepspeed's: pip install 'artel-lm[deepspeed]'"
        raise InputError.at(str(path), what, fix) from None


def _plain_classes() -> list[Any]:
    classes: list[Any] = []
    with contextlib.suppress(ImportError):  # the loader then names the class that it needs
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes += [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    return classes
