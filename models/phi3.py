"""Phi-3, Phi-3.5 and Phi-4-mini (arXiv:2404.14219): Llama's layer, LongRoPE, partial rotary in Phi-4-mini.

Published with q, k and v in one tensor, and gate and up projection in another.
"""

from typing import Any

import titan_adapters as ta
from titan_adapters.errors import ConfigError


class Phi3Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
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
            biases="",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Phi3(ta.BaseTransformer):
    model_type = "phi3"
    Config = Phi3Config
    impossible_geometry = dict.fromkeys(["head_dim other than dim / heads"], "published configs don't say head_dim")
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: Phi3Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Phi3Config) -> ta.StateDictAdapter:
        hf, native = "model.layers.{layer}", "layers.{layer}"
        heads = dict(num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        qkv = [f"{native}.attention.qkv_linear.w{p}.weight" for p in "qkv"]
        attention = [
            ta.FusedQKV(f"{hf}.self_attn.qkv_proj.weight", qkv, layout="concat", **heads),
            ta.Rename(f"{hf}.self_attn.o_proj.weight", f"{native}.attention.wo.weight"),
        ]
        feed_forward = ta.gate_up_rows(config, f"{hf}.mlp", f"{native}.feed_forward")
        rows = ta.decoder_rows(config, attention=attention, feed_forward=feed_forward)
        return ta.StateDictAdapter(*rows, layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Phi3Config:
        r = ta.HFReader(hf, cls.model_type)
        r.expect("hidden_act", "silu")
        r.expect("attention_bias", False, default=False)
        r.expect("mlp_bias", False, default=False)
        r.expect("lm_head_bias", False, default=False)
        for own in ("full_attn_mod", "interpolate_factor"):  # of Microsoft's own code; transformers reads neither
            r.expect(own, 1, default=1)
        fields = r.decoder_fields()
        fields["windows"] = r.one_window(fields["num_layers"])
        original = r.take("original_max_position_embeddings", None)
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"], partial=1.0, original=original)
        return r.finish(lambda: Phi3Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Phi3Config) -> dict[str, Any]:
        scaling = config.rope.scaling
        if config.num_heads * config.head_dim != config.dim or not isinstance(scaling, ta.LongRopeScaling | None):
            raise ConfigError(
                "This format has heads of dim / num_heads channels, and longrope or no scaling.",
                [f"head_dim is {config.head_dim}, scaling {scaling.type if scaling else None}"],
                fix="save with format='native'.",
            )
        original = config.max_seq_len if scaling is None else scaling.original_max_position
        published = ta.hf_decoder_config(config, "Phi3ForCausalLM", cls.model_type)
        del published["head_dim"]
        rope = ta.hf_rope(config.rope, config.max_seq_len, config.head_dim)
        return published | rope | ta.hf_one_window(config.windows) | {"original_max_position_embeddings": original}

    @classmethod
    def tiny_configs(cls) -> dict[str, Phi3Config]:
        longrope = ta.LongRopeScaling(
            short_factor=tuple(1 + 0.05 * i for i in range(12)), long_factor=tuple(1 + 0.9 * i for i in range(12)),
            original_max_position=32, attention_factor=1.19,
        )  # fmt: skip
        partial = Phi3Config(
            dim=128, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, windows=(None, None),
            rope=ta.RopeSpec(theta=1e4, rotary_dim=24, layout="half", scaling=longrope),
        )  # fmt: skip
        short = longrope.model_copy(update={"original_max_position": 128})
        return {
            "long factors, partial rotary, window": partial.model_copy(update={"windows": (5, 5)}),
            "short factors, tied, one kv head": partial.model_copy(
                update={
                    "rope": partial.rope.model_copy(update={"scaling": short}),
                    "tied_embeddings": True,
                    "num_kv_heads": 1,
                }
            ),
            "whole heads rotate, window, as many kv heads, square mlp": partial.model_copy(
                update={
                    "rope": partial.rope.model_copy(update={"scaling": None, "rotary_dim": 32}),
                    "windows": (5, 5),
                    "num_kv_heads": 4,
                    "hidden_dim": 128,
                }
            ),
        }
