"""TRL's trainers as peers in benchmarks/gpu_table.py, tuned by someone who knows them well.

Packed conversations (SFTTrainer), preferences (DPOTrainer) and rewards (GRPOTrainer), on the texts that artel reads.
Unlike TRL's defaults, nothing is recomputed in the backward pass, the whole batch is computed at a time, and AdamW is
fused on a GPU. Nothing is saved or reported. It imports nothing of artel.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import is_flash_attn_2_available
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

if TYPE_CHECKING:
    from contestant import AfterStep, Work


def train(work: Work, after_step: AfterStep) -> None:
    """Train until killed; see contestant.py."""
    {"chat": _chat, "preference": _preference, "policy": _policy}[work.objective](work, after_step)


train.precision = "bf16"


def _chat(work: Work, after_step: AfterStep) -> None:
    # TRL joins the packed rows of a batch to one. Only these kinds of attention skip the pairs of different documents.
    attention = "flash_attention_2" if is_flash_attn_2_available() else "flex_attention"
    options = {"packing": True, "max_length": work.length, "assistant_only_loss": True}
    attention = attention if work.device == "cuda" else "sdpa"
    _start(work, after_step, SFTTrainer, SFTConfig, "chat.jsonl", attention, options)


def _preference(work: Work, after_step: AfterStep) -> None:
    # artel, too, computes the reference's log-probabilities once, before the first step.
    options = {"beta": 0.1, "max_length": work.length, "precompute_ref_log_probs": True}
    _start(work, after_step, DPOTrainer, DPOConfig, "preferences.jsonl", "sdpa", options)


def _policy(work: Work, after_step: AfterStep) -> None:
    options = {"num_generations": work.answers, "max_completion_length": work.new_tokens, "loss_type": "dr_grpo",
               "scale_rewards": False, "beta": 0.0, "temperature": 1.0, "top_k": 0}  # fmt: skip
    rewards = runpy.run_path(str(Path(work.folder) / "rewards.py"))
    _start(work, after_step, GRPOTrainer, GRPOConfig, "prompts.jsonl", "sdpa", options, reward_funcs=rewards["score"])


def _start(
    work: Work, after_step: AfterStep, trainer_class: Any, config_class: Any, file: str, attention: str,
    options: dict[str, Any], **more: Any,
) -> None:  # fmt: skip
    folder = Path(work.folder)
    config = config_class(
        output_dir=str(folder / "trl"),
        max_steps=1_000_000,  # more than are ever run
        per_device_train_batch_size=work.batch * (work.answers or 1),
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=work.betas[0],
        adam_beta2=work.betas[1],
        adam_epsilon=work.epsilon,
        weight_decay=work.weight_decay,
        max_grad_norm=work.clip,
        optim="adamw_torch_fused" if work.device == "cuda" else "adamw_torch",
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=work.device == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )

    class Counted(trainer_class):
        """Passes on the loss of each step."""

        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            self.newest_loss = super().training_step(*arguments, **named)
            return self.newest_loss

    class StepEnds(TrainerCallback):
        seen = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen = trainer._total_train_tokens  # without padding; TRL has no public name for it
            after_step(trainer.newest_loss, seen - self.seen)
            self.seen = seen

    dataset = load_dataset("json", data_files=str(folder / file), split="train", cache_dir=str(folder / "datasets"))
    model = AutoModelForCausalLM.from_pretrained(work.model, attn_implementation=attention)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    callbacks = [StepEnds()]
    trainer = Counted(model=model, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=callbacks,
                      **more)  # fmt: skip
    trainer.train()
