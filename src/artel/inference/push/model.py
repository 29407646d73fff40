"""The files of a run's model, in a folder as it is to lie on the hub, and what the model card says of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from artel.config import RunConfig, load_run
from artel.errors import InputError
from artel.inference.open import check_was_trained, open_checkpoint
from artel.inference.push.options import PushOptions, is_repo_id
from artel.models.loading.check import check_whole
from artel.models.loading.language_part import is_multimodal
from artel.models.loading.model_folder import read_config
from artel.models.loading.save import write_model
from artel.models.lora.adapter_folder import CONFIG, name_base, read_adapter
from artel.objectives import Objective, objective_of
from artel.preparing import prepare
from artel.registry import OBJECTIVES
from artel.reports.model_card import MAIN, Published, model_card
from artel.reports.run_data import RunData, check_is_run, read_run
from artel.tokens import load_tokenizer
from artel.training import RunFolder
from artel.training.checkpoint.format import checkpoint_path
from artel.training.run_folder import written_checkpoints

CARD = "README.md"
_POINTS = 100_000  # of each curve: those of a step are looked up, and a run rarely logs more


@dataclass(frozen=True, slots=True)
class PushedModel:
    """What of a run is to be pushed."""

    run: RunConfig
    folder: RunFolder
    checkpoint: Path | None
    """None for the final model."""
    step: int | None
    base_model: str
    """A hub id; empty where there is none."""

    @property
    def revision(self) -> str:
        """The branch it goes to unless another is named."""
        return MAIN if self.checkpoint is None else f"step-{self.step}"


def find_model(name: str, options: PushOptions) -> PushedModel:
    """The final model of the run, or the checkpoint that the options name. Raises InputError; nothing is loaded."""
    folder = _run_folder(name)
    run = load_run(name)
    folder.check_config(run)
    base = options.base_model or _hub_id(run.model.from_)
    if options.step:
        checkpoint = _checkpoint(folder, options.step)
        if run.model.lora is not None and not base:
            raise _nobodys_base(run.model.from_ or "")
        return PushedModel(run, folder, checkpoint, int(checkpoint.name.removeprefix("step-")), base)
    if folder.newest_model() is None:
        steps = _steps(folder)
        if not steps:
            check_was_trained(folder)
        fix = f"push a checkpoint: --step {steps[-1]}; or train it to its end: artel train {folder.config}"
        raise InputError.at(name, "has no model yet: the run is not complete", fix)
    _check_model(folder)
    adapter = read_adapter(str(folder.model))
    if adapter is None:
        check_whole(str(folder.model))
    else:
        base = options.base_model or _hub_id(adapter.base)
        if not base:
            raise _nobodys_base(adapter.base)
    result = folder.read_result() if folder.result.is_file() else {}
    step = result.get("model_step", result.get("steps"))
    return PushedModel(run, folder, None, step if isinstance(step, int) else None, base)


def _run_folder(name: str) -> RunFolder:
    """The run's folder. Raises InputError for another folder, a model's above all."""
    path = Path(name)
    folder = RunFolder(path)
    if not folder.config.is_file() and any((path / file).is_file() for file in ("config.json", CONFIG)):
        fix = f"give the folder of a run; a model alone is uploaded as it is by: hf upload OWNER/NAME {name}"
        raise InputError.at(name, "is the folder of a model, and of no run", fix)
    check_is_run(folder)
    if not folder.config.is_file():
        check_was_trained(folder)
        raise InputError.at(name, "has no config.yaml", f"train it by its run file: artel train RUN.yaml run={name}")
    return folder


def _check_model(folder: RunFolder) -> None:
    """Raise InputError where the model is not what artel wrote there."""
    written = {path.name for path in _written(folder)}
    has_config = bool(written & {"config.json", CONFIG})
    if not has_config or not any(name.endswith(".safetensors") for name in written):
        foreign = ", ".join(path.name for path in folder.foreign_in_model())
        what = "does not hold the model that artel wrote there"
        what += f"; artel did not write {foreign}" if foreign else ": it lacks a configuration or weights"
        fix = "move what is not artel's away, and let artel write the model again: artel train RUN"
        raise InputError.at(str(folder.model), what, fix)


def _written(folder: RunFolder) -> list[Path]:
    """What artel wrote into RUN/model."""
    foreign = set(folder.foreign_in_model())
    return sorted(path for path in folder.model.iterdir() if path not in foreign)


def _steps(folder: RunFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in written_checkpoints(folder.checkpoints)]


def _checkpoint(folder: RunFolder, step: str) -> Path:
    """The checkpoint of a step, or the latest or the best one."""
    numbered = step.isdecimal()
    path = checkpoint_path(folder.checkpoints, int(step)) if numbered else (folder.checkpoints / step).resolve()
    if path.is_dir():
        return path
    steps = ", ".join(f"{one}" for one in _steps(folder))
    fix = f"write one of: {steps}" if steps else f"train it: artel train {folder.config}"
    raise InputError.at("--step", f"{folder.path} has no checkpoint {step}", fix)


def _hub_id(name: str | None) -> str:
    """The name of a base model where it is one of the hub; empty where it is a folder."""
    if not name or Path(name).exists() or name.count("/") != 1:
        return ""
    return name if is_repo_id(name) else ""


def _nobodys_base(base: str) -> InputError:
    what = f"the base model of this adapter is the folder {base}, which nobody else has"
    fix = "name it on the hub: --base-model OWNER/NAME (push its run there first, where it is yours)"
    return InputError.at("--base-model", what, fix)


def write_folder(model: PushedModel, repo: str, options: PushOptions, folder: Path, *, links: bool) -> list[str]:
    """Write into `folder` all that is to lie in the repository; with `links` the files of RUN/model are only linked.

    Returns what of RUN/model was left out. Raises InputError for links in it, which may lead to any file.
    """
    left_out = []
    if model.checkpoint is not None:
        opened = open_checkpoint(model.run, prepare(model.run), model.checkpoint)
        write_model(opened.model, opened.tokenizer, folder, files=opened.objective.model_files(opened.model))
        del opened
    else:
        _place(_written(model.folder), folder, links=links)
        left_out = [path.name for path in model.folder.foreign_in_model() if path.name != CARD or path.is_symlink()]
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        name_base(folder, model.base_model)
    own_card = model.folder.model / CARD
    is_foreign = own_card.is_file() and not own_card.is_symlink() and own_card in model.folder.foreign_in_model()
    if model.checkpoint is None and is_foreign:
        shutil.copyfile(own_card, folder / CARD)
    else:
        data = read_run(model.folder.path, _POINTS)
        card = model_card(data, describe(model, data, repo, options, folder))
        (folder / CARD).unlink(missing_ok=True)  # one of peft's
        (folder / CARD).write_text(card, encoding="utf-8")
    return left_out


def _place(paths: list[Path], folder: Path, *, links: bool) -> None:
    """Copies of files, or links to them; folders are made anew."""
    for path in paths:
        target = folder / path.name
        if path.is_symlink():
            fix = f"put the file itself there: {path.readlink()}"
            raise InputError.at(str(path), "is a link, and only files are uploaded", fix)
        if path.is_dir():
            target.mkdir()
            _place(sorted(path.iterdir()), target, links=links)
        elif links:
            target.symlink_to(path.resolve())
        else:
            shutil.copyfile(path, target)


def describe(model: PushedModel, data: RunData, repo: str, options: PushOptions, folder: Path) -> Published:
    """What the card says of the model in a folder."""
    run = model.run
    objective = objective_of(run, load_tokenizer(str(folder)))
    is_adapter = (folder / CONFIG).is_file() and not (folder / "config.json").is_file()
    return Published(
        repo=repo,
        auto_class=_auto_class(objective, folder if not is_adapter else run.model.from_),
        objective=run.objective,
        does=objective.does or OBJECTIVES[run.objective].does,
        pipeline_tag=objective.pipeline_tag,
        usage=objective.usage(),
        command=objective.command(repo.split("/")[-1], None),
        model_type=_model_type(data, folder, is_adapter=is_adapter),
        parameters=sum(_sizes(folder)),
        step=model.step,
        revision=options.revision or model.revision,
        is_adapter=is_adapter,
        base_model=model.base_model,
        license=options.license,
        languages=options.languages or tuple(run.data.clean.languages),
    )


def _auto_class(objective: Objective, place: Path | str | None) -> str:
    """The transformers class that opens the model at `place` (of an adapter its base), vision tower included."""
    try:
        config = None if place is None else read_config(str(place))[0]
    except InputError:  # the base is not here
        config = None
    takes = config is not None and is_multimodal(config, objective.auto_class)
    return "AutoModelForImageTextToText" if takes else objective.auto_class


def _model_type(data: RunData, folder: Path, *, is_adapter: bool) -> str:
    if not is_adapter:
        return str(read_config(str(folder))[0].model_type)
    chosen = str(data.starts[-1].chosen.get("model", "")) if data.starts else ""
    named = re.match(r"[\w-]+(?=,)", chosen)
    return named[0] if named else ""


def _sizes(folder: Path) -> Iterator[int]:
    """The numbers in each tensor of a model's files; no number is read."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                yield size
