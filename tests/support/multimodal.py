"""Tiny models that take images, saved in bf16 as they are published: with a vision tower, a processor, in shards."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    Gemma4Config,
    LlavaConfig,
    Mistral3Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.llava.processing_llava import LlavaProcessor

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
               "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
                            "mrope_interleaved": True, "partial_rotary_factor": 1.0}}  # fmt: skip
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 16, "num_experts": 4,
         "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16}  # fmt: skip


def _gemma3(text):
    return Gemma3Config(text_config=text | WINDOWED, vision_config=VISION | {"image_size": 16, "patch_size": 8},
                        mm_tokens_per_image=4, image_token_index=1)  # fmt: skip


def _gemma4(text):
    per_layer = {"global_head_dim": 8, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8}
    return Gemma4Config(
        text_config=text | WINDOWED | per_layer | {"vocab_size_per_layer_input": text["vocab_size"]},
        vision_config=VISION | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4}, audio_config=None,
    )  # fmt: skip


def _qwen3_vl(text):
    return Qwen3VLConfig(text_config=text | ROPE, vision_config=QWEN_VISION, image_token_id=1, video_token_id=2,
                         tie_word_embeddings=True)  # fmt: skip


def _qwen3_5_moe(text):
    return Qwen3_5MoeConfig(text_config=text | ROPE | DELTA, vision_config=QWEN_VISION, image_token_id=1,
                            video_token_id=2)  # fmt: skip


def _mistral3(text):
    vision = VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 16, "patch_size": 8}
    return Mistral3Config(text_config=text | {"model_type": "mistral"}, vision_config=vision, image_token_index=1)


def _llava(text):
    vision = VISION | {"model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
    return LlavaConfig(text_config=text | {"model_type": "llama"}, vision_config=vision, image_token_index=1)


FAMILIES = {"gemma3": _gemma3, "gemma4": _gemma4, "qwen3_vl": _qwen3_vl, "qwen3_5_moe": _qwen3_5_moe,
            "mistral3": _mistral3, "llava": _llava}  # fmt: skip
PROCESSOR_FILES = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]


def save_multimodal(folder: Path, family: str, tokenizer, **saving) -> Path:
    """A folder of a family, with its tokenizer and processor. `saving` goes to `save_pretrained`."""
    torch.manual_seed(0)
    config = FAMILIES[family](TEXT | {"vocab_size": tokenizer.vocabulary})
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, **saving)
    tokenizer.save(folder)
    if family == "llava":
        hf = AutoTokenizer.from_pretrained(folder)
        LlavaProcessor(CLIPImageProcessorPil(), hf, patch_size=8, image_token=hf.eos_token).save_pretrained(folder)
    elif family == "gemma3":
        names = ("boi_token", "eoi_token", "image_token")
        hf = AutoTokenizer.from_pretrained(folder, extra_special_tokens=dict.fromkeys(names, tokenizer.hf.eos_token))
        Gemma3Processor(Gemma3ImageProcessorPil(), hf, image_seq_length=4).save_pretrained(folder)
    else:  # its processor needs torchvision
        for name in PROCESSOR_FILES:
            (folder / name).write_text(json.dumps({"of": family, "file": name}))
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def differing(one: Path, other: Path) -> set[str]:
    """Names of the tensors that are not the same to the bit, dtype included. Both have the same names."""
    left, right = tensors_of(one), tensors_of(other)
    assert left.keys() == right.keys()
    return {name for name in left if left[name].dtype != right[name].dtype or not left[name].equal(right[name])}
