"""torchtitan as a peer in benchmarks/gpu_table.py: its Trainer on a Llama, layers compiled, nothing recomputed.

Written for torchtitan 0.3, which needs a GPU. Chunked loss, fused AdamW, CUDA graphs and a residual stream in bf16 are
its defaults. Attention is PyTorch's causal kernel, as in the other contestants: torchtitan's default, FlexAttention
with documents, has nothing to skip in rows of one document. Its fp8 is torchao's with a scale per row; artel's has a
scale per tensor. It starts from the weights in `work.model`, through torchtitan's own reader. It imports nothing of
artel.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer
from transformers import AutoConfig

if TYPE_CHECKING:
    from contestant import AfterStep, Work

_STEPS = 1_000_000  # more than are ever run


def train(work: Work, after_step: AfterStep) -> None:
    """Train until killed; see contestant.py."""
    _train(work, after_step, [])


def fp8(work: Work, after_step: AfterStep) -> None:
    """The same with matmuls of the layers in float8."""
    _train(work, after_step, [Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)])


train.precision, fp8.precision = "bf16", "fp8"


def _train(work: Work, after_step: AfterStep, converters: list[Any]) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(world)
    if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 lacks it; one process waits for no other
        distributed_utils.set_pg_timeouts = lambda **_: None
    _Counted(config_of(work, converters), after_step).train()


def config_of(work: Work, converters: list[Any]) -> Trainer.Config:
    """Return torchtitan's config of `work`."""
    hf, on_gpu = AutoConfig.from_pretrained(work.model), work.device == "cuda"
    spec = llama3.model_registry("debugmodel", converters=None)
    model = spec.model
    model.dim, model.vocab_size = hf.hidden_size, hf.vocab_size
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = hf.vocab_size, hf.hidden_size
    model.norm.normalized_shape = hf.hidden_size
    model.lm_head.in_features, model.lm_head.out_features = hf.hidden_size, hf.vocab_size
    theta, head = hf.rope_parameters["rope_theta"], hf.hidden_size // hf.num_attention_heads
    model.layers = llama3._build_llama3_layers(
        n_layers=hf.num_hidden_layers,
        dim=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        hidden_dim=hf.intermediate_size,
        rope=ComplexRoPE.Config(dim=head, max_seq_len=work.length, theta=theta),
        attn_backend="flex",
    )
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    for converter in converters:
        spec.model = converter.build().convert(spec.model)
    assets = Path(work.folder) / "titan" / "assets"  # without the chat template, whose Jinja torchtitan does not know
    assets.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(work.model) / "tokenizer.json", assets)
    adam = {"betas": tuple(work.betas), "eps": work.epsilon, "weight_decay": work.weight_decay}
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=str(assets),
        dump_folder=str(assets.parent),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=hf.vocab_size)),
        optimizer=default_adamw(lr=work.learning_rate, **adam),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0),
        training=TrainingConfig(local_batch_size=work.batch, seq_len=work.length, steps=_STEPS, max_norm=work.clip,
                                disable_cuda_graphs=not on_gpu),
        dataloader=_Rows.Config(work=work),
        metrics=MetricsProcessor.Config(log_freq=_STEPS),
        checkpoint=CheckpointManager.Config(enable=True, interval=_STEPS, initial_load_path=work.model,
                                            initial_load_in_hf=True),
        activation_checkpoint=None,
        compile=CompileConfig(enable=on_gpu),
    )  # fmt: skip


class _Rows(BaseDataLoader):
    """Reads the batches of `work` in their order."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        work: Any = None

        def to_dict(self) -> dict[str, Any]:
            return {}

    def __init__(self, config: Config, **_: Any) -> None:
        self._work = config.work

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for step in range(len(self._work.inputs) // self._work.batch):
            inputs, targets = self._work.batch_of(step)
            yield {"input": inputs}, targets

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _Counted(Trainer):
    """Passes on the loss of each step."""

    def __init__(self, config: Trainer.Config, after_step: AfterStep) -> None:
        super().__init__(config)
        self._after_step = after_step

    def forward_backward_step(self, **named: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**named)
        self._newest_loss = loss.detach().clone()  # the next replay of a CUDA graph overwrites it
        return loss

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self._after_step(self._newest_loss)
