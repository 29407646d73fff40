"""Opens a model for use: from a run, a folder or a hub id, or a run's model before training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from artel.config import ModelConfig, RunConfig, find_similar_name, load_run
from artel.config.model_name import check_model_name, is_in_hub_cache
from artel.errors import InputError
from artel.generation.generate import end_ids
from artel.messages import logger
from artel.models.device import current_device, pick_precision
from artel.models.loading.build import build_model, load_model
from artel.models.loading.missing_weights import check_finite
from artel.models.loading.model_folder import read_config
from artel.models.loading.structure import position_limit
from artel.models.lora.adapter_folder import read_adapter
from artel.models.quantization import set_compute_precision
from artel.objectives import Objective, build_objective
from artel.objectives.decoding import Decoding
from artel.preparing import PreparedText, prepare, prepare_silently
from artel.preparing.run_mark import check_checkpoint_ownership
from artel.registry import OBJECTIVES
from artel.tokens import Tokenizer, load_tokenizer
from artel.tokens.tokenizer.chat_template import TurnEnd, resolve_template, turn_end
from artel.training import RunFolder
from artel.training.checkpoint.format import load_weights, read_progress


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model with its tokenizer, objective and run."""

    name: str
    folder: str
    """The folder or hub id of its tokenizer."""
    model: PreTrainedModel
    tokenizer: Tokenizer
    objective: Objective
    """The objective of its run, or the one that fits its head."""
    run: RunConfig | None = None
    """The run that trained it, or None if artel did not train it."""

    @property
    def decoding(self) -> Decoding:
        """The decoding of its objective, which computes answers."""
        return self.objective.decoding

    @property
    def template_setting(self) -> str:
        """`chat.template` of its run; auto without a run."""
        return "auto" if self.run is None else self.run.chat.template

    def chat_template(self) -> str:
        """Return the model's chat template. Raise InputError if it is wrong."""
        return resolve_template(self.tokenizer, self.template_setting)

    def turn_end(self, template: str) -> TurnEnd:
        """Return the ids and texts that end an answer, from template, tokenizer and generation_config.json."""
        end = turn_end(self.tokenizer, template)
        return TurnEnd(end.ids | end_ids(self.model), end.texts)


def open_model(name: str, device: torch.device | None = None) -> OpenedModel:
    """Open the final model of a run, its newest checkpoint while it is unfinished, or any Hugging Face model.

    An adapter (of a run, or in a folder of peft) is opened with its base model, quantized as in the run. `device`
    defaults to the GPU of this process, or else the CPU. Raise InputError if there is no such model.
    """
    opened = _open_by_name(name)
    move_to_device(opened, device or current_device())
    return opened


def move_to_device(opened: OpenedModel, device: torch.device) -> None:
    """Move the model to a device. Raise InputError if it does not fit there."""
    model = opened.model
    if model.device == device or getattr(model, "quantization_method", None) == QuantizationMethod.BITS_AND_BYTES:
        return  # already loaded on its device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    try:
        model.to(device)
    except torch.OutOfMemoryError:
        model.to("cpu")
        needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        message = f"its weights take {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of GPU memory are free"
        fix = "set CUDA_VISIBLE_DEVICES= to use the CPU"
        raise InputError.at(opened.name, message, f"{fix}; artel serve also has --precision bf16") from None


def _open_by_name(name: str) -> OpenedModel:
    check_model_name(name)
    folder = RunFolder(Path(name))
    if folder.config.is_file():
        run = load_run(name)
        folder.check_config(run)
        model = folder.newest_model()
        if model is not None:
            return _open_folder(name, str(model), run)
        checkpoint = folder.checkpoints / "latest"
        if checkpoint.exists():
            step = int(checkpoint.resolve().name.removeprefix("step-"))
            logger.warning("%s is not complete: using its newest checkpoint, step %d", name, step)
            return open_checkpoint(run, prepare_silently(run), checkpoint)
    check_was_trained(folder)
    if folder.path.is_file():
        fix = "use the run's folder, or --untrained for the model before training"
        raise InputError.at(name, "is a file, not a run, a model folder or a hub id", fix)
    try:
        return _open_folder(name, name, None)
    except InputError:
        similar = None if folder.path.is_dir() or is_in_hub_cache(name) else find_similar_name(name)
        if similar is None:
            raise
        message = "is neither a run, a model folder nor a model on the hub"
        raise InputError.at(name, message, f"did you mean {similar}?") from None


