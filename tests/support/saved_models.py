"""Small models, saved and from scratch, that are built without their weights and filled afterwards."""

import json
import string
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import BertTokenizerFast, GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from artel.config import ModelConfig

CAUSAL, MASKED, ANSWERS = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForQuestionAnswering"


def saved_model(folder):
    """What the skeleton of a saved model and the whole one are made of, for one to be held against the other."""
    return ModelConfig.model_validate({"from": str(folder)})


def qwen3_moe(**more):
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=12, intermediate_size=48, vocab_size=300,
        max_position_embeddings=64, **more))  # fmt: skip


def gpt2(kind=GPT2LMHeadModel, vocabulary=300, **more):
    torch.manual_seed(0)
    return kind(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=vocabulary, n_positions=64,
                           bos_token_id=0, eos_token_id=0, **more))  # fmt: skip


def word_pieces(folder):
    """A WordPiece tokenizer with letters, digits and a few pieces of words, saved into a folder."""
    cyrillic = [chr(code) for code in range(ord("А"), ord("я") + 1)]
    letters = [*string.ascii_letters, *string.digits, *cyrillic, "vis", "and", "left", "sal"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{each}" for each in letters), *"(),.-"]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    return tokenizer


def as_binary(model, folder):
    """As saved before safetensors: one pickle of tensors, with both names of those that are tied."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def as_fp8(model, folder):
    """As DeepSeek-V3 is saved: matrices of layers in float8, with a scale for each 128 by 128 block."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        matrix = tensors[name]
        scale = matrix.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (matrix / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.expand([-(-size // 128) for size in matrix.shape]).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(values))


SCRATCH = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip


def saved_by_the_first(rank):
    """A folder with saved models; transformers saves in the first process only."""
    import torch.distributed as dist

    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    qwen3_moe().save_pretrained(folder / "experts")
    gpt2(vocabulary=201).save_pretrained(folder / "rows")
    if rank == 0:
        as_binary(gpt2(), folder / "binary")
    dist.barrier()
    return folder


def model_cases(folder):
    """What models are taken apart: from scratch and saved, tied, of experts, of sizes that do not divide."""
    odd = {"model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 42, "head_dim": 6}  # fmt: skip
    small = {"model_type": "gpt2", "n_layer": 2, "n_embd": 18, "n_head": 3}
    experts = {"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2,
               "moe_intermediate_size": 12, "intermediate_size": 48}  # fmt: skip
    return {
        "gpt2": ModelConfig(config=small), "llama": ModelConfig(config=odd), "qwen3_moe": ModelConfig(config=experts),
        "saved qwen3_moe": saved_model(folder / "experts"), "saved gpt2": saved_model(folder / "rows"),
        "saved as a pickle": saved_model(folder / "binary"),
    }  # fmt: skip


def memory_status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024
