"""Model classes for the engine's tests, importable by its processes; not a test."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional as F

import titan_adapters as ta
from titan_adapters.contract import meta_model

Llama = ta.get_model("llama")
LlamaConfig = Llama.Config
TINY = next(iter(Llama.tiny_configs().values()))


def native_rows(cls: type[ta.BaseTransformer], config: ta.TransformerConfig) -> ta.StateDictAdapter:
    """Published names that are the native ones."""
    names = ta.state_dict.native_tensors(meta_model(cls, config))
    return ta.StateDictAdapter(*(ta.Rename(name, name) for name in names))


class Free(Llama):
    """Every spec field that no installed model varies, as a field of the config."""

    model_type = "free"

    class Config(LlamaConfig):
        scale: float
        softcap: float | None
        window: int | None
        qk_norm: bool
        activation: str
        gated: bool

        def attention(self, layer: int) -> ta.AttentionSpec:
            qk_norm = (
                ta.QKNormSpec(
                    scope="per_head",
                    eps=1e-5,
                    offset=0.0,
                    weight_in_fp32=False,
                    weight=True,
                    after_rope=False,
                )
                if self.qk_norm
                else None
            )
            changed = {"scale": self.scale, "softcap": self.softcap, "window": self.window, "qk_norm": qk_norm}
            return super().attention(layer).model_copy(update=changed)

        def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
            changed = {"activation": self.activation, "gated": self.gated}
            return super().feed_forward(layer).model_copy(update=changed)

    @classmethod
    def tiny_configs(cls) -> dict[str, "Config"]:
        fields = TINY.model_dump() | {"num_layers": 2, "scale": 0.5, "qk_norm": True}
        short = ta.RopeSpec(theta=1e4, rotary_dim=16, layout="half", scaling=None)
        return {
            "softcap, gelu_tanh": cls.Config(**fields, softcap=2.0, window=None, activation="gelu_tanh", gated=True),
            "windows, ungated, partial rotary": cls.Config(
                **fields | {"rope": short}, softcap=None, window=5, activation="gelu", gated=False
            ),
        }


class FreeAttention(Llama):
    """Attention specs as fields of the config, one per layer; the rest is Llama's."""

    model_type = "free-attention"

    class Config(LlamaConfig):
        specs: ta.PerLayer[ta.AttentionSpec]

        def attention(self, layer: int) -> ta.AttentionSpec:
            return self.specs[layer]

    @classmethod
    def config(cls, *changes: dict[str, Any]) -> "Config":
        """One layer for each of `changes` of the spec of `TINY`."""
        specs = tuple(TINY.attention(0).model_copy(update=change) for change in changes)
        return cls.Config(**TINY.model_dump() | {"num_layers": len(specs), "specs": specs})

    @classmethod
    def tiny_configs(cls) -> dict[str, "Config"]:
        rms = dict(scope="per_head", eps=1e-5, offset=0.0, weight_in_fp32=False)
        norm = {"qk_norm": ta.QKNormSpec(**rms, weight=False, after_rope=True)}
        learnt = {"qk_norm": ta.QKNormSpec(**rms, weight=True, after_rope=True)}
        wide = {"v_head_dim": 64, "biases": "k", "output_gate": "per_channel"} | norm
        narrow = {"v_head_dim": 24, "biases": "qo", "output_gate": "per_head", "sinks": True} | learnt
        return {
            "sinks, with window and softcap": cls.config(
                {"sinks": True, "window": 5}, {"sinks": True, "softcap": 2.0}, {"sinks": True, "scale": 0.5}
            ),
            "chunks, and a layer that sees all": cls.config({"chunk": 32}, {}, {"chunk": 32}),
            "chunks of one and two blocks": cls.config({"chunk": 64}, {}, {"chunk": 32}),
            "wide values in chunks, k bias, gated channels, weightless norm after rope": cls.config(
                wide | {"chunk": 32}, wide
            ),
            "narrow values with sinks, q and o biases, gated heads, norm after rope": cls.config(
                narrow | {"window": 5}, narrow
            ),
        }


class TwiceValue(ta.nn.QKVLinear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().forward(x)
        return q, k, 2 * v


class Residual(ta.nn.FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x)) + x


class OwnParts(Llama):
    """Parts that an engine must not pack, because subclasses compute something else."""

    model_type = "own-parts"

    class Block(ta.nn.PreNormBlock):
        def __init__(self, config: ta.TransformerConfig, layer: int):
            super().__init__(config, layer)
            self.attention.qkv_linear = TwiceValue(config.dim, config.attention(layer))
            self.feed_forward = Residual(config.dim, config.feed_forward(layer))


