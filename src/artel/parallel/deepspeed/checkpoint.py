"""Weights and averages out of a checkpoint that DeepSpeed wrote by itself: what its zero_to_fp32.py finds, and more.

That script executes what is pickled in the files. Here they are read by PyTorch's loader for weights, which makes
tensors, numbers and a few plain classes of DeepSpeed's, and stops at anything else.
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
"""What Adam keeps of a parameter's gradient, in PyTorch and in DeepSpeed."""


def read_zero_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint; see ZeroCheckpoint. The optimizer's state is left where it is."""
    return ZeroCheckpoint.read(folder).weights()


def model_files(folder: Path) -> list[Path]:
    """The files of a checkpoint in which each process wrote its model, by rank. Raises InputError where none are.

    `folder` is what was given to DeepSpeed to save in, with the file `latest`, or one of its `global_step…`.
    """
    latest = folder / "latest"
    if latest.is_file():
        folder = folder / latest.read_text().strip()
    files = sorted(folder.glob("*_model_states.pt"), key=_rank)
    if not files:
        fix = "name the folder that DeepSpeed saved in, with its file `latest`"
        raise InputError.at(str(folder), "holds no checkpoint of DeepSpeed's", fix)
    return files


@dataclass(frozen=True, slots=True)
class ZeroCheckpoint:
    """What the files of a checkpoint of any stage hold."""

    folder: Path
    models: list[dict[str, Any]]
    """By process under stage 3, where each has pieces of what is not trained; else the first process's."""
    states: list[dict[str, Any]]
    """Of the optimizer, by process; none without ZeRO."""

    @classmethod
    def read(cls, folder: Path) -> ZeroCheckpoint:
        """`folder` as for `model_files`. Raises InputError where files are missing or hold more than plain data."""
        first, *others = model_files(folder)
        shards = sorted(first.parent.glob("*_optim_states.pt"), key=_rank)
        states = [_loaded(shard)["optimizer_state_dict"] for shard in shards]
        count = states[0]["partition_count"] if states else 0
        count = max(count) if isinstance(count, list) else count
        if count != len(shards):
            what = f"has files of {len(shards)} processes and was written by {count}"
            raise InputError.at(str(first.parent), what, "copy all of its files")
        models = [first, *others] if states and states[0]["zero_stage"] == 3 else [first]
        return cls(folder, [_loaded(path) for path in models], states)

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights, float32, and buffers by name; a tied weight may have one of its names only."""
        model = self.models[0]
        if not self.states:  # without ZeRO, or saved without an optimizer
            return {name: tensor.float() for name, tensor in model["module"].items()}
        buffers = {name: tensor for name, tensor in model["module"].items() if name in set(model["buffer_names"])}
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in buffers.items()}
        if self._stage == 3:
            weights |= self._of_parameters([state["fp32_flat_groups"] for state in self.states])
            frozen = [each.get("frozen_param_fragments") or {} for each in self.models]
            for name, shape in (model.get("frozen_param_shapes") or {}).items():
                weights[name] = _whole([fragments[name].flatten() for fragments in frozen], shape).float()
        else:
            weights |= self._of_parameters([state["single_partition_of_fp32_groups"] for state in self.states])
            weights |= {name: tensor.float() for name, tensor in (model.get("frozen_param_fragments") or {}).items()}
        return weights

    def adam(self) -> tuple[dict[str, torch.Tensor], int]:
        """Adam's state, `NAME|exp_avg`, `NAME|exp_avg_sq`, `NAME|step`, float32; and the step that it is of.

        Steps that were skipped, for too large a loss scale, are not in `NAME|step`. Raises InputError for the
        checkpoint of another optimizer, and for one without ZeRO.
        """
        states = [
            state.get("optimizer_state_dict" if self._stage == 3 else "base_optimizer_state") for state in self.states
        ]
        groups = [list(each["state"].values()) if isinstance(each, dict) else [] for each in states]
        if not groups or not all(key in group for own in groups for group in own or [{}] for key in AVERAGES):
            fix = f"make a model of it, and begin from that: artel export {self.folder} FOLDER; then model.from: FOLDER"
            raise InputError.at(str(self.folder), "holds no averages of Adam in the pieces of ZeRO", fix)
        state: dict[str, torch.Tensor] = {}
        for key in AVERAGES:
            of_key = self._of_parameters([[group[key] for group in own] for own in groups])
            state |= {f"{name}|{key}": tensor.float() for name, tensor in of_key.items()}
        step = int(self.models[0]["global_steps"])
        stepped = torch.tensor(float(step - self.models[0]["skipped_steps"]))
        names = {name.rpartition("|")[0] for name in state}
        return state | {f"{name}|step": stepped.clone() for name in names}, step

    @property
    def _stage(self) -> int:
        return int(self.states[0]["zero_stage"])

    def _of_parameters(self, flat: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The trained parameters' parts, by name, of what each process keeps flat for each group of them."""
        shapes: list[dict[str, torch.Size]] = self.models[0]["param_shapes"]
        if self._stage == 3:
            return _dealt_out(flat, shapes)
        return _behind_one_another(flat, shapes, self.states[0].get("param_alignment_paddings"))


def _behind_one_another(
    flat: list[list[torch.Tensor]], shapes: list[dict[str, torch.Size]], paddings: list[list[int]] | None
) -> dict[str, torch.Tensor]:
    """Stages 1 and 2: the processes' pieces of a group, joined, hold its parameters one behind another."""
    tensors = {}
    for number, group in enumerate(shapes):
        joined, start = torch.cat([pieces[number] for pieces in flat]), 0
        for place, (name, shape) in enumerate(group.items()):
            size = math.prod(shape)
            tensors[name] = joined[start : start + size].reshape(shape).clone()
            start += size + (paddings[number][place] if paddings else 0)
    return tensors


def _dealt_out(flat: list[list[torch.Tensor]], shapes: list[dict[str, torch.Size]]) -> dict[str, torch.Tensor]:
    """Stage 3: each parameter is dealt out in equal pieces, and the processes' pieces of all lie behind one another."""
    joined, tensors, start = [torch.cat([piece.flatten() for piece in pieces]) for pieces in flat], {}, 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        size = math.ceil(math.prod(shape) / len(joined))
        tensors[name] = _whole([piece[start : start + size] for piece in joined], shape)
        start += size
    return tensors


def _whole(pieces: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    return torch.cat(pieces)[: math.prod(shape)].reshape(shape)


def _rank(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _loaded(path: Path) -> dict[str, Any]:
    try:
        with safe_globals(_plain_classes()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many classes, and with advice to load it all the same
        reason = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        what = f"holds a {reason[1]}" if reason else f"cannot be read: {str(error).splitlines()[0]}"
        fix = "only plain data is read, since a pickled object can do anything; convert it where it was written"
        if reason and reason[1].startswith("deepspeed.") and find_spec("deepspeed") is None:
            fix = "its classes are deepspeed's: pip install 'artel-lm[deepspeed]'"
        raise InputError.at(str(path), what, fix) from None


def _plain_classes() -> list[Any]:
    classes: list[Any] = []
    with contextlib.suppress(ImportError):  # then the loader names what it would need
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes += [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    return classes
