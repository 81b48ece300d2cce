"""Tiny models of families that transformers implements, with options that cover their variants."""

from __future__ import annotations

from typing import Any

from tests.engine.transformers_reference import SIZES

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
SLIDING_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GPT_2 = {"n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4, "n_positions": 256}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "attention_factor": 1.2,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0],
    "original_max_position_embeddings": 1,
}

GENERIC_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", {"rope_parameters": ROPE}),
    "arcee": ("Arcee", {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere 2": ("Cohere2", {"sliding_window": 8, "layer_types": SLIDING_LAYERS}),
    "ernie 4.5": ("Ernie4_5", {"use_bias": True, "head_dim": 16}),
    "ernie 4.5 moe": ("Ernie4_5_Moe", MOE | {"moe_num_experts": 4, "moe_k": 2}),
    "exaone 4": ("Exaone4", {"sliding_window": 8, "layer_types": SLIDING_LAYERS}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "glm 4": ("Glm4", {"head_dim": 32}),
    "glm 4 moe": (
        "Glm4Moe",
        MOE
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"head_dim": 16, "use_qk_norm": True},
    ),
    "gpt 2": ("GPT2", GPT_2),
    "gpt neox": ("GPTNeoX", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "attention_multiplier": 0.2},
    ),
    "granite moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16, "rope_parameters": ROPE}),
    "llama with longrope": ("Llama", {"rope_parameters": LONG, "max_position_embeddings": 128}),
    "nemotron": ("Nemotron", {"hidden_size": 68, "head_dim": 17, "num_attention_heads": 4}),
    "olmo 3": ("Olmo3", {"sliding_window": 8, "layer_types": SLIDING_LAYERS}),
    "phi 2": ("Phi", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "qwen 2 moe": (
        "Qwen2Moe",
        MOE | {"num_experts": 6, "shared_expert_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "seed oss": ("SeedOss", {"head_dim": 16, "intermediate_size": 92}),
    "smollm 3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "stablelm": (
        "StableLm",
        {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True},
    ),
    "starcoder 2": ("Starcoder2", {"sliding_window": 8}),
}
EVERY_CHANGE = {
    "cohere 2",
    "glm 4 moe",
    "gpt 2",
    "llama with longrope",
    "qwen 2 moe",
}
"""Families that every test run covers. Each has something that the others lack."""
TEXT: dict[str, Any] = dict(SIZES)
MROPE = {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}
VISION = {
    "depth": 1,
    "deepstack_visual_indexes": [0],
    "head_dim": 16,
    "hidden_size": 32,
    "image_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "out_hidden_size": 64,
    "patch_size": 8,
}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral 3": (
        "Mistral3",
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": VISION | {"model_type": "pixtral"},
            "image_token_index": 1,  # no prompt contains it
        },
    ),
    "qwen 2 vl": (
        "Qwen2VL",
        {
            "text_config": TEXT | MROPE,
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        },
    ),
    "qwen 3 vl moe": (
        "Qwen3VLMoe",
        {
            "text_config": TEXT | MROPE | MOE | {"head_dim": 16, "num_experts": 4},
            "vision_config": VISION,
        },
    ),
}
"""Multimodal models, whose text is served."""
GENERIC_MODELS = {"GPT2": "GPT2LMHeadModel"}
"""Config class -> model class, if it does not end in ForCausalLM."""
