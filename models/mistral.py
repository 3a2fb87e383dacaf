"""Mistral 7B and Nemo (arXiv:2310.06825), and Ministral 8B.

One architecture, published under two model types: `mistral` has one window for all layers, `ministral` one per layer.
"""

from typing import Any

import titan_adapters as ta


class MistralConfig(ta.TransformerConfig):
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


class Mistral(ta.BaseTransformer):
    model_type = "mistral"
    Config = MistralConfig
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: MistralConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: MistralConfig) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(*ta.decoder_rows(config), layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> MistralConfig:
        absent = {"num_key_value_heads": 8, "sliding_window": 4096}  # what transformers takes; null means none
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["windows"] = r.one_window(fields["num_layers"])
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: MistralConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: MistralConfig) -> dict[str, Any]:
        return ta.hf_decoder_config(config, "MistralForCausalLM", cls.model_type) | ta.hf_one_window(config.windows)

    @classmethod
    def tiny_configs(cls) -> dict[str, MistralConfig]:
        gqa = tiny()
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=True, attention_factor=None,
            mscale=None, mscale_all_dim=None,
        )  # fmt: skip
        return {
            "window in every layer, yarn": gqa.model_copy(
                update={"windows": (5, 5), "rope": gqa.rope.model_copy(update={"scaling": yarn})}
            ),
            "no window": gqa,
            "tied, one kv head, square mlp, linear rope": gqa.model_copy(
                update={
                    "tied_embeddings": True,
                    "num_kv_heads": 1,
                    "hidden_dim": 96,
                    "rope": gqa.rope.model_copy(update={"scaling": ta.LinearScaling(factor=4.0)}),
                }
            ),
        }


class Ministral(Mistral):
    model_type = "ministral"

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> MistralConfig:
        absent = {"num_key_value_heads": 8, "sliding_window": 4096}
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        everywhere = (absent | hf)["sliding_window"] is not None and not hf.get("layer_types")
        fields["windows"] = (r.one_window if everywhere else r.windows)(fields["num_layers"])
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: MistralConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: MistralConfig) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "MinistralForCausalLM", cls.model_type)
        return published | ta.hf_layer_types(config.windows, config.max_seq_len)

    @classmethod
    def tiny_configs(cls) -> dict[str, MistralConfig]:
        gqa = tiny()
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        return {
            "first layer windowed": gqa.model_copy(update={"windows": (5, None)}),
            "no window, one kv head, square mlp": gqa.model_copy(update={"num_kv_heads": 1, "hidden_dim": 96}),
            "tied, window in every layer, llama3 rope": gqa.model_copy(
                update={
                    "windows": (5, 5),
                    "tied_embeddings": True,
                    "rope": gqa.rope.model_copy(update={"scaling": llama3}),
                }
            ),
        }


def tiny() -> MistralConfig:
    return MistralConfig(
        dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False, dtype="float32",
        num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, windows=(None, None),
        rope=ta.RopeSpec(theta=1e4, rotary_dim=32, layout="half", scaling=None),
    )  # fmt: skip
