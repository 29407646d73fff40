"""The model that a push uploads: options, the files in its folder, and the model card."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import safe_open

from artel.config import RunConfig, load_run
from artel.errors import InputError, Problem
from artel.inference.open import check_was_trained, open_checkpoint
from artel.models.loading.check import check_complete_folder
from artel.models.loading.language_part import is_multimodal
from artel.models.loading.model_folder import read_config
from artel.models.loading.save import write_model
from artel.models.lora.adapter_folder import CONFIG, read_adapter, set_base_model
from artel.objectives import Objective, build_objective
from artel.preparing import prepare_silently
from artel.registry import OBJECTIVES
from artel.reports.model_card import MAIN, PublishedModel, model_card
from artel.reports.run_data import RunData, check_is_run, read_run
from artel.storage import check_new
from artel.tokens import load_tokenizer
from artel.training import RunFolder
from artel.training.checkpoint.format import checkpoint_path
from artel.training.run_folder import written_checkpoints

_ADDRESS = re.compile(r"(?:https?://[^/]+/|hf://(?:models/)?)([\w.-]+/[\w.-]+?)/?$")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]+)*")
_BRANCH = re.compile(r"(?!.*(?:\.\.|//|@\{))[\w][\w./-]*(?<![./])")


@dataclass(frozen=True, slots=True)
class PushOptions:
    public: bool = False
    """Visibility of a new repository."""
    step: str = ""
    """Checkpoint to push instead of the final model: the number of its step, latest or best."""
    revision: str = ""
    """The branch. By default main, or step-N for a checkpoint."""
    license: str = ""
    """The model's license, as the hub names it: apache-2.0."""
    languages: tuple[str, ...] = ()
    """Codes of the model's languages: ru, en. By default those of data.clean.languages."""
    base_model: str = ""
    """The hub id of the base model, if the run names a folder."""
    dry_run: Path | None = None
    """A folder to write to instead of the hub."""

    def check(self, repo: str) -> None:
        """Raise InputError with all problems of the repository's name and the options."""
        problems = list(self._find_problems(repo))
        if problems:
            raise InputError(problems)
        if self.dry_run is not None:
            check_new(self.dry_run)

    def _find_problems(self, repo: str) -> Iterator[Problem]:
        yield from _find_id_problems("REPO", repo, owner_optional=True)
        if self.base_model:
            yield from _find_id_problems("--base-model", self.base_model, owner_optional=False)
        if self.step and not re.fullmatch(r"\d+|latest|best", self.step):
            fix = "use the number of a checkpoint's step, latest or best"
            yield Problem("--step", f"{self.step!r} is not a step", fix)
        if self.revision and not _BRANCH.fullmatch(self.revision):
            fix = f"use a name, e.g. {MAIN} or step-1500"
            yield Problem("--revision", f"{self.revision!r} is not a valid branch name", fix)
        if self.license and not _LICENSE.fullmatch(self.license):
            fix = "use the hub's name of the licence: apache-2.0, cc-by-4.0, other"
            yield Problem("--license", f"{self.license!r} is not the name of a licence", fix)
        for language in self.languages:
            if not _LANGUAGE.fullmatch(language):
                yield Problem("--language", f"{language!r} is not a language code", "use an ISO 639 code: en, ru")


def is_repo_id(name: str) -> bool:
    """True if the name is valid for a repository of the hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _find_id_problems(option: str, name: str, *, owner_optional: bool) -> Iterator[Problem]:
    """Yield the problems of a repository's id. With `owner_optional`, a name without an owner belongs to the user."""
    fix = "write OWNER/NAME: letters, digits, - _ . in each"
    address = _ADDRESS.match(name)
    if address is not None:
        yield Problem(option, f"{name} is an address, not the name of a repository", f"write {address[1]}")
        return
    if os.path.lexists(name) and not owner_optional:
        yield Problem(option, f"{name} is a local folder, not the name of a repository", fix)
        return
    if not is_repo_id(name):
        yield Problem(option, f"{name!r} is not the name of a hub repository", fix)
        return
    if "/" not in name and not owner_optional:
        yield Problem(option, f"{name} has no owner", fix)


CARD = "README.md"
_MAX_POINTS = 100_000  # per curve. Runs rarely log more, so the values of any step can be found


