"""State-dict conversion: rows as data, one table for HF load, HF export, own checkpoints and live updates."""

from titan_adapters.state_dict.adapter import Session, StateDictAdapter, native_adapter, native_tensors, part_name
from titan_adapters.state_dict.expert_rows import PerExpert, StackedExperts, expert_rows
from titan_adapters.state_dict.fused import FusedQKV
from titan_adapters.state_dict.hf_rows import (
    POST_NORMS,
    PRE_NORMS,
    SANDWICH_NORMS,
    attention_rows,
    decoder_rows,
    feed_forward_rows,
    gate_up_rows,
    linear_rows,
    norm_rows,
)
from titan_adapters.state_dict.moe_rows import layer_ranges, moe_rows
from titan_adapters.state_dict.ops import Cast, Deinterleave, Offset, Op, Permute, Scale, Transpose, VocabPadding
from titan_adapters.state_dict.rows import Binding, Concat, Drop, Rename, Row, Split, Stack, Tie
from titan_adapters.state_dict.torchtitan import torchtitan_adapter

__all__ = [
    "POST_NORMS",
    "PRE_NORMS",
    "SANDWICH_NORMS",
    "Binding",
    "Cast",
    "Concat",
    "Deinterleave",
    "Drop",
    "FusedQKV",
    "Offset",
    "Op",
    "PerExpert",
    "Permute",
    "Rename",
    "Row",
    "Scale",
    "Session",
    "Split",
    "Stack",
    "StackedExperts",
    "StateDictAdapter",
    "Tie",
    "Transpose",
    "VocabPadding",
    "attention_rows",
    "decoder_rows",
    "expert_rows",
    "feed_forward_rows",
    "gate_up_rows",
    "layer_ranges",
    "linear_rows",
    "moe_rows",
    "native_adapter",
    "native_tensors",
    "norm_rows",
    "part_name",
    "torchtitan_adapter",
]
