"""Taking keys out of a published `config.json`, and what they say per layer."""

from collections.abc import Mapping, Sequence
from typing import Any

MISSING: Any = object()


class KeyReader:
    """Takes keys out of a config one by one, and remembers what is wrong with them.

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


class LayerReader(KeyReader):
    """What keys say about each layer: which have windows, chunks, rope, experts.

    All return one value per layer, or None if that can't be told, which is a problem then.
    """

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