@dataclass(frozen=True, slots=True)
class PushedModel:
    """The model of a run to push."""

    run: RunConfig
    folder: RunFolder
    checkpoint: Path | None
    """None for the final model."""
    step: int | None
    base_model: str
    """A hub id, or empty."""

    @property
    def revision(self) -> str:
        """The default branch."""
        return MAIN if self.checkpoint is None else f"step-{self.step}"


def find_model(name: str, options: PushOptions) -> PushedModel:
    """Find the final model of a run, or the checkpoint in the options, without loading it.

    Raise InputError if there is none, or it is an adapter whose base model is not on the hub.
    """
    folder = _run_folder(name)
    run = load_run(name)
    folder.check_config(run)
    base = options.base_model or _hub_id(run.model.from_)
    if options.step:
        checkpoint = _find_checkpoint(folder, options.step)
        if run.model.lora is not None and not base:
            raise _unknown_base_error(run.model.from_ or "")
        return PushedModel(run, folder, checkpoint, int(checkpoint.name.removeprefix("step-")), base)
    if folder.newest_model() is None:
        steps = _list_steps(folder)
        if not steps:
            check_was_trained(folder)
        fix = f"push a checkpoint: --step {steps[-1]}; or train it to its end: artel train {folder.config}"
        raise InputError.at(name, "has no model yet: the run is not complete", fix)
    _check_model(folder)
    adapter = read_adapter(str(folder.model))
    if adapter is None:
        check_complete_folder(str(folder.model))
    else:
        base = options.base_model or _hub_id(adapter.base)
        if not base:
            raise _unknown_base_error(adapter.base)
    result = folder.read_result() if folder.result.is_file() else {}
    step = result.get("model_step", result.get("steps"))
    return PushedModel(run, folder, None, step if isinstance(step, int) else None, base)


def _run_folder(name: str) -> RunFolder:
    """Return the run's folder. Raise InputError for any other folder, such as a model's."""
    path = Path(name)
    folder = RunFolder(path)
    if not folder.config.is_file() and any((path / file).is_file() for file in ("config.json", CONFIG)):
        fix = f"use the folder of a run; upload a model alone by: hf upload OWNER/NAME {name}"
        raise InputError.at(name, "is the folder of a model, not of a run", fix)
    check_is_run(folder)
    if not folder.config.is_file():
        check_was_trained(folder)
        raise InputError.at(name, "has no config.yaml", f"train it by its run file: artel train RUN.yaml run={name}")
    return folder


def _check_model(folder: RunFolder) -> None:
    """Raise InputError if RUN/model does not hold the model that artel wrote."""
    names = {path.name for path in _files_by_artel(folder)}
    has_config = bool(names & {"config.json", CONFIG})
    if not has_config or not any(name.endswith(".safetensors") for name in names):
        foreign = ", ".join(path.name for path in folder.foreign_model_files())
        message = "does not contain the model that artel wrote there"
        message += f"; artel did not write {foreign}" if foreign else ": it lacks a configuration or weights"
        fix = "move other files away, and save the model again: artel train RUN"
        raise InputError.at(str(folder.model), message, fix)


def _files_by_artel(folder: RunFolder) -> list[Path]:
    """Return the files that artel wrote into RUN/model."""
    foreign = set(folder.foreign_model_files())
    return sorted(path for path in folder.model.iterdir() if path not in foreign)


def _list_steps(folder: RunFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in written_checkpoints(folder.checkpoints)]


def _find_checkpoint(folder: RunFolder, step: str) -> Path:
    """Return the checkpoint of a step, or the latest or best one. Raise InputError if it does not exist."""
    by_step = step.isdecimal()
    path = checkpoint_path(folder.checkpoints, int(step)) if by_step else (folder.checkpoints / step).resolve()
    if path.is_dir():
        return path
    steps = ", ".join(map(str, _list_steps(folder)))
    fix = f"use one of: {steps}" if steps else f"train it: artel train {folder.config}"
    raise InputError.at("--step", f"{folder.path} has no checkpoint {step}", fix)


def _hub_id(name: str | None) -> str:
    """Return the base model's hub id. Empty for a folder."""
    if not name or Path(name).exists() or name.count("/") != 1:
        return ""
    return name if is_repo_id(name) else ""


