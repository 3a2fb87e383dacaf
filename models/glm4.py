"""GLM-4-0414 (THUDM/GLM-4-9B-0414): norms around each half, half of each head rotates, in interleaved pairs."""

from typing import Any

import titan_adapters as ta

NORMS = {
    "input_layernorm": "attention_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffn_norm",
}


class Glm4Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    attention_bias: bool
    """Whether q, k and v projections have biases."""
    rope: ta.RopeSpec

    def attention(self, layer: int) -> ta.AttentionSpec:
        return ta.AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=None,
            chunk=None,
            sinks=False,
            softcap=None,
            qk_norm=None,
            biases="qkv" if self.attention_bias else "",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Glm4(ta.BaseTransformer):
    model_type = "glm4"
    Config = Glm4Config
    Block = ta.nn.SandwichNormBlock

    @classmethod
    def parallel_plan(cls, config: Glm4Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Glm4Config) -> ta.StateDictAdapter:
        hf, native = "model.layers.{layer}", "layers.{layer}"
        rows = ta.decoder_rows(
            config,
            norms=NORMS,
            attention=ta.attention_rows(config, f"{hf}.self_attn", f"{native}.attention", published="interleaved"),
            feed_forward=ta.gate_up_rows(config, f"{hf}.mlp", f"{native}.feed_forward"),
        )
        return ta.StateDictAdapter(*rows, layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Glm4Config:
        absent = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["attention_bias"] = r.take("attention_bias")
        fields["rope"] = r.rope(fields["head_dim"], "interleaved", fields["max_seq_len"], partial=0.5)
        return r.finish(lambda: Glm4Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Glm4Config) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "Glm4ForCausalLM", cls.model_type)
        rope = ta.hf_rope(config.rope, config.max_seq_len, config.head_dim)
        return published | rope | {"attention_bias": config.attention_bias}

    @classmethod
    def tiny_configs(cls) -> dict[str, Glm4Config]:
        half = Glm4Config(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, attention_bias=True,
            rope=ta.RopeSpec(theta=1e4, rotary_dim=16, layout="interleaved", scaling=None),
        )  # fmt: skip
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=False, attention_factor=None,
            mscale=None, mscale_all_dim=None,
        )  # fmt: skip
        return {
            "half rotates, biases": half,
            "three quarters rotate, yarn, no biases, tied": half.model_copy(
                update={
                    "rope": half.rope.model_copy(update={"rotary_dim": 24, "scaling": yarn}),
                    "attention_bias": False,
                    "tied_embeddings": True,
                }
            ),
            "whole heads rotate, one kv head, square mlp": half.model_copy(
                update={
                    "rope": half.rope.model_copy(update={"rotary_dim": 32}),
                    "num_kv_heads": 1,
                    "hidden_dim": 96,
                }
            ),
        }
