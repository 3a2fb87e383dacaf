"""The HF-shaped config that an engine reads, emitted from specs, and reading published configs back.

An emitted field is true or absent. What the engine reads each one for is said beside it (vLLM 0.26 to 0.32).
"""

import json
import math
from typing import Any, Literal

from titan_adapters.config import AttentionSpec, TransformerConfig
from titan_adapters.contract import BaseTransformer
from titan_adapters.differences import differences
from titan_adapters.errors import ConfigError
from titan_adapters.hf_writer import hf_dtype
from titan_adapters.moe_spec import MoESpec
from titan_adapters.registry import find_model, get_model, import_path

ARCHITECTURE = "TitanForCausalLM"
"""Engine class that serves every model of this capability class."""

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Engines look for the number of experts under several names, and take a model without any for a dense one."""

Names = Literal["native", "hf"]


def emit_hf_config(
    model: str | type[BaseTransformer], config: TransformerConfig, names: Names = "native"
) -> dict[str, Any]:
    """What an engine needs to know before any module exists, from `config`'s specs alone.

    Args:
        names: Whether the weights to be loaded carry native or published names.

    Raises:
        ConfigError: layers differ in the number of experts, of which the engine knows only one.
    """
    cls = get_model(model)
    specs = config.attention_specs()
    emitted: dict[str, Any] = {
        "architectures": [ARCHITECTURE],  # model registry
        "model_type": "titan",  # nothing must key on a stock family's name
        "hidden_size": config.dim,  # buffers for prompt embeddings
        "num_hidden_layers": config.num_layers,  # pipeline split
        # Heads and their sizes of each layer come from the layer itself, also those of its KV cache. These numbers are
        # read for the model as a whole, and where layers differ each is the one that is true for its use:
        "num_attention_heads": math.gcd(*(s.num_heads for s in specs)),  # what the tensor-parallel size must divide
        "num_key_value_heads": max(s.num_kv_heads for s in specs),  # above it, context parallelism may split tokens
        "head_dim": max(max(s.head_dim, s.v_head_dim) for s in specs),  # sizes a kernel's scratch space
        "vocab_size": config.vocab_size,  # validation of logits
        "max_position_embeddings": config.max_seq_len,  # the only length field, so the minimum over names is ours
        "tie_word_embeddings": config.tied_embeddings,
        **hf_dtype(config.dtype),
        # Identity: how any process rebuilds the model. The fingerprint also keys the engine's compile cache.
        "titan": {
            "model": cls.model_type,
            "class": import_path(cls),
            "config": config.to_json(),
            "names": names,
            "fingerprint": config.fingerprint(),
        },
    }
    windows = [s.window for s in specs if s.window is not None]
    if windows:
        # Each layer has its own window. This number is what an engine told to disable windows shortens the context
        # to, so that none would hide anything. Without layer_types it would be given to every layer.
        emitted["sliding_window"] = min(windows)
        emitted["layer_types"] = [_layer_type(spec) for spec in specs]
    # attention_chunk_size is left out on purpose: an engine only reads whether it is there, and then keeps the cache of
    # past chunks for the sake of latency. Chunked layers say so themselves.
    if moe := config.moe_specs():
        num_experts = _one_num_experts(moe)
        emitted |= dict.fromkeys(NUM_EXPERTS, num_experts)
        # Width of the buffer for recorded routings, and metrics.
        emitted["num_experts_per_tok"] = max(spec.top_k for spec in moe.values())
    softcaps = {s.softcap for s in specs if s.softcap is not None}
    if softcaps:
        emitted["attn_logit_softcapping"] = max(softcaps)  # selects a kernel that can cap
    return emitted


def _one_num_experts(moe: dict[int, MoESpec]) -> int:
    counts = {spec.num_experts for spec in moe.values()}
    if len(counts) == 1:
        return counts.pop()
    raise ConfigError(
        "Layers differ in num_experts, of which the engine knows one number.",
        [f"layer {layer}: {spec.num_experts}" for layer, spec in moe.items()],
        fix="give all layers the same num_experts.",
    )


def _layer_type(spec: AttentionSpec) -> str:
    if spec.window is not None:
        return "sliding_attention"
    return "full_attention" if spec.chunk is None else "chunked_attention"


def read_hf_config(data: dict[str, Any]) -> tuple[type[BaseTransformer], TransformerConfig]:
    """Model class and config from a published `config.json`; the model is found by `model_type`.

    Raises:
        ConfigError: keys are missing, contradict each other, or are not read by this family; all are named.
        RegistryError: no registered model has this `model_type`.
    """
    if "model_type" not in data:
        raise ConfigError("config.json has no model_type.", fix="add the family's name, such as 'llama'.")
    cls = find_model(data["model_type"])
    return cls, cls.from_hf_config(data)


def write_hf_config(model: str | type[BaseTransformer], config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of the stock architecture that computes what `config` says: `read_hf_config` gives it back.

    Raises:
        ConfigError: the family has no published format, or it can't say every fact of this config; all are named.
    """
    cls = get_model(model)
    published = json.loads(json.dumps(cls.to_hf_config(config)))  # as it will be read: lists in place of tuples
    try:
        back = cls.from_hf_config(published)
        lost = [f"{d.field}: {d.ours!r}, published {d.theirs!r}" for d in differences(config.to_json(), back.to_json())]
    except ConfigError as error:
        lost = error.problems
    if lost:
        raise ConfigError(
            f"The stock architecture can't hold this {cls.model_type}.",
            lost,
            fix="save it with format='native', or complete to_hf_config.",
        )
    return published