def _unknown_base_error(base: str) -> InputError:
    message = f"the base model of this adapter is the folder {base}, which is not on the hub"
    fix = "give its id on the hub: --base-model OWNER/NAME (push its run first if it is yours)"
    return InputError.at("--base-model", message, fix)


def write_folder(model: PushedModel, repo: str, options: PushOptions, folder: Path, *, links: bool) -> list[str]:
    """Write the files of the repository into `folder`. With `links`, link files of RUN/model instead of copying them.

    Return the names in RUN/model that were skipped. Raise InputError for symbolic links there, which may lead anywhere.
    """
    skipped = []
    if model.checkpoint is not None:
        opened = open_checkpoint(model.run, prepare_silently(model.run), model.checkpoint)
        write_model(opened.model, opened.tokenizer, folder, files=opened.objective.model_files(opened.model))
        del opened
    else:
        _copy_files(_files_by_artel(model.folder), folder, links=links)
        skipped = [path.name for path in model.folder.foreign_model_files() if path.name != CARD or path.is_symlink()]
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        set_base_model(folder, model.base_model)
    card_file = model.folder.model / CARD
    is_file = card_file.is_file() and not card_file.is_symlink()
    if model.checkpoint is None and is_file and card_file in model.folder.foreign_model_files():
        shutil.copyfile(card_file, folder / CARD)
    else:
        data = read_run(model.folder.path, _MAX_POINTS)
        card = model_card(data, describe_model(model, data, repo, options, folder))
        (folder / CARD).unlink(missing_ok=True)  # peft may have written a card
        (folder / CARD).write_text(card, encoding="utf-8")
    return skipped


def _copy_files(paths: list[Path], folder: Path, *, links: bool) -> None:
    """Copy or link files. Create folders in both cases. Raise InputError for a symbolic link."""
    for path in paths:
        target = folder / path.name
        if path.is_symlink():
            fix = f"put the file itself there: {path.readlink()}"
            raise InputError.at(str(path), "is a symbolic link, but only files are uploaded", fix)
        if path.is_dir():
            target.mkdir()
            _copy_files(sorted(path.iterdir()), target, links=links)
        elif links:
            target.symlink_to(path.resolve())
        else:
            shutil.copyfile(path, target)


def describe_model(model: PushedModel, data: RunData, repo: str, options: PushOptions, folder: Path) -> PublishedModel:
    """Return the description of the model in a folder, for its card."""
    run = model.run
    objective = build_objective(run, load_tokenizer(str(folder)))
    is_adapter = (folder / CONFIG).is_file() and not (folder / "config.json").is_file()
    return PublishedModel(
        repo=repo,
        auto_class=_auto_class(objective, folder if not is_adapter else run.model.from_),
        objective=run.objective,
        does=objective.presentation.does or OBJECTIVES[run.objective].presentation.does,
        pipeline_tag=objective.presentation.pipeline_tag,
        usage=objective.decoding.model_card_code(),
        command=objective.decoding.demo_command(repo.split("/")[-1], None),
        model_type=_model_type(data, folder, is_adapter=is_adapter),
        parameters=sum(_element_counts(folder)),
        step=model.step,
        revision=options.revision or model.revision,
        is_adapter=is_adapter,
        base_model=model.base_model,
        license=options.license,
        languages=options.languages or tuple(run.data.clean.languages),
    )


def _auto_class(objective: Objective, source: Path | str | None) -> str:
    """Return the transformers class that opens the full model (or an adapter's base), including a vision tower."""
    try:
        config = None if source is None else read_config(str(source))[0]
    except InputError:  # the base model is not on this machine
        config = None
    is_image_model = config is not None and is_multimodal(config, objective.auto_class)
    return "AutoModelForImageTextToText" if is_image_model else objective.auto_class


def _model_type(data: RunData, folder: Path, *, is_adapter: bool) -> str:
    if not is_adapter:
        return str(read_config(str(folder))[0].model_type)
    description = str(data.starts[-1].chosen.get("model", "")) if data.starts else ""
    match = re.match(r"[\w-]+(?=,)", description)
    return match[0] if match else ""


def _element_counts(folder: Path) -> Iterator[int]:
    """Yield the number of elements of each tensor in a model's files, without reading the tensors."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                yield math.prod(tensors.get_slice(name).get_shape())
