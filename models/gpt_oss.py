"""gpt-oss (arXiv:2508.10925): attention sinks, a window in every other layer, biased experts behind a clamped gate."""

from typing import Any

import titan_adapters as ta


class GptOssConfig(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    """Whether q, k, v and o projections have biases."""
    windows: ta.PerLayer[int | None]
    """Visible tokens per layer, the current one included; None for all."""
    rope: ta.RopeSpec
    num_experts: int
    top_k: int
    """Experts per token."""
    hidden_dim: int
    """Width of one expert."""
    swiglu: ta.ClampedSwiGLU

    def attention(self, layer: int) -> ta.AttentionSpec:
        return ta.AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.windows[layer],
            chunk=None,
            sinks=True,
            softcap=None,
            qk_norm=None,
            biases="qkvo" if self.attention_bias else "",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.MoESpec:
        return ta.MoESpec(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_dim=self.hidden_dim,
            score="softmax_of_top_k",
            renormalize=False,
            scaling_factor=1.0,
            groups=None,
            correction_bias=False,
            weighs="output",
            router_dtype="model",
            router_bias=True,
            activation=self.swiglu,
            gated=True,
            bias=True,
            shared=None,
        )

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=True)


class GptOss(ta.BaseTransformer):
    model_type = "gpt_oss"
    Config = GptOssConfig
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: GptOssConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: GptOssConfig) -> ta.StateDictAdapter:
        layout = ta.StackedExperts(
            hidden_dim=config.hidden_dim,
            order="gate_up",
            interleaved=True,
            gate_up_transposed=True,
            down_transposed=True,
        )
        mixtures = ta.moe_rows(config, "model.layers.{moe}.mlp", "layers.{moe}.moe", layout=layout, router="router")
        return ta.StateDictAdapter(*ta.decoder_rows(config, feed_forward=mixtures), **ta.layer_ranges(config))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> GptOssConfig:
        absent = {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")  # what the gate is at alpha = 1, without a limit
        fields = r.decoder_fields()
        fields["attention_bias"] = r.take("attention_bias", True)
        fields["num_experts"] = r.take_either("num_local_experts", "num_experts")
        fields["top_k"] = r.take_either("num_experts_per_tok", "experts_per_token")
        gate = {"alpha": r.take("swiglu_alpha", 1.702), "limit": r.take("swiglu_limit", 7.0)}
        fields["swiglu"] = r.build(lambda: ta.ClampedSwiGLU(**gate))
        fields["windows"] = r.windows(fields["num_layers"], full_every=2)
        original = r.take("initial_context_length", None)
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"], original=original)
        return r.finish(lambda: GptOssConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: GptOssConfig) -> dict[str, Any]:
        return {
            **ta.hf_decoder_config(config, "GptOssForCausalLM", cls.model_type),
            **ta.hf_layer_types(config.windows, config.max_seq_len),
            "attention_bias": config.attention_bias,
            "intermediate_size": config.hidden_dim,
            "hidden_act": "silu",
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "swiglu_alpha": config.swiglu.alpha,
            "swiglu_limit": config.swiglu.limit,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, GptOssConfig]:
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=False, attention_factor=None,
            mscale=None, mscale_all_dim=None,
        )  # fmt: skip
        square = GptOssConfig(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, attention_bias=True, windows=(5, None),
            rope=ta.RopeSpec(theta=1.5e5, rotary_dim=32, layout="half", scaling=yarn), num_experts=4, top_k=2,
            hidden_dim=96, swiglu=ta.ClampedSwiGLU(alpha=1.702, limit=7.0),
        )  # fmt: skip
        return {
            "square experts, untruncated yarn": square,
            "2 * expert width = dim, another gate that clamps, one kv head, three experts of five": square.model_copy(
                update={
                    "hidden_dim": 48,
                    "swiglu": ta.ClampedSwiGLU(alpha=1.1, limit=0.7),
                    "num_kv_heads": 1,
                    "num_experts": 5,
                    "top_k": 3,
                }
            ),
            "no window, no attention biases, tied, plain rope": square.model_copy(
                update={
                    "windows": (None, None),
                    "attention_bias": False,
                    "tied_embeddings": True,
                    "rope": square.rope.model_copy(update={"scaling": None}),
                    "hidden_dim": 64,
                }
            ),
        }
