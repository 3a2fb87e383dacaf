"""Reading a published `config.json` without guessing: every key is consumed, known to be inert, or refused by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from titan_adapters.config import Llama3Scaling, RopeSpec, TransformerConfig
from titan_adapters.errors import ConfigError

MISSING: Any = object()

# Keys that no forward pass reads: bookkeeping, training-only settings, generation defaults, tokenizer ids. Keys that
# start with an underscore are transformers' own bookkeeping too.
INERT = {
    "architectures", "attention_dropout", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cls_token_id", "eos_token_id", "hidden_dropout", "id2label", "initializer_range",
    "is_llama_config", "label2id", "mask_token_id", "model_type", "output_attentions",
    "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "sep_token_id", "torchscript", "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip

# Keys that would change the function, were they not at the one value that every family here computes.
FIXED = {"is_encoder_decoder": False, "rope_interleaved": False}

LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}


class HFReader:
    """Takes keys out of a config one by one; `finish` reports everything that was missing, wrong or left over.

    Args:
        data: The parsed `config.json`.
        family: Who reads, for error messages.
    """

    def __init__(self, data: Mapping[str, Any], family: str):
        self.family = family
        self.problems: list[str] = []
        self._left = dict(data)

    def take(self, key: str, default: Any = MISSING) -> Any:
        """Value of `key`. `default` is what the *published format* defines for an absent or null key, if it does."""
        value = self._left.pop(key, None)
        if value is not None:
            return value
        if default is MISSING:
            self.problems.append(f"{key} is missing")
            return None
        return default

    def expect(self, key: str, *accepted: Any, default: Any = MISSING) -> None:
        """Require one of the `accepted` values: the model computes nothing else."""
        value = self.take(key, default)
        if value not in accepted and not (value is None and default is MISSING):
            self.problems.append(f"{key} is {value!r}; {self.family} computes {' or '.join(map(repr, accepted))} only")

    def dtype(self) -> str | None:
        """From `dtype` (transformers v5) and `torch_dtype` (v4)."""
        values = {str(self._left.pop(k)).removeprefix("torch.") for k in ("dtype", "torch_dtype") if self._left.get(k)}
        self._left.pop("dtype", None), self._left.pop("torch_dtype", None)
        if len(values) == 1:
            return values.pop()
        both = "missing" if not values else f"contradictory ({', '.join(sorted(values))})"
        self.problems.append(f"dtype / torch_dtype is {both}: say what the weights are served in")
        return None

    def rope(self, rotary_dim: int | None, layout: str) -> RopeSpec | None:
        """The rope of all layers, from `rope_parameters` (v5), or `rope_theta` and `rope_scaling` (v4), or both.

        A missing theta is an error, since silently falling back to 10000 is how models go wrong at long context.
        """
        v5, v4 = self._left.pop("rope_parameters", None), self._left.pop("rope_scaling", None)
        if (
            v5
            and v4
            and _canonical(v5) != _canonical(v4) | ({"rope_theta": v5["rope_theta"]} if "rope_theta" in v5 else {})
        ):
            self.problems.append(f"rope_parameters {v5} and rope_scaling {v4} contradict each other")
            return None
        settings = _canonical(v5 or v4 or {})
        thetas = {
            "rope_theta": self._left.pop("rope_theta", None),
            "rope_parameters.rope_theta": settings.pop("rope_theta", None),
        }
        given = {key: value for key, value in thetas.items() if value is not None}
        if not given:
            self.problems.append("rope_theta is missing: neither rope_theta nor rope_parameters.rope_theta is there")
            return None
        if len(set(map(float, given.values()))) > 1:
            self.problems.append(f"rope_theta is contradictory: {', '.join(f'{k} = {v}' for k, v in given.items())}")
            return None
        kind = settings.pop("rope_type", "default")
        scaling = None
        if kind == "llama3":
            absent = [key for key in LLAMA3_KEYS if key not in settings]
            if absent:
                self.problems.append(f"rope type llama3 lacks {', '.join(absent)}")
                return None
            scaling = {ours: settings.pop(theirs) for theirs, ours in LLAMA3_KEYS.items()}
        elif kind != "default":
            self.problems.append(f"rope type {kind!r} is not supported")
            return None
        if settings:
            self.problems.append(f"rope settings are not read for type {kind!r}: {', '.join(sorted(settings))}")
        if rotary_dim is None:
            return None
        return self.build(
            lambda: RopeSpec(
                theta=float(next(iter(given.values()))),
                rotary_dim=rotary_dim,
                layout=layout,
                scaling=scaling and Llama3Scaling(**scaling),
            )
        )

    def decoder_fields(self) -> dict[str, Any]:
        """The config fields that all Llama-shaped families publish under the same keys, dtype included."""
        dim, num_heads = self.take("hidden_size"), self.take("num_attention_heads")
        return {
            "dim": dim,
            "num_layers": self.take("num_hidden_layers"),
            "vocab_size": self.take("vocab_size"),
            "max_seq_len": self.take("max_position_embeddings"),
            "norm_eps": self.take("rms_norm_eps"),
            "tied_embeddings": self.take("tie_word_embeddings", False),
            "dtype": self.dtype(),
            "num_heads": num_heads,
            "num_kv_heads": self.take("num_key_value_heads", num_heads),
            "head_dim": self.take("head_dim", dim // num_heads if dim and num_heads else None),
            "hidden_dim": self.take("intermediate_size"),
        }

    def windows(self, num_layers: int | None) -> tuple[int | None, ...] | None:
        """Visible tokens per layer, from `layer_types` and `sliding_window`; never derived from an index pattern."""
        window = self._left.pop("sliding_window", None)
        types: Sequence[str] | None = self._left.pop("layer_types", None)
        used = self._left.pop("use_sliding_window", None)
        self._left.pop("max_window_layers", None)  # superseded by layer_types; meaningless without a window
        if num_layers is None:
            return None
        if types is None:
            if used:
                self.problems.append("use_sliding_window is true, but layer_types does not say which layers have it")
            return (None,) * num_layers
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) != num_layers:
            self.problems.append(f"layer_types must be {num_layers} of full_attention, sliding_attention; got {types}")
            return None
        if "sliding_attention" in types and used is False:
            self.problems.append("layer_types has sliding_attention, but use_sliding_window is false")
            return None
        if "sliding_attention" in types and window is None:
            self.problems.append("layer_types has sliding_attention, but sliding_window is missing")
            return None
        return tuple(window if t == "sliding_attention" else None for t in types)

    def build(self, make: Callable[[], Any]) -> Any:
        """Run a spec or config constructor, turning its validation errors into problems."""
        try:
            return make()
        except ValidationError as error:
            self.problems += [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()]
            return None

    def finish(self, make: Callable[[], Any]) -> Any:
        """Build the config, or raise ConfigError with every problem."""
        for key, value in FIXED.items():
            self.expect(key, value, default=value)
        self.problems += [
            f"{key} = {value!r} is not read by {self.family}"
            for key, value in sorted(self._left.items())
            if key not in INERT and not key.startswith("_") and value is not None
        ]
        if not self.problems and (config := self.build(make)) is not None:
            return config
        raise ConfigError(
            f"This config.json can't be read as {self.family}.",
            self.problems,
            fix="add or correct these keys. Remove a key only if you know that no forward pass reads it.",
        )


def _canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`type` is the older spelling of `rope_type`."""
    settings = {key: value for key, value in settings.items() if value is not None}
    old = settings.pop("type", None)
    if old is not None:
        settings.setdefault("rope_type", old)
    return settings


