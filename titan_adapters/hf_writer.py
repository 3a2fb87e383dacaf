"""Writing a `config.json` that stock transformers reads as the same model: the inverse of `hf_reader`."""

from collections.abc import Sequence
from typing import Any

from titan_adapters.config import TransformerConfig
from titan_adapters.errors import ConfigError
from titan_adapters.hf_rope import hf_rope


def hf_windows(windows: Sequence[int | None]) -> dict[str, Any]:
    """`layer_types`, the window if any layer has one, and the switch."""
    used = _one_used(windows, "windows")
    types = _types(windows, "sliding_attention")
    return {"use_sliding_window": used is not None, "sliding_window": used, "layer_types": types}


def hf_layer_types(windows: Sequence[int | None], max_seq_len: int) -> dict[str, Any]:
    """`layer_types` and the window, in a format without a switch.

    Stock code of these families builds the window's mask even if no layer uses it, and fails without a number. Then
    it is max_seq_len: a window of that size hides nothing from any layer.
    """
    types = _types(windows, "sliding_attention")
    return {"sliding_window": _one_used(windows, "windows") or max_seq_len, "layer_types": types}


def hf_chunks(chunks: Sequence[int | None], max_seq_len: int) -> dict[str, Any]:
    """`layer_types` and the size of a chunk: max_seq_len if no layer has chunks, because stock code needs a number."""
    types = _types(chunks, "chunked_attention")
    return {"attention_chunk_size": _one_used(chunks, "chunks") or max_seq_len, "layer_types": types}


def _one_used(sizes: Sequence[int | None], what: str) -> int | None:
    used = {size for size in sizes if size is not None}
    if len(used) > 1:
        raise ConfigError(
            f"Layers have different {what} ({sorted(used)}); this format holds one.", fix="save with format='native'."
        )
    return next(iter(used), None)


def _types(sizes: Sequence[int | None], kind: str) -> list[str]:
    return ["full_attention" if size is None else kind for size in sizes]


def hf_one_window(windows: Sequence[int | None]) -> dict[str, Any]:
    """`sliding_window` of a format that gives it to every layer."""
    if len(set(windows)) > 1:
        raise ConfigError(
            f"Layers have different windows ({list(windows)}); this format gives all the same.",
            fix="save with format='native'.",
        )
    return {"sliding_window": windows[0]}


def hf_dtype(dtype: str) -> dict[str, str]:
    """Both spellings of the dtype."""
    return {"dtype": dtype, "torch_dtype": dtype}


def hf_decoder_config(
    config: TransformerConfig, architecture: str, model_type: str, norm_eps: str = "rms_norm_eps"
) -> dict[str, Any]:
    """The inverse of `HFReader.decoder_fields`, for layers that are all alike (windows are the family's own)."""
    spec, dense = config.attention(0), next(iter(config.dense_specs().values()), None)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        norm_eps: config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        # Stock defaults are another tokenizer's: an end that stops generation, a pad beyond a small vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **({"intermediate_size": dense.hidden_dim, "hidden_act": HIDDEN_ACT[dense.activation]} if dense else {}),
        **hf_dtype(config.dtype),
        **(hf_rope(spec.rope, config.max_seq_len) if spec.rope else {}),
    }


HIDDEN_ACT = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Our names of activations -> published ones."""
