"""Reading a published `config.json` without guessing: every key is consumed, known to be inert, or refused by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from titan_adapters.config import TransformerConfig
from titan_adapters.errors import ConfigError
from titan_adapters.hf_rope import RopeSettings
from titan_adapters.rope_spec import RopeSpec

MISSING: Any = object()

# Keys that no forward pass reads: bookkeeping, training-only settings, generation defaults, tokenizer ids. Keys that
# start with an underscore are transformers' own bookkeeping too.
INERT = {
    "architectures", "attention_dropout", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "classifier_dropout", "cls_token_id", "embd_pdrop", "embedding_dropout",
    "eos_token_id", "hidden_dropout", "id2label", "initializer_range", "is_llama_config", "label2id", "mask_token_id",
    "model_type", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "resid_pdrop", "residual_dropout", "return_dict",
    "router_aux_loss_coef",  # weight of the load-balancing loss
    "router_jitter_noise",  # multiplies a mixture's input in training only
    "sep_token_id", "torchscript", "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip

# Keys that would change the function, were they not at the one value that every family here computes.
FIXED = {"is_encoder_decoder": False, "rope_interleaved": False}


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

    def take_either(self, *keys: str) -> Any:
        """The value that these keys have; which of them is there depends on who wrote the config."""
        values = {key: value for key in keys if (value := self._left.pop(key, None)) is not None}
        if len(set(values.values())) > 1:
            self.problems.append(f"{keys[0]} is contradictory: {', '.join(f'{k} = {v}' for k, v in values.items())}")
        if not values:
            self.problems.append(f"{' / '.join(keys)} is missing")
        return next(iter(values.values()), None)

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

    def rope(
        self,
        head_dim: int | None,
        layout: str,
        max_seq_len: int | None,
        *,
        partial: float | None = None,
        original: int | None = None,
        older: tuple[str, ...] = (),
    ) -> RopeSpec | None:
        """The rope of all layers, from `rope_parameters` (v5), or `rope_theta` and `rope_scaling` (v4), or both.

        A missing theta is an error, since silently falling back to 10000 is how models go wrong at long context.

        Args:
            partial: For families that rotate a fraction of each head: the fraction if the config does not say.
            original: Original context, for families that publish it outside of the rope settings.
            older: A family's own older names of `rope_theta` and `partial_rotary_factor`.
        """
        theta_keys = ("rope_theta", *older[:1])
        partial_keys = () if partial is None else ("partial_rotary_factor", *older[1:])
        settings = RopeSettings(
            self._left.pop("rope_parameters", None),
            self._left.pop("rope_scaling", None),
            {key: self._left.pop(key, None) for key in theta_keys},
            {key: self._left.pop(key, None) for key in partial_keys},
            partial,
            original,
        )
        return self._rope(settings, head_dim, layout, max_seq_len)

    def ropes_by_type(
        self, head_dim: int | None, layout: str, max_seq_len: int | None, local_key: str | None
    ) -> tuple[RopeSpec | None, RopeSpec | None]:
        """Ropes of the layers that see all and of those with a window, published per layer type.

        Args:
            local_key: v4's key for the theta of the latter; None if v4 had one theta for all layers.
        """
        types = ("full_attention", "sliding_attention")
        v5 = self._left.pop("rope_parameters", None) or {}
        unknown = sorted(set(v5) - set(types))
        if unknown:
            self.problems.append(f"rope_parameters has {', '.join(unknown)}; {self.family} has {' and '.join(types)}")
        theta, local = self._left.pop("rope_theta", None), self._left.pop(local_key, None) if local_key else None
        outside: dict[str, Any] = {local_key: local} if local_key else {"rope_theta": theta}
        full, sliding = (
            RopeSettings(v5.get(kind), v4, thetas, place=f"rope_parameters.{kind}")
            for kind, v4, thetas in zip(
                types, (self._left.pop("rope_scaling", None), None), ({"rope_theta": theta}, outside)
            )
        )
        return (
            self._rope(full, head_dim, layout, max_seq_len),
            self._rope(sliding, head_dim, layout, max_seq_len),
        )

    def _rope(
        self, settings: RopeSettings, head_dim: int | None, layout: str, max_seq_len: int | None
    ) -> RopeSpec | None:
        if head_dim is None or max_seq_len is None:
            return None  # the missing number is a problem already
        fields = settings.read(head_dim, max_seq_len)
        self.problems += settings.problems
        return None if fields is None else self.build(lambda: RopeSpec(**fields, layout=layout))

    def take_rope_setting(self, key: str, default: Any = MISSING) -> Any:
        """Value of a key of the family's own inside of the rope settings of either spelling."""
        values = []
        for place in ("rope_parameters", "rope_scaling"):
            if (self._left.get(place) or {}).get(key) is not None:
                settings = dict(self._left[place])
                values.append(settings.pop(key))
                self._left[place] = settings
        if len(set(values)) > 1:
            self.problems.append(f"{key} is contradictory in the rope settings: {values}")
        if not values and default is MISSING:
            self.problems.append(f"{key} is missing from the rope settings")
        return values[0] if values else None if default is MISSING else default

    def decoder_fields(self, norm_eps: str = "rms_norm_eps") -> dict[str, Any]:
        """The config fields that most families publish under the same keys, dtype included.

        Args:
            norm_eps: The family's key for the norms' epsilon.
        """
        dim, num_heads = self.take("hidden_size"), self.take("num_attention_heads")
        return {
            "dim": dim,
            "num_layers": self.take("num_hidden_layers"),
            "vocab_size": self.take("vocab_size"),
            "max_seq_len": self.take("max_position_embeddings"),
            "norm_eps": self.take(norm_eps),
            "tied_embeddings": self.take("tie_word_embeddings", False),
            "dtype": self.dtype(),
            "num_heads": num_heads,
            "num_kv_heads": self.take("num_key_value_heads", num_heads),
            "head_dim": self.take("head_dim", dim // num_heads if dim and num_heads else None),
            "hidden_dim": self.take("intermediate_size"),
        }

    def windows(self, num_layers: int | None, full_every: int | None = None) -> tuple[int | None, ...] | None:
        """Visible tokens per layer, from `layer_types` and `sliding_window`.

        Args:
            full_every: Where the published format defines a pattern for absent `layer_types`: every so-many-th layer
                sees all, the others have the window. Otherwise nothing is derived from a layer's index.
        """
        window = self._left.pop("sliding_window", None)
        types: Sequence[str] | None = self._left.pop("layer_types", None)
        used = self._left.pop("use_sliding_window", None)
        self._left.pop("max_window_layers", None)  # superseded by layer_types; meaningless without a window
        if num_layers is None:
            return None
        if types is None and full_every is not None:
            types = ["full_attention" if (i + 1) % full_every == 0 else "sliding_attention" for i in range(num_layers)]
        if types is None:
            if used:
                self.problems.append("use_sliding_window is true, but layer_types does not say which layers have it")
            return (None,) * num_layers
        if "sliding_attention" in types and used is False:
            self.problems.append("layer_types has sliding_attention, but use_sliding_window is false")
            return None
        return self._by_type(types, "sliding_attention", "sliding_window", window, num_layers)

    def chunks(self, num_layers: int | None, chunked: Sequence[bool] | None) -> tuple[int | None, ...] | None:
        """Positions per chunk, per layer, from `layer_types` and `attention_chunk_size`.

        Args:
            chunked: Which layers have chunks if there are no `layer_types`.
        """
        size, types = self._left.pop("attention_chunk_size", None), self._left.pop("layer_types", None)
        if num_layers is None or chunked is None:
            return None
        if types is None:
            types = ["chunked_attention" if has else "full_attention" for has in chunked]
        return self._by_type(types, "chunked_attention", "attention_chunk_size", size, num_layers)

    def _by_type(
        self, types: Sequence[str], kind: str, key: str, size: int | None, num_layers: int
    ) -> tuple[int | None, ...] | None:
        """`size` of the layers of type `kind`, and None of those with full_attention; there are no others."""
        if set(types) - {"full_attention", kind} or len(types) != num_layers:
            self.problems.append(f"layer_types must be {num_layers} of full_attention, {kind}; got {types}")
            return None
        if kind in types and size is None:
            self.problems.append(f"layer_types has {kind}, but {key} is missing")
            return None
        return tuple(size if t == kind else None for t in types)

    def one_window(self, num_layers: int | None) -> tuple[int | None, ...] | None:
        """Visible tokens per layer where the format has one `sliding_window` for all of them, or null."""
        window = self.take("sliding_window", None)
        return None if num_layers is None else (window,) * num_layers

    def switched_window(self, num_layers: int | None) -> tuple[int | None, ...] | None:
        """The same where `use_sliding_window` turns it on (Qwen3 MoE)."""
        used = self.take("use_sliding_window", False)
        first = self.take("max_window_layers", None)
        if used and first is not None:
            # transformers 4 read it as the first layer with the window, 5 ignores it.
            self.problems.append(f"use_sliding_window with max_window_layers = {first} has no agreed meaning")
        windows = self.one_window(num_layers)
        return windows if used or num_layers is None else (None,) * num_layers

    def rotating_layers(self, num_layers: int | None) -> tuple[bool, ...] | None:
        """Whether each layer has rope, from `no_rope_layers`, which is named the wrong way round: 1 is a layer that has
        it. Absent or empty: all but every so-many-th, as `no_rope_layer_interval` says."""
        layers, without = self.take("no_rope_layers", None), self.every_nth("no_rope_layer_interval", 4, num_layers)
        if not layers:
            return without and tuple(not nth for nth in without)
        if num_layers is not None and len(layers) != num_layers:
            self.problems.append(f"no_rope_layers must have one value per layer, {num_layers}, has {len(layers)}")
            return None
        return tuple(bool(rotates) for rotates in layers)

    def sparse_layers(self, num_layers: int | None) -> tuple[bool, ...] | None:
        """Whether each layer is a mixture of experts, from `mlp_only_layers` and `decoder_sparse_step` (Qwen)."""
        sparse, dense = (
            self.every_nth("decoder_sparse_step", 1, num_layers),
            self.named_layers("mlp_only_layers", num_layers),
        )
        return sparse and tuple(nth and not (dense and dense[layer]) for layer, nth in enumerate(sparse))

    def every_nth(self, key: str, default: int, num_layers: int | None) -> tuple[bool, ...] | None:
        """Whether each layer is an n-th one, counted from 1, where `key` says n."""
        step = self.take(key, default)
        if num_layers is None:
            return None
        if step < 1:
            self.problems.append(f"{key} must be at least 1, is {step}")
            return None
        return tuple((layer + 1) % step == 0 for layer in range(num_layers))

    def named_layers(self, key: str, num_layers: int | None) -> tuple[bool, ...] | None:
        """Whether each layer is in the list that `key` holds; None if there is none."""
        named = self.take(key, None)
        if num_layers is None or named is None:
            return None
        if unknown := sorted(set(named) - set(range(num_layers))):
            self.problems.append(f"{key} names layers {unknown}, there are {num_layers}")
        return tuple(layer in named for layer in range(num_layers))

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
        if (quantization := self.take("quantization_config", None)) is not None:
            self.problems.append(
                f"quantization_config: the weights are quantised ({quantization.get('quant_method')}), and only plain "
                "ones are read: take a checkpoint of the same model in bf16"
            )
        self.problems += [
            f"{key} = {value!r} is not read by {self.family}"
            for key, value in sorted(self._left.items())
            if key not in INERT and not key.startswith("_") and value is not None
        ]
        if not self.problems and (config := self.build(lambda: _with_specs(make()))) is not None:
            return config
        raise ConfigError(
            f"This config.json can't be read as {self.family}.",
            self.problems,
            fix="add or correct these keys. Remove a key only if you know that no forward pass reads it.",
        )


def _with_specs(config: TransformerConfig) -> TransformerConfig:
    """`config`, once every layer's specs are known to be free of contradictions."""
    for layer in range(config.num_layers):
        config.attention(layer), config.feed_forward(layer)
    return config
