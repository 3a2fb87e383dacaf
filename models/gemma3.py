"""Gemma 3 (arXiv:2503.19786), text only: norms around each half, per-head QK norm, a second rope base in windows."""

from typing import Any

from torch import Tensor

import titan_adapters as ta


class Gemma3Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    query_scalar: int
    """Scores are divided by its square root."""
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
            scale=self.query_scalar**-0.5,
            window=self.windows[layer],
            chunk=None,
            sinks=False,
            softcap=None,
            qk_norm=ta.QKNormSpec(
                scope="per_head",
                eps=self.norm_eps,
                offset=1.0,
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
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="gelu_tanh", gated=True, bias=False)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=1.0, weight_in_fp32=True)


class Gemma3(ta.BaseTransformer):
    model_type = "gemma3_text"
    Config = Gemma3Config
    Block = ta.nn.SandwichNormBlock

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> [..., D], times the square root of D, which is rounded to the embedding's dtype."""
        x = super().embed(tokens)
        return x * x.new_full((), self.config.dim**0.5)

    @classmethod
    def parallel_plan(cls, config: Gemma3Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Gemma3Config) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(
            *ta.decoder_rows(config, norms=ta.state_dict.SANDWICH_NORMS), layer=range(config.num_layers)
        )

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Gemma3Config:
        absent = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096}
        r = ta.HFReader(absent | hf, cls.model_type)  # filled up with what transformers takes
        r.expect("hidden_activation", "gelu_pytorch_tanh")
        r.expect("use_bidirectional_attention", False, default=False)
        r.expect("attn_logit_softcapping", None, default=None)
        r.expect("final_logit_softcapping", None, default=None)
        r.take("cache_implementation", None)  # how stock generation allocates
        fields = r.decoder_fields()
        fields["query_scalar"] = r.take("query_pre_attn_scalar", 256)
        fields["attention_bias"] = r.take("attention_bias", False)
        pattern = r.take("sliding_window_pattern", 6)
        fields["windows"] = r.windows(fields["num_layers"], full_every=pattern)
        sizes = (fields["head_dim"], "half", fields["max_seq_len"])
        fields["rope"], fields["local_rope"] = r.ropes_by_type(*sizes, local_key="rope_local_base_freq")
        return r.finish(lambda: Gemma3Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Gemma3Config) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "Gemma3ForCausalLM", cls.model_type)
        activation = published.pop("hidden_act")
        rope = (config.rope, config.local_rope, config.max_seq_len)
        return {
            **published,
            **ta.hf_rope_by_type(*rope, local_key="rope_local_base_freq"),
            **ta.hf_layer_types(config.windows, config.max_seq_len),
            "hidden_activation": activation,
            "query_pre_attn_scalar": config.query_scalar,
            "attention_bias": config.attention_bias,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, Gemma3Config]:
        local = ta.RopeSpec(theta=1e4, rotary_dim=32, layout="half", scaling=None)
        linear = ta.RopeSpec(theta=1e6, rotary_dim=32, layout="half", scaling=ta.LinearScaling(factor=4.0))
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        mixed = Gemma3Config(
            dim=96, num_layers=3, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=True,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, query_scalar=24,
            attention_bias=False, windows=(5, 5, None), rope=linear, local_rope=local,
        )  # fmt: skip
        return {
            "two rope bases, query scalar != head_dim": mixed,
            "full layer first with llama3 rope, untied, one kv head": mixed.model_copy(
                update={
                    "windows": (None, 5, 5),
                    "rope": linear.model_copy(update={"scaling": llama3, "theta": 2e4}),
                    "tied_embeddings": False,
                    "num_kv_heads": 1,
                }
            ),
            "no window, square mlp, biases": mixed.model_copy(
                update={"windows": (None,) * 3, "hidden_dim": 96, "attention_bias": True}
            ),
        }