def hf_rope(spec: RopeSpec) -> dict[str, Any]:
    """Both spellings of a rope: v5 `rope_parameters`, and v4 `rope_theta` with `rope_scaling`."""
    settings: dict[str, Any] = {"rope_type": "default"}
    if spec.scaling is not None:
        settings = {"rope_type": spec.scaling.type}
        settings |= {theirs: getattr(spec.scaling, ours) for theirs, ours in LLAMA3_KEYS.items()}
    return {
        "rope_theta": spec.theta,
        "rope_scaling": None if spec.scaling is None else settings,
        "rope_parameters": settings | {"rope_theta": spec.theta},
    }


def hf_windows(windows: Sequence[int | None]) -> dict[str, Any]:
    """`layer_types`, and the window if any layer has one."""
    used = {window for window in windows if window is not None}
    if len(used) > 1:
        raise ConfigError(
            f"Layers have different windows ({sorted(used)}); this format holds one.", fix="save with format='native'."
        )
    return {
        "use_sliding_window": bool(used),
        "sliding_window": next(iter(used), None),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def hf_dtype(dtype: str) -> dict[str, str]:
    """Both spellings of the dtype."""
    return {"dtype": dtype, "torch_dtype": dtype}


def hf_decoder_config(config: TransformerConfig, architecture: str, model_type: str) -> dict[str, Any]:
    """The inverse of `HFReader.decoder_fields`, for layers that are all alike (windows are the family's own)."""
    spec, hidden_dim = config.attention(0), config.feed_forward(0).hidden_dim
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": hidden_dim,
        "hidden_act": "silu",
        **hf_dtype(config.dtype),
        **(hf_rope(spec.rope) if spec.rope else {}),
    }
