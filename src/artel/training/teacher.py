"""The teacher of a run: either its outputs are computed once, before the student is loaded, or it stays in memory.

The outputs are cached next to the store, under a key of the store, the teacher's weights and the objective's settings.
Each rank computes some shards, then the teacher's memory is freed. A resumed run uses the same outputs and no longer
needs the teacher.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import torch
import torch.distributed as dist
import xxhash
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.errors import InputError, WorkError
from artel.integers import ceil_div
from artel.messages import logger
from artel.objectives import Objective
from artel.objectives.hooks import Teacher
from artel.parallel import World
from artel.storage import lock, write_file
from artel.tokens import Samples, TokenStore, evaluation_rows, load_tokenizer
from artel.training.evaluation import ProgressMessages, micro_batch_size
from artel.training.heartbeat import heartbeat
from artel.training.teacher_cache import (
    CachedOutputs,
    Shard,
    damaged_shards,
    read_manifest,
    read_metadata,
    split_into_shards,
    write_manifest,
    write_shard,
)
from artel.training.teacher_model import TeacherModel, load_teacher, release_memory, teacher_precision, weights_digest

Result = TypeVar("Result")
_FORMAT = 1
_SPLITS = {"train": False, "validation": True}


def set_cached_outputs(objective: Objective, store: TokenStore, note: Path) -> bool:
    """Give an objective the teacher's cached outputs. Return False if they are gone.

    `note`: the run's file with their location. Computes nothing, and does not verify checksums.
    """
    folder = _read_recorded_folder(note, store)
    if folder is None:
        return False
    for name, is_validation in _SPLITS.items():
        objective.set_cached_outputs(CachedOutputs(folder, name), validation=is_validation)
    return True


def set_teacher(
    objective: Objective, config: RunConfig, store: TokenStore, world: World, note: Path, resumes: bool
) -> None:
    """Give an objective its teacher, or the teacher's outputs for the store's samples. Collective.

    `note`: the run's file with the location of the outputs, which a run that `resumes` uses. Raise InputError or
    WorkError.
    """
    teacher = objective.teacher
    if teacher is None:
        return
    if teacher.settings is None:
        role = "model before training" if teacher.is_initial_model else "teacher"
        logger.info("loading the %s %s, which stays in memory", role, teacher.model)
        model = load_teacher(teacher, config, objective, world)
        objective.set_teacher(model.call, model.config)
        return
    folder = _find_or_compute_outputs(objective, teacher, config, store, world, note if resumes else None)
    alignment = read_manifest(folder).get("note")
    if alignment:
        logger.info(alignment)
    if world.first and not (resumes and note.is_file()):
        write_file(note, orjson.dumps({"outputs": str(folder)}))
    for name, is_validation in _SPLITS.items():
        objective.set_cached_outputs(CachedOutputs(folder, name), validation=is_validation)


def _find_or_compute_outputs(
    objective: Objective, teacher: Teacher, config: RunConfig, store: TokenStore, world: World, note: Path | None
) -> Path:
    """Return the folder with the teacher's outputs, after computing missing shards."""

    def find() -> str:
        recorded = None if note is None else _read_recorded_folder(note, store)
        if recorded is not None:
            _remove_damaged(recorded)
            return str(recorded)
        inputs = {
            "format": _FORMAT,
            "store": store.digest,
            "teacher": weights_digest(teacher.model, f"{objective.section}.teacher"),
            "settings": teacher.settings,
            "precision": teacher_precision(config, world.device),
        }
        if teacher.reads_text:
            inputs["tokenizer"] = load_tokenizer(teacher.model, f"{objective.section}.teacher").fingerprint
        key = xxhash.xxh3_128_hexdigest(orjson.dumps(inputs, option=orjson.OPT_SORT_KEYS))
        folder = store.folder.resolve().with_name(f"{store.folder.name}.teachers") / key
        _remove_damaged(folder)
        return str(folder)

    folder = Path(_run_on_first_rank(world, find))
    if not _run_on_first_rank(world, folder.is_dir):
        _compute_outputs(objective, teacher, config, store, world, folder)
    if not folder.is_dir():
        message = f"{folder} does not exist on rank {world.rank}, but all processes share the outputs of the teacher"
        raise WorkError.at("data.store", message, "use a folder that all hosts share")
    return folder


def _read_recorded_folder(note: Path, store: TokenStore) -> Path | None:
    """Return the folder named in `note`, if it exists and belongs to the store."""
    try:
        folder = Path(orjson.loads(note.read_bytes())["outputs"])
        return folder if read_manifest(folder)["store"] == store.digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_damaged(folder: Path) -> None:
    """Remove damaged shards from a complete folder, and make it incomplete, so that they are computed again."""
    with _lock_folder(folder):
        if not folder.is_dir():
            return
        try:
            damaged = damaged_shards(folder)
        except (OSError, ValueError):  # a damaged manifest: no shard can be verified
            damaged = ["manifest.json", *(str(file.relative_to(folder)) for file in folder.glob("*/*.safetensors"))]
        if not damaged:
            return
        logger.info("%s was changed or damaged: the teacher runs again", folder / damaged[0])
        for name in damaged:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(_incomplete_folder(folder), ignore_errors=True)
        folder.rename(_incomplete_folder(folder))


def _lock_folder(folder: Path) -> AbstractContextManager[object]:
    """Lock a folder of outputs for changes, since runs on one store may have the same teacher."""
    waiting = f"waiting for another run that runs the same teacher: {folder}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    return lock(folder.with_name(f"{folder.name}.lock"), lambda: logger.info(waiting))


def _incomplete_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.parts")


