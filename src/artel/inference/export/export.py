"""Export of a trained model: a Hugging Face folder, an adapter, an adapter merged with its base, or a GGUF file.

Also a run's checkpoint in DeepSpeed's format, to continue training with it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from artel.config import ModelConfig, RunConfig, find_similar_name, load_run
from artel.config.model_name import check_model_name
from artel.errors import InputError
from artel.inference.deepspeed_checkpoints import AssembledModel, assemble_model, newest_checkpoint, write_universal
from artel.inference.export import open_exporter
from artel.inference.open import OpenedModel, check_was_trained, open_checkpoint, open_model, open_objective
from artel.messages import logger
from artel.models.loading.build import load_model
from artel.models.loading.check import check_complete_folder
from artel.models.loading.model_folder import check_folder, is_sharded_checkpoint, read_config
from artel.models.loading.safetensors_files import saved_dtypes
from artel.models.loading.save import write_model
from artel.models.lora.adapter_folder import read_adapter, set_base_model
from artel.models.lora.adapters import is_adapted
from artel.models.text_vectors import module_folders
from artel.preparing import check_overlaps, prepare_silently
from artel.storage import check_new, new_folder
from artel.tokens import load_tokenizer
from artel.training import RunFolder


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """An exported model and its folder."""

    folder: str
    kind: str
    """model, adapter, deepspeed, or the name of the exporter."""
    merged_into: str | None = None
    """The base model of a merged adapter."""
    dtype: str | None = None
    """The dtype of a merged model's weights."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def export(
    name: str, folder: Path, *, merge: bool = False, to: str | None = None, settings: Mapping[str, Any] | None = None
) -> ExportedModel:
    """Write the model of a run (its newest checkpoint while it is unfinished) or of a folder to a new folder.

    A folder may be a checkpoint of DeepSpeed: its shards become a model in float32. `merge` adds an adapter to its
    base model, loaded unquantized. `to` names an exporter, which converts the model by its `settings` (gguf: model.gguf
    and a Modelfile). The folder appears when it is complete. Raise InputError before loading anything, WorkError if a
    tool fails.
    """
    check_new(folder)
    exporter = None if to is None else open_exporter(to, name, settings or {})
    source, run = _find_source(name)
    if run is not None:
        check_overlaps(run, [("DIR", folder)])
    has_adapter = read_adapter(str(source)) is not None if isinstance(source, Path) else is_adapted(source.model)
    if merge and not has_adapter:
        raise InputError.at("--merge", f"{name} has no adapter to merge", "remove it")
    if to is not None and has_adapter and not merge:
        raise InputError.at(f"--to {to}", f"{name} is an adapter, not a full model", "add --merge")
    export_format = to or ("adapter" if has_adapter and not merge else "model")
    exported = ExportedModel(str(folder), export_format)
    with new_folder(folder) as partial:
        scratch = partial / "work"  # on the disk of the result, and removed before the result appears
        scratch.mkdir()
        model = partial if exporter is None else scratch / "model"
        if merge:
            logger.info("merging: base model in float32")
            adapter = source if isinstance(source, Path) else _write_source(source, scratch / "adapter")
            exported = replace(exported, **_merge_adapter(adapter, run, model))
        else:
            _write_source(source, model)
        if exporter is not None:
            logger.info("converting to %s", to)
            exporter.write(model, partial)
        shutil.rmtree(scratch)
    return exported


def export_for_deepspeed(name: str, folder: Path) -> ExportedModel:
    """Write the newest checkpoint of a run: its model, and weights and optimizer state in DeepSpeed's format.

    The folder appears when it is complete. Raise InputError before loading anything.
    """
    check_new(folder)
    run, checkpoint = newest_checkpoint(name)
    check_overlaps(run, [("DIR", folder)])
    prepared = prepare_silently(run)
    with new_folder(folder) as partial:
        _write_source(open_checkpoint(run, prepared, checkpoint), partial)
        write_universal(run, prepared, checkpoint, partial)
    return ExportedModel(str(folder), "deepspeed")


def _find_source(name: str) -> tuple[Path | OpenedModel | AssembledModel, RunConfig | None]:
    """Return the model (its folder, or the loaded model of an unfinished run or DeepSpeed checkpoint) and its run."""
    check_model_name(name)
    folder = Path(name)
    run_folder = RunFolder(folder)
    if run_folder.config.is_file():
        run = load_run(name)
        run_folder.check_config(run)
        return run_folder.newest_model() or open_model(name, torch.device("cpu")), run
    check_was_trained(run_folder)
    if is_sharded_checkpoint(folder):
        return assemble_model(folder), None
    if read_adapter(name) is not None:
        return folder, None
    if (folder / "config.json").is_file():
        check_folder(folder)
        return folder, None
    fix = "use the folder of a run or model; for a model on the hub: hf download NAME --local-dir FOLDER"
    similar = None if folder.is_dir() else find_similar_name(name)
    fix = f"did you mean {similar}?" if similar else fix
    raise InputError.at(name, "is neither a run nor a folder with a model", fix)


def _write_source(source: Path | OpenedModel | AssembledModel, folder: Path) -> Path:
    """Write the model to `folder`. Of a model folder, copy the files and the folders named in modules.json."""
    folder.mkdir(exist_ok=True)
    if not isinstance(source, Path):
        weights = source.weights if isinstance(source, AssembledModel) else None
        files = source.objective.model_files(source.model) if isinstance(source, OpenedModel) else {}
        write_model(source.model, source.tokenizer, folder, weights, files)
        return folder
    adapter = read_adapter(str(source))
    if adapter is None:
        check_complete_folder(str(source))
    for file in source.iterdir():
        if file.is_file():
            shutil.copy2(file, folder)
    if adapter is not None and adapter.base != adapter.config.base_model_name_or_path:
        set_base_model(folder, str(Path(adapter.base).resolve()))
    for name in module_folders(source):
        shutil.copytree(source / name, folder / name)
    return folder


def _merge_adapter(folder: Path, run: RunConfig | None, target: Path) -> dict[str, str]:
    """Merge an adapter into its base model, and write it in the base's dtypes. Return fields of `ExportedModel`."""
    adapter = read_adapter(str(folder))
    assert adapter is not None
    tokenizer = load_tokenizer(str(folder))
    objective = open_objective(str(folder), run, tokenizer)
    request = objective.model_request(ModelConfig.model_validate({"from": str(folder)}))
    objective.read_model_files(folder)
    merged = load_model(request, tokenizer, merge=True)
    dtype = _restore_dtypes(merged, adapter.base)
    target.mkdir(exist_ok=True)
    write_model(merged, tokenizer, target, files=objective.model_files(merged))
    return {"merged_into": adapter.base, "dtype": str(dtype).removeprefix("torch.")}


def _restore_dtypes(merged: PreTrainedModel, base: str) -> torch.dtype:
    """Convert each tensor to its dtype in the base's files, new tensors to the main dtype. Return the main dtype."""
    config, _ = read_config(base)
    dtypes = saved_dtypes(base, config)
    main_dtype = config.dtype or config.get_text_config().dtype
    if not isinstance(main_dtype, torch.dtype):
        main_dtype = Counter(dtypes.values()).most_common(1)[0][0]
    for name, parameter in merged.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, main_dtype))
    for name, buffer in merged.named_buffers():  # e.g. DeepSeek's router correction, in float32
        buffer.data = buffer.data.to(dtypes.get(name, buffer.dtype))
    return main_dtype
