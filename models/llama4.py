"""Llama 4, text only (meta-llama/Llama-4-Scout-17B-16E): chunked attention with rope, full attention without."""

from typing import Any

import titan_adapters as ta

PUBLISHED = {
    "attention_bias": "attention_bias", "use_qk_norm": "qk_norm", "intermediate_size_mlp": "hidden_dim",
    "num_local_experts": "num_experts", "num_experts_per_tok": "top_k", "intermediate_size": "expert_dim",
}  # fmt: skip
"""The format's own keys -> our fields."""


class Llama4Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    """Whether q, k, v and o projections have biases."""
    qk_norm: bool
    """Whether rotated query and key heads are normalised, without a weight."""
    rotates: ta.PerLayer[bool]
    """Whether the layer has rope."""
    chunks: ta.PerLayer[int | None]
    """Positions per chunk that a layer's tokens see their own of; None for all earlier tokens."""
    rope: ta.RopeSpec
    temperature: ta.TemperatureSpec | None
    """Of the layers without rope."""
    sparse: ta.PerLayer[bool]
    """Whether the layer is a mixture of experts."""
    hidden_dim: int
    """Width of a dense layer."""
    num_experts: int
    top_k: int
    """Experts per token."""
    expert_dim: int
    """Width of one expert, and of the shared one."""

    def attention(self, layer: int) -> ta.AttentionSpec:
        rotates = self.rotates[layer]
        norm = ta.QKNormSpec(**self.norm().model_dump(), scope="per_head", weight=False, after_rope=True)
        return ta.AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, v_head_dim=self.head_dim,
            scale=self.head_dim**-0.5, window=None, chunk=self.chunks[layer], sinks=False, softcap=None,
            qk_norm=norm if self.qk_norm and rotates else None, biases="qkvo" if self.attention_bias else "",
            rope=self.rope if rotates else None, temperature=None if rotates else self.temperature, output_gate=None,
        )  # fmt: skip

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec | ta.MoESpec:
        dense = ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)
        if not self.sparse[layer]:
            return dense
        shared = dense.model_copy(update={"hidden_dim": self.expert_dim})
        return ta.MoESpec(
            num_experts=self.num_experts, top_k=self.top_k, hidden_dim=self.expert_dim, score="sigmoid",
            renormalize=False, scaling_factor=1.0, groups=None, correction_bias=False, weighs="input",
            router_dtype="model", router_bias=False, activation="silu", gated=True, bias=False,
            shared=ta.SharedExpertsSpec(feed_forward=shared, output_gate=False),
        )  # fmt: skip

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Llama4(ta.BaseTransformer):
    model_type = "llama4_text"
    Config = Llama4Config
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: Llama4Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Llama4Config) -> ta.StateDictAdapter:
        hf, native = "model.layers.{layer}.self_attn", "layers.{layer}.attention"
        layout = ta.StackedExperts(
            hidden_dim=config.expert_dim, order="gate_up", interleaved=False, gate_up_transposed=True,
            down_transposed=True,
        )  # fmt: skip
        mixtures = ta.moe_rows(
            config, "model.layers.{moe}.feed_forward", "layers.{moe}.moe", layout=layout, router="router",
            shared="shared_expert",
        )  # fmt: skip
        dense = ta.feed_forward_rows(config, "model.layers.{dense}.feed_forward", "layers.{dense}.feed_forward")
        attention = ta.attention_rows(config, hf, native, published="interleaved")
        rows = ta.decoder_rows(config, attention=attention, feed_forward=[*dense, *mixtures])
        return ta.StateDictAdapter(*rows, **ta.layer_ranges(config))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Llama4Config:
        absent = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": False, "use_qk_norm": True}
        r = ta.HFReader(absent | {"attention_chunk_size": 8192} | hf, cls.model_type)  # what transformers takes
        r.expect("hidden_act", "silu")
        r.expect("for_llm_compressor", False, default=False)
        r.take("cache_implementation", None)  # how stock generation allocates
        fields = r.decoder_fields()
        fields["expert_dim"] = fields.pop("hidden_dim")
        fields |= {ours: r.take(theirs) for theirs, ours in PUBLISHED.items() if ours not in fields}
        num_layers = fields["num_layers"]
        fields["rotates"] = r.rotating_layers(num_layers)
        fields["chunks"] = r.chunks(num_layers, fields["rotates"])
        fields["rope"] = r.rope(fields["head_dim"], "interleaved", fields["max_seq_len"])
        warm = {"beta": r.take("attn_scale", 0.1), "original_max_position": r.take("floor_scale", 8192)}
        tuned = r.take("attn_temperature_tuning", True)  # a bool, or in older files a number that no code reads
        fields["temperature"] = r.build(lambda: ta.TemperatureSpec(**warm, offset=1)) if tuned else None
        nth, named = r.every_nth("interleave_moe_layer_step", 1, num_layers), r.named_layers("moe_layers", num_layers)
        fields["sparse"] = nth if named is None else named
        return r.finish(lambda: Llama4Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Llama4Config) -> dict[str, Any]:
        warm = config.temperature
        return {
            **ta.hf_decoder_config(config, "Llama4ForCausalLM", cls.model_type),
            **ta.hf_rope(config.rope, config.max_seq_len),
            **ta.hf_chunks(config.chunks, config.max_seq_len),
            **{theirs: getattr(config, ours) for theirs, ours in PUBLISHED.items()},
            "hidden_act": "silu",
            "no_rope_layers": [int(rotates) for rotates in config.rotates],
            "moe_layers": [layer for layer, sparse in enumerate(config.sparse) if sparse],
            "attn_temperature_tuning": warm is not None,
            **({"attn_scale": warm.beta, "floor_scale": warm.original_max_position} if warm else {}),
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, Llama4Config]:
        mixed = Llama4Config(
            dim=96, num_layers=3, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, attention_bias=False, qk_norm=True,
            rotates=(True, False, True), chunks=(32, None, 32), sparse=(False, True, True),
            rope=ta.RopeSpec(theta=5e5, rotary_dim=32, layout="interleaved", scaling=None),
            temperature=ta.TemperatureSpec(beta=0.5, original_max_position=16, offset=1), hidden_dim=80,
            num_experts=4, top_k=1, expert_dim=96,
        )  # fmt: skip
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position=32)
        return {
            "square experts, one of four": mixed,
            "two of five, 2 * expert width = dim, no norm, tied, one kv head, scaled rope": mixed.model_copy(
                update={
                    "num_experts": 5, "top_k": 2, "expert_dim": 48, "hidden_dim": 96, "sparse": (True, False, True),
                    "qk_norm": False, "tied_embeddings": True, "num_kv_heads": 1, "temperature": None,
                    "rope": mixed.rope.model_copy(update={"scaling": llama3}),
                }
            ),
            "mixtures only, chunks where there is no rope, biases": mixed.model_copy(
                update={"sparse": (True,) * 3, "chunks": (None, 64, None), "attention_bias": True, "expert_dim": 64}
            ),
        }  # fmt: skip