def _compute_outputs(
    objective: Objective, teacher: Teacher, config: RunConfig, store: TokenStore, world: World, folder: Path
) -> None:
    """Compute the missing shards of a folder, and give the folder its final name."""
    splits = {"train": store.train, "validation": store.validation}
    datasets = {name: objective.dataset(split) for name, split in splits.items()}
    sample_bytes = config.data.block * teacher.bytes_per_target
    shards = [shard for name in _SPLITS for shard in split_into_shards(name, len(datasets[name]), sample_bytes)]
    incomplete = _incomplete_folder(folder)
    if world.first:
        incomplete.mkdir(parents=True, exist_ok=True)
    folder_lock = _lock_folder(folder)
    _run_on_first_rank(world, folder_lock.__enter__)
    try:
        if _run_on_first_rank(world, folder.is_dir):  # another run has computed the outputs meanwhile
            return
        missing = _run_on_first_rank(
            world, lambda: [shard for shard in shards if not (incomplete / shard.name).is_file()]
        )
        logger.info("loading the teacher %s", teacher.model)
        model = load_teacher(teacher, config, objective, world)
        progress = ProgressMessages("running the teacher:")
        num_done = len(shards) - len(missing)
        if num_done:
            logger.info("running the teacher: %s of %s shards already exist", f"{num_done:,}", f"{len(shards):,}")
        for start in range(0, len(missing), world.size):
            progress(start / len(missing))
            _compute_shards(objective, model, config, datasets, missing[start : start + world.size], world, incomplete)
        del model
        release_memory(world.device)
        _run_on_first_rank(world, lambda: _complete_folder(objective, folder, incomplete, shards, store, teacher))
    finally:
        if world.first:
            folder_lock.__exit__(None, None, None)


def _compute_shards(
    objective: Objective,
    model: TeacherModel,
    config: RunConfig,
    datasets: dict[str, Samples],
    shards: list[Shard],
    world: World,
    folder: Path,
) -> None:
    """Compute one shard per rank. If the teacher is sharded, all ranks run the same number of batches."""
    shard = shards[world.rank] if world.rank < len(shards) else None
    batch_rows = micro_batch_size(config, world)
    max_batches = max(ceil_div(len(shard.samples), batch_rows) for shard in shards)
    started = time.monotonic()
    counts: list[np.ndarray] = []
    arrays: dict[str, list[np.ndarray]] = {}
    samples = datasets[(shard or shards[0]).split]
    indices = np.empty(0, dtype=np.int64) if shard is None else shard.samples

    def work(teacher: PreTrainedModel) -> torch.Tensor:
        sums = torch.zeros(3, dtype=torch.float64)
        num_batches = max_batches if model.is_sharded else ceil_div(len(indices), batch_rows)
        for start in range(0, num_batches * batch_rows, batch_rows):
            rows = evaluation_rows(samples, indices[start : start + batch_rows], batch_rows)
            batch_sums, row_counts, outputs = objective.outputs_to_cache(
                teacher, objective.batch(rows).to(world.device)
            )
            sums += batch_sums
            counts.append(row_counts[rows.valid])
            for name, array in outputs.items():
                arrays.setdefault(name, []).append(array)
            heartbeat("a batch of the teacher")
        return sums

    sums = model.run(work, world.device)
    if shard is not None:
        metadata = {"sums": sums.tolist(), "seconds": time.monotonic() - started}
        joined = {name: np.concatenate(batches) for name, batches in arrays.items()}
        write_shard(folder, shard, np.concatenate(counts), joined, metadata)
    world.barrier()


def _complete_folder(
    objective: Objective, folder: Path, incomplete: Path, shards: list[Shard], store: TokenStore, teacher: Teacher
) -> None:
    """Write the manifest of a folder that has all shards, give the folder its final name, and log its content."""
    metadata: dict[str, Any] = {"format": _FORMAT, "store": store.digest, "teacher": teacher.model}
    metadata |= {"settings": teacher.settings, "seconds": 0.0}
    all_answered = all_targets = 0
    for name in _SPLITS:
        shard_facts = [read_metadata(incomplete, shard) for shard in shards if shard.split == name]
        loss, answered, correct = np.sum([[0.0, 0.0, 0.0], *(facts["sums"] for facts in shard_facts)], axis=0).tolist()
        targets = sum(facts["targets"] for facts in shard_facts)
        metadata["seconds"] += sum(facts["seconds"] for facts in shard_facts)
        all_answered, all_targets = all_answered + int(answered), all_targets + targets
        if answered:
            metrics = {"cross_entropy": loss / answered, "accuracy": correct / answered}
            metadata[name] = {"targets": targets, "answered": int(answered), **metrics}
            logger.info(
                "the teacher on %s: cross-entropy %.4f, accuracy %.4f", name, loss / answered, correct / answered
            )
    metadata["note"] = objective.alignment_note(all_answered / max(1, all_targets))
    write_manifest(incomplete, metadata, shards)
    incomplete.rename(folder)
    total_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    logger.info("the teacher's outputs are in %s: %s MiB", folder, f"{total_bytes / 2**20:,.1f}")


def _run_on_first_rank(world: World, work: Callable[[], Result]) -> Result:
    """Run `work` on the first rank and return its result on all ranks, or raise its InputError or WorkError on all."""
    results: list[Any] = [None, None]
    if world.first:
        try:
            results[0] = work()
        except (InputError, WorkError) as error:
            results[1] = error
    if world.size > 1:
        dist.broadcast_object_list(results, device=torch.device("cpu"))
    if results[1] is not None:
        raise results[1]
    return results[0]
