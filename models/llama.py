"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783), and models of the same shape such as SmolLM2.

Native q and k rows are in interleaved rope layout, like Meta's releases and torchtitan; published ones are permuted.
"""

from typing import Any

import titan_adapters as ta


class LlamaConfig(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    attention_bias: bool
    """Whether q, k, v and o projections have biases."""
    mlp_bias: bool
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
            biases="qkvo" if self.attention_bias else "",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=self.mlp_bias)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Llama(ta.BaseTransformer):
    model_type = "llama"
    Config = LlamaConfig
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: LlamaConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: LlamaConfig) -> ta.StateDictAdapter:
        inv_freq = ta.Drop("model.layers.{layer}.self_attn.rotary_emb.inv_freq")  # stored by old releases
        return ta.StateDictAdapter(*ta.decoder_rows(config), inv_freq, layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> LlamaConfig:
        r = ta.HFReader(hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields() | {
            "attention_bias": r.take("attention_bias", False),
            "mlp_bias": r.take("mlp_bias", False),
        }
        fields["rope"] = r.rope(fields["head_dim"], "interleaved", fields["max_seq_len"])
        return r.finish(lambda: LlamaConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: LlamaConfig) -> dict[str, Any]:
        return ta.hf_decoder_config(config, "LlamaForCausalLM", cls.model_type) | {
            "attention_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, LlamaConfig]:
        rope = ta.RopeSpec(theta=500000.0, rotary_dim=32, layout="interleaved", scaling=None)
        scaling = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        gqa = LlamaConfig(
            dim=48, num_layers=3, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=6, num_kv_heads=2, head_dim=32, hidden_dim=80, attention_bias=False,
            mlp_bias=False, rope=rope,
        )  # fmt: skip
        return {
            "gqa, head_dim != dim / heads": gqa,
            "tied, llama3 rope": gqa.model_copy(
                update={"tied_embeddings": True, "rope": rope.model_copy(update={"scaling": scaling, "theta": 1e4})}
            ),
            "biases, one kv head, square": gqa.model_copy(
                update={"num_kv_heads": 1, "dim": 192, "hidden_dim": 192, "attention_bias": True, "mlp_bias": True}
            ),
        }
