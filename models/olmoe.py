"""OLMoE (arXiv:2409.02060): RMSNorm over all query and over all key heads, a mixture of experts in every layer."""

from typing import Any

import titan_adapters as ta


class OlmoeConfig(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    """Width of one expert."""
    num_experts: int
    top_k: int
    renormalize: bool
    """Whether the chosen experts' weights are made to sum to 1."""
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
                weight_in_fp32=False,
                weight=True,
                after_rope=False,
            ),
            biases="qkvo" if self.attention_bias else "",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.MoESpec:
        return ta.MoESpec(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_dim=self.hidden_dim,
            score="softmax",
            renormalize=self.renormalize,
            scaling_factor=1.0,
            groups=None,
            correction_bias=False,
            weighs="output",
            router_dtype="model",
            router_bias=False,
            activation="silu",
            gated=True,
            bias=False,
            shared=None,
        )

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Olmoe(ta.BaseTransformer):
    model_type = "olmoe"
    Config = OlmoeConfig
    impossible_geometry = dict.fromkeys(["head_dim other than dim / heads"], "stock q and k norms have dim channels")
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: OlmoeConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: OlmoeConfig) -> ta.StateDictAdapter:
        experts = ta.PerExpert(gate="gate_proj", up="up_proj", down="down_proj")
        mixtures = ta.moe_rows(config, "model.layers.{moe}.mlp", "layers.{moe}.moe", layout=experts)
        return ta.StateDictAdapter(*ta.decoder_rows(config, feed_forward=mixtures), **ta.layer_ranges(config))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> OlmoeConfig:
        absent = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        r.expect("clip_qkv", None, default=None)  # stock code clamps q, k and v; no published checkpoint does
        fields = r.decoder_fields()
        fields["num_experts"] = r.take_either("num_experts", "num_local_experts")
        fields["top_k"] = r.take("num_experts_per_tok")
        fields["renormalize"] = r.take("norm_topk_prob", False)
        fields["attention_bias"] = r.take("attention_bias", False)
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: OlmoeConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: OlmoeConfig) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "OlmoeForCausalLM", cls.model_type)
        return {
            **published,
            "hidden_act": "silu",
            "intermediate_size": config.hidden_dim,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "norm_topk_prob": config.renormalize,
            "attention_bias": config.attention_bias,
            "clip_qkv": None,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, OlmoeConfig]:
        gqa = OlmoeConfig(
            dim=128, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=64, num_experts=8, top_k=2,
            renormalize=False, attention_bias=False,
            rope=ta.RopeSpec(theta=1e4, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        return {
            "gqa, 2 * width = dim": gqa,
            "renormalised, tied, one kv head, square experts, biases": gqa.model_copy(
                update={
                    "renormalize": True,
                    "tied_embeddings": True,
                    "num_kv_heads": 1,
                    "hidden_dim": 128,
                    "attention_bias": True,
                }
            ),
            "as many kv heads, one of three, width 40, llama3 rope": gqa.model_copy(
                update={
                    "num_kv_heads": 4,
                    "num_experts": 3,
                    "top_k": 1,
                    "hidden_dim": 40,
                    "rope": gqa.rope.model_copy(update={"scaling": llama3}),
                }
            ),
        }
