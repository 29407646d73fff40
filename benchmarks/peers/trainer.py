"""Peers of benchmarks/train_speed.py: transformers' Trainer with its defaults, and tuned by someone who knows it well.

    python benchmarks/train_speed.py --peer benchmarks/peers/trainer.py:default --peer benchmarks/peers/trainer.py:tuned

Both keep TrainingArguments' defaults except for what is named here. Rows come in the order of the file, because every
contestant must see the same ones. Nothing is saved or reported, and there is no progress bar. It needs accelerate, and
imports nothing of artel. With `work.lora` the model is PEFT's, on weights in bf16.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

if TYPE_CHECKING:
    from contestant import AfterStep, Work

_STEPS = 1_000_000  # more than are ever run
_ROWS = 8  # the default of per_device_train_batch_size
_OPTIMIZERS = {"adamw8bit": "adamw_8bit", "adafactor": "adafactor", "sgd": "sgd"}


def default(work: Work, after_step: AfterStep) -> None:
    """With its defaults: fp32, 8 rows at a time (or what divides the batch), its own data loader, not compiled."""
    rows = max(rows for rows in range(1, _ROWS + 1) if work.batch % rows == 0)
    _train(work, after_step, rows, {})


default.precision = "fp32"


def tuned(work: Work, after_step: AfterStep) -> None:
    """In bf16 with the whole batch at a time; on a GPU also compiled, with fused AdamW and data workers."""
    options: dict[str, Any] = {"bf16": True}
    if work.device == "cuda":
        options |= {"torch_compile": True, "dataloader_num_workers": 2, "dataloader_pin_memory": True}
        if work.optimizer == "adamw":
            options["optim"] = "adamw_torch_fused"
    _train(work, after_step, work.batch, options)


tuned.precision = "bf16"


def _train(work: Work, after_step: AfterStep, rows: int, options: dict[str, Any]) -> None:
    auto_class = AutoModelForCausalLM if work.objective == "causal" else AutoModelForMaskedLM
    if work.optimizer in _OPTIMIZERS:
        options["optim"] = _OPTIMIZERS[work.optimizer]
    arguments = TrainingArguments(
        output_dir=str(Path(work.folder) / "trainer"),
        max_steps=_STEPS,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=work.batch // rows,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=work.betas[0],
        adam_beta2=work.betas[1],
        adam_epsilon=work.epsilon,
        weight_decay=work.weight_decay,
        max_grad_norm=work.clip,
        use_cpu=work.device == "cpu",
        remove_unused_columns=False,  # models do not name shift_labels among their arguments
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    model = auto_class.from_pretrained(work.model)
    if work.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=work.lora, lora_alpha=2 * work.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    _InOrder(model, arguments, _Rows(work), after_step).train()


class _Rows(Dataset):
    def __init__(self, work: Work) -> None:
        self._work = work
        self.shifted = work.objective == "causal"
        """Whether a token's target is the next one."""

    def __len__(self) -> int:
        return len(self._work.inputs)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids, targets = (
            torch.from_numpy(part[row].astype(np.int64)) for part in (self._work.inputs, self._work.targets)
        )
        # With `shift_labels` the last token of a row has a target too. `labels` are then counted at most.
        return {"input_ids": ids, "labels": targets} | ({"shift_labels": targets} if self.shifted else {})


class _InOrder(Trainer):
    """Reads rows in their order, and passes on the loss of each step."""

    def __init__(self, model: Any, arguments: TrainingArguments, rows: _Rows, after_step: AfterStep) -> None:
        super().__init__(model, arguments, train_dataset=rows, callbacks=[_StepEnds(self)])
        if not rows.shifted:
            # RobertaForMaskedLM takes the number of targets and does not divide by it: with two micro-batches, loss
            # and gradient would be twice too large. Without that number Trainer divides by the micro-batches.
            self.model_accepts_loss_kwargs = False
        self.after_step = after_step
        self._rows = rows
        self.losses: list[torch.Tensor] = []
        """Of the micro-batches of this step; they add up to the step's mean."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        return SequentialSampler(self._rows)

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **named)
        self.losses.append(loss)
        return loss


class _StepEnds(TrainerCallback):
    def __init__(self, trainer: _InOrder) -> None:
        self._trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        loss = torch.stack(self._trainer.losses).sum()
        self._trainer.losses.clear()
        self._trainer.after_step(loss)
