"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): Qwen2 with mixtures of experts and a gated shared expert."""

from typing import Any

import titan_adapters as ta


class Qwen2MoeConfig(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    """Width of dense layers."""
    expert_dim: int
    """Width of one expert."""
    shared_dim: int
    """Width of the shared expert."""
    num_experts: int
    top_k: int
    renormalize: bool
    """Whether the chosen experts' weights are made to sum to 1."""
    sparse: ta.PerLayer[bool]
    """Which layers are mixtures of experts."""
    attention_bias: bool
    """Whether q, k and v projections have biases."""
    windows: ta.PerLayer[int | None]
    """Visible tokens per layer, the current one included; None for all."""
    rope: ta.RopeSpec

    def attention(self, layer: int) -> ta.AttentionSpec:
        return ta.AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.windows[layer],
            chunk=None,
            sinks=False,
            softcap=None,
            qk_norm=None,
            biases="qkv" if self.attention_bias else "",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec | ta.MoESpec:
        if not self.sparse[layer]:
            return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)
        shared = ta.FeedForwardSpec(hidden_dim=self.shared_dim, activation="silu", gated=True, bias=False)
        return ta.MoESpec(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_dim=self.expert_dim,
            score="softmax",
            renormalize=self.renormalize,
            scaling_factor=1.0,
            groups=None,
            correction_bias=False,
            weighs="output",
            router_dtype="model",
            router_bias=False,
            activation="silu",
            gated=True,
            bias=False,
            shared=ta.SharedExpertsSpec(feed_forward=shared, output_gate=True),
        )

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Qwen2Moe(ta.BaseTransformer):
    model_type = "qwen2_moe"
    Config = Qwen2MoeConfig
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: Qwen2MoeConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Qwen2MoeConfig) -> ta.StateDictAdapter:
        hf, experts = "model.layers.{moe}.mlp", ta.PerExpert(gate="gate_proj", up="up_proj", down="down_proj")
        dense = ta.feed_forward_rows(config, "model.layers.{dense}.mlp", "layers.{dense}.feed_forward")
        mixtures = ta.moe_rows(config, hf, "layers.{moe}.moe", layout=experts, shared="shared_expert")
        rows = ta.decoder_rows(config, feed_forward=[*dense, *mixtures])
        return ta.StateDictAdapter(*rows, **ta.layer_ranges(config))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Qwen2MoeConfig:
        absent: dict[str, Any] = {  # what transformers takes
            "num_key_value_heads": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        }
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["expert_dim"] = r.take("moe_intermediate_size")
        fields["shared_dim"] = r.take("shared_expert_intermediate_size")
        fields["num_experts"] = r.take_either("num_experts", "num_local_experts")
        fields["top_k"] = r.take("num_experts_per_tok")
        fields["renormalize"] = r.take("norm_topk_prob", False)
        fields["sparse"] = r.sparse_layers(fields["num_layers"])
        fields["attention_bias"] = r.take("qkv_bias", True)
        fields["windows"] = r.windows(fields["num_layers"])
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: Qwen2MoeConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: Qwen2MoeConfig) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "Qwen2MoeForCausalLM", cls.model_type)
        return {
            **published,
            **ta.hf_windows(config.windows),
            "hidden_act": "silu",
            "intermediate_size": config.hidden_dim,
            "moe_intermediate_size": config.expert_dim,
            "shared_expert_intermediate_size": config.shared_dim,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "norm_topk_prob": config.renormalize,
            "mlp_only_layers": list(config.dense_specs()),
            "decoder_sparse_step": 1,
            "qkv_bias": config.attention_bias,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, Qwen2MoeConfig]:
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        gqa = Qwen2MoeConfig(
            dim=128, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, expert_dim=64, shared_dim=96,
            num_experts=8, top_k=2, renormalize=False, sparse=(True, True), attention_bias=True,
            windows=(None, None), rope=ta.RopeSpec(theta=1e4, rotary_dim=32, layout="half", scaling=llama3),
        )  # fmt: skip
        mixed = {"sparse": (False, True), "expert_dim": 128, "shared_dim": 128, "renormalize": True}
        other = {"sparse": (True, False), "expert_dim": 24, "shared_dim": 40, "attention_bias": False}
        return {
            "mixtures everywhere, 2 * width = dim": gqa,
            "dense then sparse, square experts, renormalised, tied, one kv head": gqa.model_copy(
                update=mixed | {"tied_embeddings": True, "num_kv_heads": 1}
            ),
            "sparse then dense, one of three, widths 24 and 40, no biases, second layer windowed": gqa.model_copy(
                update=other | {"num_experts": 3, "top_k": 1, "windows": (None, 5), "dim": 96}
            ),
        }
