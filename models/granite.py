"""Granite 3 (ibm-granite/granite-3.0-8b-base): Llama with factors on embeddings, scores, residuals and logits."""

from typing import Any

from torch import Tensor

import titan_adapters as ta

MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}
"""Our fields -> published keys, each 1 if absent."""


class GraniteConfig(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    attention_bias: bool
    """Whether q, k, v and o projections have biases."""
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    """Factor on q·k before the softmax."""
    residual_multiplier: float
    """Factor on what each half of a layer adds."""
    logits_divisor: float
    rope: ta.RopeSpec

    def attention(self, layer: int) -> ta.AttentionSpec:
        return ta.AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scale=self.attention_multiplier,
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


class GraniteBlock(ta.nn.PreNormBlock):
    def __init__(self, config: GraniteConfig, layer: int):
        super().__init__(config, layer)
        self.multiplier = config.residual_multiplier

    def forward(self, x: Tensor, seq: ta.nn.SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        x = x + self.attention(self.attention_norm(x), seq) * self.multiplier
        return x + self.ffn(self.ffn_norm(x)) * self.multiplier


class Granite(ta.BaseTransformer):
    model_type = "granite"
    Config = GraniteConfig
    Block = GraniteBlock
    config: GraniteConfig

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> [..., D]."""
        return super().embed(tokens) * self.config.embedding_multiplier

    def compute_logits(self, x: Tensor) -> Tensor:
        """Normalised hidden states [..., D] -> logits [..., V]."""
        return super().compute_logits(x) / self.config.logits_divisor

    @classmethod
    def parallel_plan(cls, config: GraniteConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: GraniteConfig) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(*ta.decoder_rows(config), layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> GraniteConfig:
        r = ta.HFReader(hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["attention_bias"] = r.take("attention_bias", False)
        fields["mlp_bias"] = r.take("mlp_bias", False)
        for ours, theirs in MULTIPLIERS.items():
            fields[ours] = r.take(theirs, 1.0)
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: GraniteConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: GraniteConfig) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "GraniteForCausalLM", cls.model_type)
        multipliers = {theirs: getattr(config, ours) for ours, theirs in MULTIPLIERS.items()}
        return published | multipliers | {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}

    @classmethod
    def tiny_configs(cls) -> dict[str, GraniteConfig]:
        gqa = GraniteConfig(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=True,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, attention_bias=False,
            mlp_bias=False, embedding_multiplier=12.0, attention_multiplier=0.07, residual_multiplier=0.22,
            logits_divisor=5.0, rope=ta.RopeSpec(theta=1e4, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        return {
            "four multipliers, tied": gqa,
            "multipliers below one, untied, one kv head, llama3 rope": gqa.model_copy(
                update={
                    "embedding_multiplier": 0.5,
                    "logits_divisor": 0.3,
                    "residual_multiplier": 1.5,
                    "tied_embeddings": False,
                    "num_kv_heads": 1,
                    "rope": gqa.rope.model_copy(update={"scaling": llama3}),
                }
            ),
            "biases, square mlp": gqa.model_copy(update={"attention_bias": True, "mlp_bias": True, "hidden_dim": 96}),
        }
