"""Qwen3, dense (arXiv:2505.09388): RMSNorm on each query and key head, head_dim independent of dim / heads."""

from typing import Any

import titan_adapters as ta


class Qwen3Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
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

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Qwen3(ta.BaseTransformer):
    model_type = "qwen3"
    Config = Qwen3Config
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: Qwen3Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Qwen3Config) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(*ta.decoder_rows(config), layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Qwen3Config:
        absent = {"num_key_value_heads": 32, "head_dim": 128}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["attention_bias"] = r.take("attention_bias", False)
        fields["windows"] = r.windows(fields["num_layers"])
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: Qwen3Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Qwen3Config) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "Qwen3ForCausalLM", cls.model_type) | ta.hf_windows(config.windows)
        return published | {"attention_bias": config.attention_bias}

    @classmethod
    def tiny_configs(cls) -> dict[str, Qwen3Config]:
        gqa = Qwen3Config(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, attention_bias=False,
            windows=(None, None),
            rope=ta.RopeSpec(theta=1e6, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=True, attention_factor=None,
            mscale=None, mscale_all_dim=None,
        )  # fmt: skip
        return {
            "head_dim != dim / heads": gqa,
            "tied, one kv head, biases": gqa.model_copy(
                update={"tied_embeddings": True, "num_kv_heads": 1, "attention_bias": True}
            ),
            "second layer windowed, square mlp, yarn": gqa.model_copy(
                update={
                    "hidden_dim": 96,
                    "windows": (None, 5),
                    "rope": gqa.rope.model_copy(update={"scaling": yarn, "theta": 1e4}),
                }
            ),
        }
