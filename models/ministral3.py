"""Ministral 3 (mistralai/Ministral-3-8B-Base-2512), text only: YaRN, and an attention temperature beyond its start."""

from typing import Any

import titan_adapters as ta
from titan_adapters.errors import ConfigError


class Ministral3Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    windows: ta.PerLayer[int | None]
    """Visible tokens per layer, the current one included; None for all."""
    rope: ta.RopeSpec
    temperature: ta.TemperatureSpec | None

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
            temperature=self.temperature,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Ministral3(ta.BaseTransformer):
    model_type = "ministral3"
    Config = Ministral3Config
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: Ministral3Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Ministral3Config) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(*ta.decoder_rows(config), layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Ministral3Config:
        absent = {"num_key_value_heads": 8, "head_dim": 128}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["windows"] = r.one_window(fields["num_layers"])
        beta = r.take_rope_setting("llama_4_scaling_beta")
        r.take_rope_setting("max_position_embeddings", None)  # a copy that no code reads
        rope = fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        original = rope.scaling.original_max_position if rope and isinstance(rope.scaling, ta.YarnScaling) else None
        if rope is not None and original is None:
            r.problems.append("the rope type must be yarn: its original context is the temperature's too")
        fields["temperature"] = None
        if beta and original is not None:  # a beta of 0 is no temperature
            fields["temperature"] = r.build(
                lambda: ta.TemperatureSpec(beta=beta, original_max_position=original, offset=0)
            )
        return r.finish(lambda: Ministral3Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Ministral3Config) -> dict[str, Any]:
        scaling, temperature = config.rope.scaling, config.temperature
        original = scaling.original_max_position if isinstance(scaling, ta.YarnScaling) else None
        if original is None or (temperature is not None and temperature.original_max_position != original):
            raise ConfigError(
                "This format needs yarn, with the same original context as the attention temperature.",
                fix="save with format='native'.",
            )
        beta = {"llama_4_scaling_beta": 0.0 if temperature is None else temperature.beta}
        published = ta.hf_decoder_config(config, "Ministral3ForCausalLM", cls.model_type)
        return published | ta.hf_one_window(config.windows) | {
            place: published[place] | beta for place in ("rope_parameters", "rope_scaling")
        }  # fmt: skip

    @classmethod
    def tiny_configs(cls) -> dict[str, Ministral3Config]:
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=True, attention_factor=None,
            mscale=1.0, mscale_all_dim=1.0,
        )  # fmt: skip
        gqa = Ministral3Config(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, windows=(None, None),
            rope=ta.RopeSpec(theta=1e4, rotary_dim=32, layout="half", scaling=yarn),
            temperature=ta.TemperatureSpec(beta=0.5, original_max_position=32, offset=0),
        )  # fmt: skip
        uneven = gqa.rope.model_copy(update={"scaling": yarn.model_copy(update={"mscale_all_dim": 0.5})})
        return {
            "equal mscales, temperature": gqa,
            "unequal mscales, tied, window in every layer": gqa.model_copy(
                update={"rope": uneven, "tied_embeddings": True, "windows": (5, 5)}
            ),
            "no temperature, one kv head, square mlp": gqa.model_copy(
                update={"temperature": None, "num_kv_heads": 1, "hidden_dim": 96}
            ),
        }
