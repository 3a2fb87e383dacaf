"""Gemma 2 (arXiv:2408.00118): norms around each half, soft caps on scores and logits, a window in every other layer."""

from typing import Any

from torch import Tensor

import titan_adapters as ta


class Gemma2Config(ta.TransformerConfig):
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
    attention_softcap: float | None
    logit_softcap: float | None
    """Logits become `softcap * tanh(logits / softcap)`; None for no cap."""

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
            softcap=self.attention_softcap,
            qk_norm=None,
            biases="qkvo" if self.attention_bias else "",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="gelu_tanh", gated=True, bias=False)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=1.0, weight_in_fp32=True)


class Gemma2(ta.BaseTransformer):
    model_type = "gemma2"
    Config = Gemma2Config
    Block = ta.nn.SandwichNormBlock
    config: Gemma2Config

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> [..., D], times the square root of D, which is rounded to the embedding's dtype."""
        x = super().embed(tokens)
        return x * x.new_full((), self.config.dim**0.5)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Normalised hidden states [..., D] -> logits [..., V], capped."""
        logits, softcap = super().compute_logits(x), self.config.logit_softcap
        return logits if softcap is None else softcap * (logits / softcap).tanh()

    @classmethod
    def parallel_plan(cls, config: Gemma2Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Gemma2Config) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(
            *ta.decoder_rows(config, norms=ta.state_dict.SANDWICH_NORMS), layer=range(config.num_layers)
        )

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Gemma2Config:
        absent: dict[str, Any] = {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
        r = ta.HFReader(absent | hf, cls.model_type)  # filled up with what transformers takes; null means none
        r.expect("hidden_activation", "gelu_pytorch_tanh")
        r.expect("hidden_act", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")  # an older copy
        r.expect("use_bidirectional_attention", False, default=False)
        fields = r.decoder_fields()
        fields["query_scalar"] = r.take("query_pre_attn_scalar", 256)
        fields["attention_bias"] = r.take("attention_bias", False)
        fields["attention_softcap"] = r.take("attn_logit_softcapping", None)
        fields["logit_softcap"] = r.take("final_logit_softcapping", None)
        r.take("cache_implementation", None)  # how stock generation allocates
        fields["windows"] = r.windows(fields["num_layers"], full_every=2)
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: Gemma2Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Gemma2Config) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "Gemma2ForCausalLM", cls.model_type)
        activation = published.pop("hidden_act")
        return {
            **published,
            **ta.hf_layer_types(config.windows, config.max_seq_len),
            "hidden_activation": activation,
            "query_pre_attn_scalar": config.query_scalar,
            "attention_bias": config.attention_bias,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, Gemma2Config]:
        mixed = Gemma2Config(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=True,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, query_scalar=24,
            attention_bias=False, windows=(5, None), attention_softcap=2.0, logit_softcap=3.0,
            rope=ta.RopeSpec(theta=1e4, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        return {
            "both caps bite, query scalar != head_dim": mixed,
            "no caps, untied, one kv head, llama3 rope": mixed.model_copy(
                update={
                    "attention_softcap": None,
                    "logit_softcap": None,
                    "tied_embeddings": False,
                    "num_kv_heads": 1,
                    "rope": mixed.rope.model_copy(update={"scaling": llama3}),
                }
            ),
            "no window, square mlp, biases": mixed.model_copy(
                update={"windows": (None, None), "hidden_dim": 96, "attention_bias": True}
            ),
        }
