"""GPT-NeoX and Pythia (arXiv:2204.06745, arXiv:2304.01373): attention and feed-forward side by side, partial rotary.

Published with q, k and v in one tensor, head by head.
"""

from typing import Any, Literal

from torch import Tensor

import titan_adapters as ta
from titan_adapters.errors import ConfigError

LINEARS = {
    "attention.dense": "attention.wo",
    "mlp.dense_h_to_4h": "feed_forward.w1",
    "mlp.dense_4h_to_h": "feed_forward.w2",
}
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


class GPTNeoXConfig(ta.TransformerConfig):
    num_heads: int
    head_dim: int
    hidden_dim: int
    activation: Literal["gelu", "gelu_tanh"]
    """Of the feed-forward layer, by our names."""
    parallel_residual: bool
    """Whether attention and feed-forward both read the layer's input, or the latter reads the former's result."""
    attention_bias: bool
    """Whether q, k, v and o projections have biases. The feed-forward layer and the norms always have."""
    rope: ta.RopeSpec

    def attention(self, layer: int) -> ta.AttentionSpec:
        return ta.AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
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
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation=self.activation, gated=False, bias=True)

    def norm(self) -> ta.LayerNormSpec:
        return ta.LayerNormSpec(eps=self.norm_eps, bias=True)


class GPTNeoXBlock(ta.nn.PreNormBlock):
    def __init__(self, config: GPTNeoXConfig, layer: int):
        super().__init__(config, layer)
        self.parallel_residual = config.parallel_residual

    def forward(self, x: Tensor, seq: ta.nn.SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        if not self.parallel_residual:
            return super().forward(x, seq)
        return self.ffn(self.ffn_norm(x)) + self.attention(self.attention_norm(x), seq) + x


class GPTNeoX(ta.BaseTransformer):
    model_type = "gpt_neox"
    Config = GPTNeoXConfig
    impossible_geometry = dict.fromkeys(["head_dim other than dim / heads", "one kv head"], "can't be published")
    Block = GPTNeoXBlock

    @classmethod
    def parallel_plan(cls, config: GPTNeoXConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: GPTNeoXConfig) -> ta.StateDictAdapter:
        hf, native = "gpt_neox.layers.{layer}", "layers.{layer}"
        heads = dict(num_heads=config.num_heads, num_kv_heads=config.num_heads, head_dim=config.head_dim)
        embedding, head = ("gpt_neox.embed_in.weight", "tok_embeddings.weight"), ("embed_out.weight", "lm_head.weight")
        rows: list[Any] = [
            ta.Rename(*embedding),
            ta.Tie(head[0], embedding[0], head[1], embedding[1]) if config.tied_embeddings else ta.Rename(*head),
            *ta.norm_rows(config, "gpt_neox.final_layer_norm", "norm"),
            # Tables and masks that releases before transformers 4.38 stored.
            *(ta.Drop(f"{hf}.attention.{name}") for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        ]
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            ours = [f"{native}.attention.qkv_linear.w{p}.{kind}" for p in "qkv"]
            rows.append(ta.FusedQKV(f"{hf}.attention.query_key_value.{kind}", ours, layout="grouped", **heads))
        for theirs, name in LINEARS.items():
            bias = config.attention_bias or theirs.startswith("mlp")
            rows += ta.linear_rows(f"{hf}.{theirs}", f"{native}.{name}", bias)
        for theirs, name in NORMS.items():
            rows += ta.norm_rows(config, f"{hf}.{theirs}", f"{native}.{name}")
        return ta.StateDictAdapter(*rows, layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> GPTNeoXConfig:
        r = ta.HFReader(hf, cls.model_type)
        fields = r.decoder_fields("layer_norm_eps")
        if fields.pop("num_kv_heads") != fields["num_heads"]:
            r.problems.append("num_key_value_heads is not num_attention_heads; gpt_neox has as many of both")
        r.expect("hidden_act", *ACTIVATIONS, default="gelu")
        fields["activation"] = ACTIVATIONS.get(hf.get("hidden_act", "gelu"))
        r.expect("is_decoder", False, True, default=False)  # attention is causal either way
        fields["parallel_residual"] = r.take("use_parallel_residual", True)
        fields["attention_bias"] = r.take("attention_bias", True)
        older = ("rotary_emb_base", "rotary_pct")
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"], partial=0.25, older=older)
        return r.finish(lambda: GPTNeoXConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: GPTNeoXConfig) -> dict[str, Any]:
        if config.num_heads * config.head_dim != config.dim:
            raise ConfigError(
                f"This format has heads of dim / num_heads channels, not {config.head_dim}.",
                fix="save with format='native'.",
            )
        published = ta.hf_decoder_config(config, "GPTNeoXForCausalLM", cls.model_type, "layer_norm_eps")
        rope = ta.hf_rope(config.rope, config.max_seq_len, config.head_dim)
        v4 = {"rotary_emb_base": rope.pop("rope_theta"), "rotary_pct": rope.pop("partial_rotary_factor")}
        for key in ("head_dim", "num_key_value_heads", "rope_theta"):
            del published[key]
        own = {"use_parallel_residual": config.parallel_residual, "attention_bias": config.attention_bias}
        return published | rope | v4 | own

    @classmethod
    def tiny_configs(cls) -> dict[str, GPTNeoXConfig]:
        quarter = GPTNeoXConfig(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=3, head_dim=32, hidden_dim=80, activation="gelu", parallel_residual=True,
            attention_bias=True, rope=ta.RopeSpec(theta=1e4, rotary_dim=8, layout="half", scaling=None),
        )  # fmt: skip
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        whole = ta.RopeSpec(theta=1e4, rotary_dim=32, layout="half", scaling=llama3)
        return {
            "parallel, a quarter rotates": quarter,
            "one after the other, tied, no attention biases": quarter.model_copy(
                update={"parallel_residual": False, "tied_embeddings": True, "attention_bias": False}
            ),
            "whole heads rotate, llama3 rope, tanh": quarter.model_copy(
                update={"rope": whole, "activation": "gelu_tanh", "hidden_dim": 96}
            ),
        }