def check_was_trained(folder: RunFolder) -> None:
    """Raise InputError if the run was never trained, or its weights were removed."""
    name = str(folder.path)
    if folder.result.is_file():
        fix = "restore them, or train it with --restart"
        raise InputError.at(name, "has lost its weights and its checkpoints", fix)
    if folder.config.is_file():
        raise InputError.at(name, "has not been trained yet: there is no checkpoint", f"train it: artel train {name}")
    if folder.identity():
        fix = f"train it by its run file: artel train RUN.yaml run={name}"
        raise InputError.at(name, "has not been trained yet: only its text is prepared", fix)


def open_untrained(run: RunConfig) -> OpenedModel:
    """Open a run's model before its first step, on its device. Prepare the run's text if necessary."""
    prepared = prepare(run)
    opened = open_fresh(prepared.config, prepared)
    move_to_device(opened, current_device())
    return opened


def open_fresh(run: RunConfig, prepared: PreparedText) -> OpenedModel:
    """Open a run's model before its first step, with the tokenizer of its prepared text."""
    tokenizer = prepared.tokenizer()
    objective = build_objective(run, tokenizer)
    request = objective.model_request(run.model, run.data.block, run.seed)
    model = build_model(request, tokenizer).model
    return OpenedModel(run.run, str(prepared.folder / "tokenizer"), model, tokenizer, objective, run)


def open_checkpoint(run: RunConfig, prepared: PreparedText, path: Path) -> OpenedModel:
    """Open a run's model with the weights of the checkpoint at `path`."""
    check_checkpoint_ownership(path.parent.parent, [path])
    opened = open_fresh(run, prepared)
    load_weights(path, opened.model)
    opened.objective.calibrate(read_progress(path).calibration)
    return opened


def _open_folder(name: str, folder: str, run: RunConfig | None) -> OpenedModel:
    tokenizer = load_tokenizer(folder, where=name)
    objective = open_objective(folder, run, tokenizer)
    adapter = read_adapter(folder)
    config = ModelConfig.model_validate({"from": folder})
    if run is not None and run.model.runs_code and (adapter is None or run.model.from_ == adapter.base):
        # A run's model has the code of its base model, which the user trusted for training.
        config = config.model_copy(update={"trust_remote_code": folder})
    if adapter is not None:
        config = config.model_copy(update={"quantize": objective.config.model.quantize})
    model = load_model(objective.model_request(config), tokenizer)
    if adapter is not None:
        set_compute_precision(model, pick_precision("auto", model.device))
    check_finite(model, name)
    if run is None:
        objective = _limit_block(objective, model)
    objective.read_model_files(Path(folder))
    return OpenedModel(name, folder, model, tokenizer, objective, run)


def _limit_block(objective: Objective, model: PreTrainedModel) -> Objective:
    """Return the objective with `data.block` limited to the model's positions."""
    run = objective.config
    limit = position_limit(model)
    if limit is None or limit >= run.data.block:
        return objective
    data = run.data.model_copy(update={"block": limit})
    return build_objective(run.model_copy(update={"data": data}), objective.tokenizer)


def open_objective(folder: str, run: RunConfig | None, tokenizer: Tokenizer) -> Objective:
    """Return the objective of a model or adapter in a folder: its run's, or the one that fits its head."""
    if run is None:
        adapter = read_adapter(folder)
        run = _make_run_config(folder if adapter is None else adapter.base)
    return build_objective(run, tokenizer)


def _make_run_config(folder: str) -> RunConfig:
    """Return a run file with the objective that fits the model's class; causal if none fits."""
    config, _ = read_config(folder)
    architecture = (config.architectures or [""])[0]
    matching_names = (name for name in OBJECTIVES.names if OBJECTIVES[name].claims(architecture, folder))
    name = next(matching_names, OBJECTIVES.names[0])
    return RunConfig.model_validate({"objective": name, **OBJECTIVES[name].run_values(config, folder)})
