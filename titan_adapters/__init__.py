"""Write a model once, train it in plain PyTorch, serve exactly that model on vLLM, and be able to prove it."""

import importlib
from typing import TYPE_CHECKING, Any

from titan_adapters import nn, parallel
from titan_adapters.checkpoint import load_checkpoint, load_model, save_checkpoint
from titan_adapters.config import (
    AttentionSpec,
    LayerNormSpec,
    NormSpec,
    PerLayer,
    QKNormSpec,
    RMSNormSpec,
    TemperatureSpec,
    TransformerConfig,
)
from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import TitanError
from titan_adapters.fingerprints import fingerprint, fingerprint_differences
from titan_adapters.hf_config import emit_hf_config, read_hf_config, write_hf_config
from titan_adapters.hf_diff import diff_hf_config
from titan_adapters.hf_reader import HFReader
from titan_adapters.hf_rope import hf_rope, hf_rope_by_type
from titan_adapters.hf_writer import hf_chunks, hf_decoder_config, hf_layer_types, hf_one_window, hf_windows
from titan_adapters.moe_spec import (
    ClampedSwiGLU,
    ExpertGroupsSpec,
    FeedForwardSpec,
    MoESpec,
    SharedExpertsSpec,
)
from titan_adapters.parallel import parallelize
from titan_adapters.plan import (
    ParallelPlan,
    Style,
    colwise,
    decoder_plan,
    expertwise,
    headwise,
    partwise,
    replicate,
    rowwise,
    vocabwise,
)
from titan_adapters.registry import get_model, list_models, register_model
from titan_adapters.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from titan_adapters.state_dict import (
    Cast,
    Concat,
    Deinterleave,
    Drop,
    FusedQKV,
    Offset,
    PerExpert,
    Permute,
    Rename,
    Scale,
    Split,
    Stack,
    StackedExperts,
    StateDictAdapter,
    Tie,
    Transpose,
    VocabPadding,
    attention_rows,
    decoder_rows,
    expert_rows,
    feed_forward_rows,
    gate_up_rows,
    layer_ranges,
    linear_rows,
    moe_rows,
    norm_rows,
    torchtitan_adapter,
)

if TYPE_CHECKING:
    from titan_adapters import testing, verify, vllm

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "BaseTransformer",
    "Cast",
    "ClampedSwiGLU",
    "Concat",
    "Deinterleave",
    "Drop",
    "DynamicScaling",
    "ExpertGroupsSpec",
    "FeedForwardSpec",
    "FusedQKV",
    "HFReader",
    "LayerNormSpec",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MoESpec",
    "NormSpec",
    "Offset",
    "ParallelPlan",
    "PerExpert",
    "PerLayer",
    "Permute",
    "ProportionalScaling",
    "QKNormSpec",
    "RMSNormSpec",
    "Rename",
    "RopeScaling",
    "RopeSpec",
    "Scale",
    "SharedExpertsSpec",
    "Split",
    "Stack",
    "StackedExperts",
    "StateDictAdapter",
    "Style",
    "TemperatureSpec",
    "Tie",
    "TitanError",
    "TransformerConfig",
    "Transpose",
    "VocabPadding",
    "YarnScaling",
    "attention_rows",
    "colwise",
    "decoder_plan",
    "decoder_rows",
    "diff_hf_config",
    "emit_hf_config",
    "expert_rows",
    "expertwise",
    "feed_forward_rows",
    "fingerprint",
    "fingerprint_differences",
    "gate_up_rows",
    "get_model",
    "headwise",
    "hf_chunks",
    "hf_decoder_config",
    "hf_layer_types",
    "hf_one_window",
    "hf_rope",
    "hf_rope_by_type",
    "hf_windows",
    "layer_ranges",
    "linear_rows",
    "list_models",
    "load_checkpoint",
    "load_model",
    "moe_rows",
    "nn",
    "norm_rows",
    "parallel",
    "parallelize",
    "partwise",
    "read_hf_config",
    "register_model",
    "replicate",
    "rowwise",
    "save_checkpoint",
    "testing",
    "torchtitan_adapter",
    "verify",
    "vllm",
    "vocabwise",
    "write_hf_config",
]

_LAZY = {"testing", "verify", "vllm"}  # heavy or engine-bound: imported on first use


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"titan_adapters.{name}")
    raise AttributeError(f"module 'titan_adapters' has no attribute {name!r}")
