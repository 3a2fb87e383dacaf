"""Shapes of published models, as their `config.json` has them, for benchmarks with random weights."""

import json
from pathlib import Path
from typing import Any

import torch

from titan_adapters.checkpoint import read_identity, save_checkpoint
from titan_adapters.errors import ConfigError
from titan_adapters.hf_config import read_hf_config

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_act": "silu", "rope_theta": 1e6, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_act": "silu", "rope_theta": 5e5, "dtype": "bfloat16",
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "attention_bias": False,
    "sliding_window": 1024, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64,
    "hidden_act": "silu", "attention_bias": True, "sliding_window": 128, "num_experts_per_tok": 4,
    "swiglu_limit": 7.0, "rope_theta": 150000, "tie_word_embeddings": False, "dtype": "bfloat16",
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    | {"original_max_position_embeddings": 4096},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3
    | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
    | {"tie_word_embeddings": True},
    "qwen3-4b": QWEN3
    | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
    | {"tie_word_embeddings": True},
    "qwen3-8b": QWEN3
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}
    | {"tie_word_embeddings": False},
    "llama3-8b": LLAMA3
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "qwen3-30b-a3b": QWEN3_MOE
    | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144}
    | {"moe_intermediate_size": 768},
    # The 30B's layer, few and narrow enough for a CPU.
    "qwen3-moe-cpu": QWEN3_MOE
    | {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 3072}
    | {"moe_intermediate_size": 384, "num_experts": 32, "vocab_size": 65536},
    "gemma3-4b": GEMMA3
    | {"hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8, "intermediate_size": 10240},
    # The published weights are MXFP4; this is what they are in bf16.
    "gpt-oss-20b": GPT_OSS
    | {"hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "intermediate_size": 2880}
    | {"num_local_experts": 32},
    # Of no use but to try the benchmark itself.
    "tiny": LLAMA3
    | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
}

WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def scaled(shape: dict[str, Any], layers: float = 1, dim: float = 1) -> dict[str, Any]:
    """The shape with so many times the layers, and so many times the width of everything but head and vocabulary.

    Raises:
        ConfigError: a size is not an integer then.
    """
    factors = {"num_hidden_layers": layers} | dict.fromkeys(WIDTHS, dim)
    sizes = {key: shape[key] * factor for key, factor in factors.items() if key in shape}
    broken = [f"{key} {shape[key]} becomes {size:g}" for key, size in sizes.items() if size != int(size) or size < 1]
    if broken:
        raise ConfigError("The shape can't be scaled by that.", broken, fix="choose other factors.")
    return shape | {key: int(size) for key, size in sizes.items()}


def write_shape(shape: dict[str, Any], folder: Path) -> Path:
    """A folder with nothing but `config.json`, for engines that make up their weights (`load_format="dummy"`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    return folder


def random_checkpoint(shape: dict[str, Any], folder: Path) -> Path:
    """Random weights in the published format, where how they are loaded matters; those of the last time, if any.

    Raises:
        ConfigError: the folder holds another shape.
    """
    cls, config = read_hf_config(shape)
    if folder.exists():
        if read_identity(folder).config != config:
            raise ConfigError(f"{folder} holds another shape.", fix="name another folder, or remove this one.")
        return folder
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.dtype))
    try:
        model = cls(config)
    finally:
        torch.set_default_dtype(before)
    save_checkpoint(model, folder, "hf")
    return folder
