"""OLMo 3 (arXiv:2512.13961): OLMo 2 with windows in three layers of four, whose rope is never scaled."""

from typing import Any

import titan_adapters as ta


class Olmo3Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    attention_bias: bool
    """Whether q, k, v and o projections have biases."""
    windows: ta.PerLayer[int | None]
    """Visible tokens per layer, the current one included; None for all."""
    rope: ta.RopeSpec
    """Of the layers that see all."""
    local_rope: ta.RopeSpec
    """Of the layers with a window."""

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
                scope="full",
                eps=self.norm_eps,
                offset=0.0,
                weight_in_fp32=True,
                weight=True,
                after_rope=False,
            ),
            biases="qkvo" if self.attention_bias else "",
            rope=self.rope if self.windows[layer] is None else self.local_rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=True)


class Olmo3(ta.BaseTransformer):
    model_type = "olmo3"
    Config = Olmo3Config
    Block = ta.nn.PostNormBlock

    @classmethod
    def parallel_plan(cls, config: Olmo3Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Olmo3Config) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(
            *ta.decoder_rows(config, norms=ta.state_dict.POST_NORMS), layer=range(config.num_layers)
        )

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Olmo3Config:
        absent = {"rms_norm_eps": 1e-5, "sliding_window": 4096}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["attention_bias"] = r.take("attention_bias", False)
        fields["windows"] = r.windows(fields["num_layers"], full_every=4)
        ropes = r.ropes_by_type(fields["head_dim"], "half", fields["max_seq_len"], local_key=None)
        fields["rope"], fields["local_rope"] = ropes
        return r.finish(lambda: Olmo3Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Olmo3Config) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "Olmo3ForCausalLM", cls.model_type)
        return {
            **published,
            **ta.hf_rope_by_type(config.rope, config.local_rope, config.max_seq_len, local_key=None),
            **ta.hf_layer_types(config.windows, config.max_seq_len),
            "attention_bias": config.attention_bias,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, Olmo3Config]:
        plain = ta.RopeSpec(theta=5e5, rotary_dim=32, layout="half", scaling=None)
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=True, attention_factor=1.2,
            mscale=None, mscale_all_dim=None,
        )  # fmt: skip
        mixed = Olmo3Config(
            dim=96, num_layers=3, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, attention_bias=False,
            windows=(5, None, 5), rope=plain.model_copy(update={"scaling": yarn}), local_rope=plain,
        )  # fmt: skip
        return {
            "windows, yarn in the full layer": mixed,
            "no window, tied, one kv head": mixed.model_copy(
                update={"windows": (None,) * 3, "tied_embeddings": True, "num_kv_heads": 1}
            ),
            "window in every layer, as many kv heads, biases, square mlp": mixed.model_copy(
                update={"windows": (5,) * 3, "num_kv_heads": 4, "attention_bias": True, "hidden_dim": 96}
            ),
        }