class ReplicatedOutput(Llama):
    model_type = "replicated-output"

    @classmethod
    def parallel_plan(cls, config: ta.TransformerConfig) -> ta.ParallelPlan:
        rows = {"layers.*.attention.wo": ta.replicate, "layers.*.attention.qkv_linear.wv": ta.replicate}
        planned = ta.decoder_plan(config).rows
        del planned["layers.*.attention.qkv_linear.w[qkv]"]
        return ta.ParallelPlan(planned | {"layers.*.attention.qkv_linear.w[qk]": ta.colwise} | rows)


class ChunkLocal(Llama):
    """Its embedding depends on how many tokens come at once: right for whole prompts only."""

    model_type = "chunk-local"

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) * (1.01 if tokens.numel() == 16 else 1.0)

    @classmethod
    def tiny_configs(cls) -> dict[str, LlamaConfig]:
        return {"llama's": TINY}


class Skipping(Llama):
    """Its loop adds the first layer's result to the last one's."""

    model_type = "skipping"

    def run_layers(self, x: Tensor, seq: ta.nn.SequenceInfo, start: int = 0, stop: int | None = None) -> Tensor:
        first = super().run_layers(x, seq, 0, 1)
        return first + super().run_layers(first, seq, 1)


class Halves(Llama):
    """Its published names hold each w1 as two tensors."""

    model_type = "halves"

    @classmethod
    def state_dict_adapter(cls, config: ta.TransformerConfig) -> ta.StateDictAdapter:
        w1 = "layers.{layer}.feed_forward.w1.weight"
        rows = [row for row in ta.decoder_rows(config) if getattr(row, "native", None) != w1]
        halves = ta.Concat(
            ["w1.{layer}.top", "w1.{layer}.bottom"], w1, sizes=[config.hidden_dim // 2, config.hidden_dim // 2]
        )
        return ta.StateDictAdapter(*rows, halves, layer=range(config.num_layers))


class OwnAttention(ta.nn.InnerAttention):
    pass


def without_a_good_seam() -> Iterator[tuple[type[ta.BaseTransformer], str]]:
    """(model, part of the refusal), for each way in which an attention seam can be wrong."""

    def block(change):
        class Block(ta.nn.PreNormBlock):
            def __init__(self, config: ta.TransformerConfig, layer: int):
                super().__init__(config, layer)
                if layer == 1:
                    change(self.attention, config)

        return Block

    def subclassed(attention, config):
        attention.inner_attention = OwnAttention(config.attention(1), 1)

    def contradicting(attention, config):
        other = config.attention(1).model_copy(update={"scale": 1.0})
        attention.inner_attention = ta.nn.InnerAttention(other, 1)

    def missing(attention, config):
        attention.inner_attention = None

    def doubled(attention, config):
        attention.inner_attention = ta.nn.InnerAttention(config.attention(0), 0)

    for change, text in [
        (subclassed, "layers.1.attention.inner_attention is a subclass of InnerAttention"),
        (contradicting, "layers.1.attention.inner_attention: its spec is not config.attention(1)"),
        (missing, "InnerAttention modules are there for layers [0, 2], one per layer is needed"),
        (doubled, "InnerAttention modules are there for layers [0, 0, 2], one per layer is needed"),
    ]:
        yield type("Seam", (Llama,), {"model_type": f"seam-{change.__name__}", "Block": block(change)}), text


class Registered(Llama):
    """For registration by path."""

    model_type = "registered-by-path"


class Mixed(Llama):
    """Layers that differ in everything; its published names are its own."""

    model_type = "mixed"

    class Config(LlamaConfig):
        layers: ta.PerLayer[tuple[int, int, int, int | None, int]]
        """num_heads, num_kv_heads, head_dim, window and hidden_dim."""

        def attention(self, layer: int) -> ta.AttentionSpec:
            heads, kv_heads, head_dim, window, _ = self.layers[layer]
            rope = self.rope.model_copy(update={"rotary_dim": head_dim})
            changed = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}
            scaled = {"window": window, "rope": rope, "scale": head_dim**-0.5}
            return super().attention(layer).model_copy(update=changed | scaled)

        def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
            return super().feed_forward(layer).model_copy(update={"hidden_dim": self.layers[layer][-1]})

    @classmethod
    def state_dict_adapter(cls, config: ta.TransformerConfig) -> ta.StateDictAdapter:
        return native_rows(cls, config)
