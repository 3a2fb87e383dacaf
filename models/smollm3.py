"""SmolLM3 (HuggingFaceTB/SmolLM3-3B): Llama with layers that have no positions (NoPE, arXiv:2501.18795)."""

from typing import Any

import titan_adapters as ta


class SmolLM3Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    attention_bias: bool
    """Whether q, k, v and o projections have biases."""
    mlp_bias: bool
    windows: ta.PerLayer[int | None]
    """Visible tokens per layer, the current one included; None for all."""
    rotates: ta.PerLayer[bool]
    """Whether a layer has rope."""
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
            biases="qkvo" if self.attention_bias else "",
            rope=self.rope if self.rotates[layer] else None,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=self.mlp_bias)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class SmolLM3(ta.BaseTransformer):
    model_type = "smollm3"
    Config = SmolLM3Config
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: SmolLM3Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: SmolLM3Config) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(*ta.decoder_rows(config), layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> SmolLM3Config:
        absent = {"num_key_value_heads": 4, "tie_word_embeddings": True}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["attention_bias"] = r.take("attention_bias", False)
        fields["mlp_bias"] = r.take("mlp_bias", False)
        fields["windows"] = r.windows(fields["num_layers"])
        fields["rotates"] = r.rotating_layers(fields["num_layers"])
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: SmolLM3Config(**fields))

    @classmethod
    def to_hf_config(cls, config: SmolLM3Config) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "SmolLM3ForCausalLM", cls.model_type)
        return {
            **published,
            **ta.hf_rope(config.rope, config.max_seq_len),
            **ta.hf_windows(config.windows),
            "no_rope_layers": [int(rotates) for rotates in config.rotates],
            "attention_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, SmolLM3Config]:
        mixed = SmolLM3Config(
            dim=96, num_layers=3, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=True,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, attention_bias=False,
            mlp_bias=False, windows=(None,) * 3, rotates=(True, False, True),
            rope=ta.RopeSpec(theta=2e6, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=True, attention_factor=None,
            mscale=None, mscale_all_dim=None,
        )  # fmt: skip
        return {
            "middle layer without rope": mixed,
            "window without rope, untied, yarn": mixed.model_copy(
                update={
                    "windows": (None, 5, None),
                    "tied_embeddings": False,
                    "rope": mixed.rope.model_copy(update={"scaling": yarn, "theta": 1e4}),
                }
            ),
            "rope in all layers, one kv head, square mlp, biases": mixed.model_copy(
                update={
                    "rotates": (True,) * 3,
                    "num_kv_heads": 1,
                    "hidden_dim": 96,
                    "attention_bias": True,
                    "mlp_bias": True,
                }
            ),
        }
