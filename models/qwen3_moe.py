"""Qwen3 MoE (arXiv:2505.09388): Qwen3 with mixtures of experts, in every layer or in some."""

from typing import Any

import titan_adapters as ta


class Qwen3MoeConfig(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    """Width of dense layers."""
    expert_dim: int
    """Width of one expert."""
    num_experts: int
    top_k: int
    renormalize: bool
    """Whether the chosen experts' weights are made to sum to 1."""
    sparse: ta.PerLayer[bool]
    """Which layers are mixtures of experts."""
    attention_bias: bool
    """Whether q, k, v and o projections have biases."""
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
            qk_norm=ta.QKNormSpec(
                scope="per_head",
                eps=self.norm_eps,
                offset=0.0,
                weight_in_fp32=False,
                weight=True,
                after_rope=False,
            ),
            biases="qkvo" if self.attention_bias else "",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec | ta.MoESpec:
        if not self.sparse[layer]:
            return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)
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
            shared=None,
        )

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Qwen3Moe(ta.BaseTransformer):
    model_type = "qwen3_moe"
    Config = Qwen3MoeConfig
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: Qwen3MoeConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Qwen3MoeConfig) -> ta.StateDictAdapter:
        experts = ta.PerExpert(gate="gate_proj", up="up_proj", down="down_proj")
        dense = ta.feed_forward_rows(config, "model.layers.{dense}.mlp", "layers.{dense}.feed_forward")
        mixtures = ta.moe_rows(config, "model.layers.{moe}.mlp", "layers.{moe}.moe", layout=experts)
        rows = ta.decoder_rows(config, feed_forward=[*dense, *mixtures])
        return ta.StateDictAdapter(*rows, **ta.layer_ranges(config))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Qwen3MoeConfig:
        absent = {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768}  # transformers'
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["expert_dim"] = r.take("moe_intermediate_size")
        fields["num_experts"] = r.take_either("num_experts", "num_local_experts")
        fields["top_k"] = r.take("num_experts_per_tok")
        fields["renormalize"] = r.take("norm_topk_prob", False)
        fields["sparse"] = r.sparse_layers(fields["num_layers"])
        fields["attention_bias"] = r.take("attention_bias", False)
        fields["windows"] = r.switched_window(fields["num_layers"])
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: Qwen3MoeConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: Qwen3MoeConfig) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "Qwen3MoeForCausalLM", cls.model_type)
        window = ta.hf_one_window(config.windows)
        return {
            **published,
            **window,
            "use_sliding_window": window["sliding_window"] is not None,
            "hidden_act": "silu",
            "intermediate_size": config.hidden_dim,
            "moe_intermediate_size": config.expert_dim,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "norm_topk_prob": config.renormalize,
            "mlp_only_layers": list(config.dense_specs()),
            "decoder_sparse_step": 1,
            "attention_bias": config.attention_bias,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, Qwen3MoeConfig]:
        gqa = Qwen3MoeConfig(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, expert_dim=64, num_experts=8,
            top_k=2, renormalize=True, sparse=(True, True), attention_bias=False, windows=(None, None),
            rope=ta.RopeSpec(theta=1e6, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        mixed = {"sparse": (False, True), "expert_dim": 96, "attention_bias": True}
        other = {"sparse": (True, False), "expert_dim": 24, "renormalize": False, "num_experts": 3, "top_k": 1}
        return {
            "mixtures everywhere": gqa,
            "dense then sparse, square experts, tied, one kv head, biases": gqa.model_copy(
                update=mixed | {"tied_embeddings": True, "num_kv_heads": 1}
            ),
            "sparse then dense, not renormalised, width 24, one of three, windows, llama3 rope": gqa.model_copy(
                update=other | {"windows": (5, 5), "rope": gqa.rope.model_copy(update={"scaling": llama3})}
            ),
        }
