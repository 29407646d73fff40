"""Finishes a run: final model and result."""

from __future__ import annotations

import resource
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import torch

from artel.messages import logger
from artel.models.loading.build import build_model
from artel.models.loading.save import save_model
from artel.storage import write_file
from artel.training.checkpoint.format import Progress, checkpoint_path, full_weights, load_weights, read_progress
from artel.training.comparison import record_results
from artel.training.optim.bf16_adamw import hold_in_bf16
from artel.training.run import Run


def no_report() -> None:
    """Return None: the default for runs whose trackers need no report."""


def finish(run: Run) -> dict[str, Any]:
    """Write RUN/model and RUN/result.json after the last step is saved. Return the result.

    If the run stopped because validations did not improve, the model is the best one, not the last.
    """
    run.check_folder()
    for failure in run.saver.failures:
        logger.info(failure)
    progress = run.progress_so_far()
    saved, model_step = _select_final_checkpoint(run, progress)
    result = {
        "run": str(run.folder.path),
        "steps": progress.step,
        "model_step": model_step,
        "tokens": progress.tokens,
        "train_loss": progress.train_loss,
        "validation": progress.validation,
        "tokens_per_second": progress.tokens_per_second,
        "wall_seconds": progress.seconds,
        "peak_memory_gib": _measure_peak_memory(run.world.device) / 2**30,
    }
    is_frozen = any(not weight.requires_grad for weight in run.strategy.model.parameters())
    (frozen,) = run.strategy.all_reduce_sum([float(is_frozen)])  # a pipeline rank knows only its own stage
    if run.world.first:
        run.objective.calibrate(progress.calibration)
        # A rank that holds the full model has the final weights. Otherwise read them from the checkpoint.
        weights = None
        if not run.strategy.holds_full_model:
            weights = (_rebuild_frozen_weights(run) if frozen else {}) | full_weights(saved)
        save_model(
            run.strategy.model,
            run.tokenizer,
            run.folder.model,
            weights,
            run.objective.model_files(run.strategy.model),
            preserved_files=run.folder.foreign_model_files(),
            on_file_names=run.folder.record_model_files,
        )
        run.folder.record_weights()
        comparison = record_results(run.folder, run.config, result)
        if comparison is not None:
            logger.info(comparison)
        write_file(run.folder.result, orjson.dumps(result, option=orjson.OPT_INDENT_2))
    run.world.barrier()
    return result


def close_trackers(run: Run, make_report: Callable[[], str | None]) -> None:
    """Pass the report of a finished run to its trackers, and print what to do next."""
    run.trackers.on_finish(make_report)
    run.trackers.close()  # the progress bar ends before the last messages
    name = shlex.quote(str(run.folder.path))
    logger.info("%s: %s steps are done, the model is in %s; next:", run.folder.path, f"{run.step:,}", run.folder.model)
    logger.info("    %s", run.objective.decoding.demo_command(name, run.samples))
    for hint in run.trackers.hints:
        logger.info("    %s", hint)


def _select_final_checkpoint(run: Run, progress: Progress) -> tuple[Path, int]:
    """Return the checkpoint for the final model, and its step. Sets that step's metrics in `progress`."""
    best = run.folder.checkpoints / "best"
    is_best = progress.stopped_early and best.exists()  # after a full disk there may be no best checkpoint
    path = best if is_best else checkpoint_path(run.folder.checkpoints, progress.step)
    if run.strategy.holds_full_model and (is_best or run.config.train.ema is not None):
        load_weights(path, run.strategy.model)
    if not is_best:
        return path, progress.step
    saved = read_progress(best)  # may be an earlier step, if the disk was full when the best was to be saved
    progress.validation, progress.calibration = saved.best_validation, saved.best_calibration
    return best, saved.step


def _rebuild_frozen_weights(run: Run) -> dict[str, torch.Tensor]:
    """Build the model again and return its frozen weights, which no checkpoint has.

    Adapters have none, since they are saved without their base model.
    """
    config = run.config
    if config.model.lora is not None:
        return {}
    request = run.objective.model_request(config.model, config.data.block, config.seed)
    model = build_model(request, run.tokenizer).model
    if config.train.weights == "bf16":
        hold_in_bf16(model)
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _measure_peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of the GPU's allocator, or the largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
