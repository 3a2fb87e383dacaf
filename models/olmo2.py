"""OLMo 2 (arXiv:2501.00656): norms after each half of a layer, RMSNorm over all query and over all key heads."""

from typing import Any

import titan_adapters as ta


class Olmo2Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    attention_bias: bool
    """Whether q, k, v and o projections have biases."""
    rope: ta.RopeSpec

    def attention(self, layer: int) -> ta.AttentionSpec:
        return ta.AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=None,
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
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=True)


class Olmo2(ta.BaseTransformer):
    model_type = "olmo2"
    Config = Olmo2Config
    Block = ta.nn.PostNormBlock

    @classmethod
    def parallel_plan(cls, config: Olmo2Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Olmo2Config) -> ta.StateDictAdapter:
        return ta.StateDictAdapter(
            *ta.decoder_rows(config, norms=ta.state_dict.POST_NORMS), layer=range(config.num_layers)
        )

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Olmo2Config:
        absent = {"rms_norm_eps": 1e-5}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["attention_bias"] = r.take("attention_bias", False)
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: Olmo2Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Olmo2Config) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "Olmo2ForCausalLM", cls.model_type)
        return published | {"attention_bias": config.attention_bias}

    @classmethod
    def tiny_configs(cls) -> dict[str, Olmo2Config]:
        gqa = Olmo2Config(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-6, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=80, attention_bias=False,
            rope=ta.RopeSpec(theta=5e5, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        scaling = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        return {
            "gqa, head_dim != dim / heads": gqa,
            "tied, one kv head, biases": gqa.model_copy(
                update={"tied_embeddings": True, "num_kv_heads": 1, "attention_bias": True}
            ),
            "as many kv heads, square mlp, llama3 rope": gqa.model_copy(
                update={
                    "num_kv_heads": 4,
                    "hidden_dim": 96,
                    "rope": gqa.rope.model_copy(update={"scaling": scaling, "theta": 1e4}),
                }
            ),
        }
