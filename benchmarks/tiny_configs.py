"""A tiny configuration of any architecture of transformers, for a run file: its default, every known size made small.

Sizes are known by their names, the same for all architectures; `EXCEPTIONS` has what these cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH, HEADS, KEY_HEADS, HEAD_SIZE, LAYERS, EXPERTS, VOCABULARY = 64, 4, 2, 16, 2, 4, 320
MOST_LAYERS = 8
"""Of an architecture that has layers of several kinds: as many as it takes to have one of each, at most so many."""

_WIDTHS = "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim d_latents pooler_hidden_size"
_WIDTHS += " projection_dim attention_hidden_size hidden_size_global embedding_dim lru_width prediction_head_size"
_WIDTHS += " input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim vision_output_dim"
_WIDTHS += (
    " projector_input_dim projector_output_dim out_hidden_size output_channels backbone_hidden_size entity_emb_size"
)
_WIDTHS += " codebook_dim vector_quantization_hidden_dimension audio_encoder_hidden_size adapter_input_size"
_INNER = "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim d_ff dff dim_ff hidden_dim mlp_dim n_inner"
_INNER += " ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size prompt_mid_dim"
_SPARSE = "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"
_SPARSE += " shared_experts_intermediate_size moe_shared_expert_intermediate_size"
_HEADS = "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads"
_HEADS += " num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_heads"
_HEADS += " num_self_attention_heads num_cross_attention_heads conf_num_attention_heads linear_num_value_heads"
_KEY_HEADS = "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads"
_HEAD_SIZES = "head_dim d_kv kv_channels swa_head_dim v_head_dim attention_head_size dim_head linear_head_dim"
_HEAD_SIZES += " linear_key_head_dim linear_value_head_dim global_head_dim qk_nope_head_dim index_head_dim"
_LAYERS = "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"
_LAYERS += " num_encoder_layers depth num_blocks conf_num_hidden_layers num_global_layers"
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts"
_CHOSEN = "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k"
_POSITIONS = "max_position_embeddings n_positions max_seq_len n_ctx context_length model_max_length"
_POSITIONS += " max_encoder_position_embeddings max_decoder_position_embeddings original_max_position_embeddings"
_STATES = "mamba_d_state state_size ssm_state_size"
_WINDOWS = "sliding_window sliding_window_size attention_window_size local_attention"

SIZES: dict[str, int] = {
    **dict.fromkeys(_WIDTHS.split(), WIDTH),
    **dict.fromkeys(_INNER.split(), 2 * WIDTH),
    **dict.fromkeys(_SPARSE.split(), WIDTH),
    **dict.fromkeys(_HEADS.split(), HEADS),
    **dict.fromkeys(_KEY_HEADS.split(), KEY_HEADS),
    **dict.fromkeys(_HEAD_SIZES.split(), HEAD_SIZE),
    **dict.fromkeys(_LAYERS.split(), LAYERS),
    **dict.fromkeys(_EXPERTS.split(), EXPERTS),
    **dict.fromkeys(_CHOSEN.split(), 2),
    **dict.fromkeys(_POSITIONS.split(), 80),
    **dict.fromkeys(_STATES.split(), HEAD_SIZE),
    **dict.fromkeys(_WINDOWS.split(), 8),
    **dict.fromkeys("n_group topk_group num_expert_group first_k_dense_replace num_dense_layers".split(), 1),
    **dict.fromkeys("n_shared_experts num_shared_experts moe_num_shared_experts".split(), 1),
    **dict.fromkeys("qk_rope_head_dim kv_lora_rank q_lora_rank o_lora_rank lora_rank adapter_rank".split(), HEAD_SIZE),
    **dict.fromkeys("index_n_heads o_groups".split(), 2),
    **dict.fromkeys("index_topk keep_window_size attention_chunk_size chunk_size mamba_chunk_size".split(), 8),
    **dict.fromkeys("mamba_n_heads mamba_num_heads n_mamba_heads".split(), 8),
    **dict.fromkeys("mamba_d_head mamba_head_dim mamba_headdim".split(), HEAD_SIZE),
    **dict.fromkeys("n_groups mamba_n_groups mamba_ngroups".split(), 1),
    **dict.fromkeys("hidden_size_per_layer_input laurel_rank router_hidden_size rotary_dim time_step_rank".split(), 8),
    **dict.fromkeys("image_size crop_size".split(), 32),
    "head_dim": HEAD_SIZE,
    "qk_head_dim": 2 * HEAD_SIZE,
    "query_pre_attn_scalar": HEAD_SIZE,
    "attention_head_dim": HEAD_SIZE,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_nextn_predict_layers": 0,
    "num_kv_shared_layers": 0,
    "patch_size": 8,
    "mamba_d_ssm": 2 * WIDTH,
    "entity_vocab_size": 20,
}

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")

_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_SIZE, "indexer_budget": 8,
            "indexer_compress_ratio": 4}  # fmt: skip
_MROPE, _HALF_MROPE = (
    {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections} | more}}
    for sections, more in (([2, 3, 3], {}), ([2, 1, 1], {"partial_rotary_factor": 0.5}))
)
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e4}
                                                for name in ("sliding_attention", "full_attention")}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dory": {"n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2, "num_hidden_layers": 6},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"mask_token_id": 1, "pad_token_id": 0},
    "falcon_h1": {"mamba_d_head": 16, "mamba_n_heads": 8},
    "flaubert": {"emb_dim": WIDTH},
    "funnel": {"block_sizes": [1, 1], "d_inner": 2 * WIDTH, "d_head": HEAD_SIZE},
    "gemma3n_text": {"intermediate_size": 2 * WIDTH},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling2_text": {"unpadded_vocab_size": 300},
    "inkling2_loop_text": {"unpadded_vocab_size": 300},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"channel_shrink_ratio": 4, "max_2d_position_embeddings": 80, "hidden_size": 96, "head_dim": None},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "marian": {"decoder_vocab_size": VOCABULARY},
    **dict.fromkeys(["glm46v", "glm4v", "glmga", "glm_ocr", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"], _MROPE),
    "glm4v_moe": _HALF_MROPE,
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "lsh"],
                 "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4, "hash_seed": 0},
    "xlm": {"emb_dim": WIDTH},
    "xlstm": {"chunk_size": 16, "head_dim": None, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 8, "attention_hidden_size": None, "attention_head_dim": 2 * HEAD_SIZE},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
               "num_hidden_layers": 4, "attention_hidden_size": None, "attention_head_dim": 2 * HEAD_SIZE},
}  # fmt: skip


def tiny_config(model_type: str) -> dict[str, Any]:
    """Keys of `model.config` of a tiny model."""
    default = CONFIG_MAPPING[model_type]
    try:
        values = _shrunk(default())
    except Exception:  # its defaults are no model
        values = {}
    return {"model_type": model_type, **_merged(values, EXCEPTIONS.get(model_type, {}))}


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    own = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in own.items():
        if isinstance(value, PreTrainedConfig):
            values[name] = _shrunk(value)
            if isinstance(getattr(value, "vocab_size", None), int):
                values[name]["vocab_size"] = VOCABULARY
                values[name] |= {key: 2 for key in SPECIAL if isinstance(getattr(value, key, None), int)}
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            values[name] = min(value, SIZES[name])
        elif name in ("head_dim", "num_key_value_heads") and value is None:
            values[name] = SIZES[name]
    if own.get("num_key_value_heads") is not None and own["num_key_value_heads"] == own.get("num_attention_heads"):
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "qk_rope_head_dim" in own:  # the width of rotary positions
        values["head_dim"] = values["qk_rope_head_dim"]
    rope = own.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:  # positions in time, height and width share the frequencies
        half = int(HEAD_SIZE * rope.get("partial_rotary_factor", 1.0)) // 2
        values["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    layers = _layers(own)
    for name in set(_LAYERS.split()) & values.keys():
        values[name] = min(own[name], layers)
    return values


def _layers(own: Mapping[str, Any]) -> int:
    """How many layers it takes to have one of each kind."""
    needed = LAYERS
    for name, value in own.items():
        if isinstance(value, list) and (name.endswith(("layer_types", "block_type")) or name == "layer_types"):
            needed = max(needed, *(value.index(kind) + 1 for kind in set(value)))
    return min(needed, MOST_LAYERS)


def _merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged
