"""Reading an emitted config back through vLLM's own resolver."""

import math
import os
from pathlib import Path
from typing import Any

from titan_adapters.checkpoint import Identity
from titan_adapters.config import TransformerConfig
from titan_adapters.vllm.plugin import CONFIG_FORMAT, register


def reread_problems(folder: Path, identity: Identity) -> tuple[list[str], int]:
    """What vLLM resolves differently from what the specs say, and how many numbers were compared."""
    wanted, resolved = facts(identity.config), resolve(folder, identity.config)
    problems = [
        f"{name}: the specs say {value}, vLLM resolves {resolved[name]}"
        for name, value in wanted.items()
        if resolved[name] != value
    ]
    return problems, len(wanted)


def facts(config: TransformerConfig) -> dict[str, Any]:
    """The numbers that an engine acts on, from the specs."""
    specs = config.attention_specs()
    windows = [spec.window for spec in specs]
    return {
        # Where layers differ: what a tensor-parallel size must divide, the most heads and the widest head of any.
        "num_heads": math.gcd(*(spec.num_heads for spec in specs)),
        "num_kv_heads": max(spec.num_kv_heads for spec in specs),
        "head_dim": max(size for spec in specs for size in (spec.head_dim, spec.v_head_dim)),
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "max_model_len": config.max_seq_len,
        "dtype": f"torch.{config.dtype}",
        "num_experts": max((spec.num_experts for spec in config.moe_specs().values()), default=0),
        # What vLLM would give to a layer without a window of its own: only right if there is no such layer.
        "model_window": None if None in windows else min(w for w in windows if w is not None),
        "windowed_layers": [layer for layer, window in enumerate(windows) if window is not None],
    }


def resolve(folder: Path, config: TransformerConfig) -> dict[str, Any]:
    """The same numbers as vLLM's ModelConfig sees them."""
    from vllm.config import ModelConfig, ParallelConfig

    register()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    resolved = ModelConfig(model=str(folder), config_format=CONFIG_FORMAT, dtype=config.dtype, skip_tokenizer_init=True)
    hf = resolved.hf_config
    types = getattr(hf, "layer_types", None)
    window = resolved.get_sliding_window()
    mixed = types is not None and len(set(types)) > 1
    return {
        "num_heads": resolved.get_num_attention_heads(ParallelConfig()),
        "num_kv_heads": resolved.get_total_num_kv_heads(),
        "head_dim": resolved.get_head_size(),
        "num_layers": resolved.get_num_layers(ParallelConfig()),
        "vocab_size": resolved.get_vocab_size(),
        "hidden_size": resolved.get_hidden_size(),
        "max_model_len": resolved.max_model_len,
        "dtype": str(hf.dtype),
        "num_experts": resolved.get_num_experts(),
        "model_window": None if mixed else window,
        "windowed_layers": [layer for layer, kind in enumerate(types or []) if kind == "sliding_attention"],
    }
