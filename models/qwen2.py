"""Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on q, k and v, none on the output."""

from typing import Any

import titan_adapters as ta


class Qwen2Config(ta.TransformerConfig):
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
            biases="qkv",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Qwen2(ta.BaseTransformer):
    model_type = "qwen2"
    Config = Qwen2Config
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: Qwen2Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Qwen2Config) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(*ta.decoder_rows(config), layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Qwen2Config:
        absent = {"num_key_value_heads": 32}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["windows"] = r.windows(fields["num_layers"])
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: Qwen2Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Qwen2Config) -> dict[str, Any]:
        return ta.hf_decoder_config(config, "Qwen2ForCausalLM", cls.model_type) | ta.hf_windows(config.windows)

    @classmethod
    def tiny_configs(cls) -> dict[str, Qwen2Config]:
        gqa = Qwen2Config(
            dim=128, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, windows=(None, None),
            rope=ta.RopeSpec(theta=1e6, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=True, attention_factor=None,
            mscale=None, mscale_all_dim=None,
        )  # fmt: skip
        return {
            "gqa, odd vocab": gqa,
            "tied, one kv head": gqa.model_copy(update={"tied_embeddings": True, "num_kv_heads": 1, "dim": 96}),
            "second layer windowed, square mlp, yarn": gqa.model_copy(
                update={
                    "hidden_dim": 128,
                    "windows": (None, 5),
                    "rope": gqa.rope.model_copy(update={"scaling": yarn, "theta": 1e4}),
                }
            ),
        }
