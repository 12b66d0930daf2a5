"""Tiny random models of each family, as transformers writes them."""

import math
from pathlib import Path
from typing import Any

import torch
import transformers

WINDOW = 24  # less than half of TEXT, and no multiple of a block

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama_3": ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                                              "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                              "original_max_position_embeddings": 64}}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 8}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral_without_window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen_2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen_2_sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW,
                                 "max_window_layers": 2}),
    "qwen_3": ("Qwen3", {"head_dim": 32}),
    "qwen_3_bias": ("Qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral_sliding": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1,
                                    "sliding_window": WINDOW}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40}),
    "qwen_2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 72}),
    "qwen_2_moe_sliding": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 24, "qkv_bias": False,
                                                  "use_sliding_window": True, "sliding_window": WINDOW,
                                                  "max_window_layers": 2, "decoder_sparse_step": 2}),
    "qwen_3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen_3_moe_mixed": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "mlp_only_layers": [1, 2],
                                                "use_sliding_window": True, "sliding_window": WINDOW}),
    "gemma_2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma_2_untied": ("Gemma2", GEMMA | {"tie_word_embeddings": False, "attn_logit_softcapping": None}),
    "gemma_3": ("Gemma3Text", GEMMA | {"sliding_window_pattern": 3}),
    "gemma_3_scaled": ("Gemma3Text", GEMMA | {
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
}  # fmt: skip


def build(folder: Path, family: str, **more: Any) -> Path:
    """A folder with a random model of the family, as transformers writes it."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SIZES | settings | more))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Matrices with a gain above one, so that attention and MLP outweigh the last token's embedding.
            scale = 1.5 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.2
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if parameter.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    return folder
