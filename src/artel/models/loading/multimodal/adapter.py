"""Adapters of a language part: in files they have the names of the whole, so that peft and vLLM put them into it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from artel.models.loading.multimodal.language_part import Whole, whole_of
from artel.models.lora.adapters import CONFIG, PREFIX, WEIGHTS, AdapterFolder, read_adapter


def name_as_whole(whole: Whole, folder: Path) -> None:
    """Give the files of an adapter that was trained in the language part the whole's names."""
    _rename(folder, whole.name_of, dict(whole.model.named_modules()))


@contextmanager
def named_as_part(model: nn.Module, adapter: AdapterFolder) -> Iterator[AdapterFolder]:
    """Within the block: the adapter with the names of `model`, where that is the language part of a whole."""
    whole = whole_of(model)
    if whole is None:
        yield adapter
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(adapter.folder / name, folder / name)
        _rename(folder, lambda name: whole.name_in_part(name) or name, dict(model.named_modules()))
        renamed = read_adapter(place)
        assert renamed is not None
        yield replace(renamed, base=adapter.base)


def _rename(folder: Path, rename: Callable[[str], str], modules: Mapping[str, nn.Module]) -> None:
    """Rename tensors and modules. `modules` are those of the model that the new names are of."""
    old = load_file(folder / WEIGHTS)
    new = {PREFIX + rename(name.removeprefix(PREFIX)): tensor for name, tensor in old.items()}
    save_file(new, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    adapted = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in new if ".lora_" in name}
    layers = sorted(name for name in adapted if isinstance(modules.get(name), nn.Linear))
    config["target_modules"] = _targets(layers, config["target_modules"] or [], modules)
    if config.get("modules_to_save"):
        config["modules_to_save"] = [rename(name) for name in config["modules_to_save"]]
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _targets(layers: list[str], endings: list[str] | str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The names by which peft finds these layers: endings, unless other modules end so (those of the vision tower)."""
    if isinstance(endings, list):
        matched = [name for name in modules if any(f".{name}".endswith(f".{ending}") for ending in endings)]
        if sorted(matched) == layers:
            return endings
    return layers
