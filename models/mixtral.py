"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from typing import Any

import titan_adapters as ta


class MixtralConfig(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    """Width of one expert."""
    num_experts: int
    top_k: int
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

    def feed_forward(self, layer: int) -> ta.MoESpec:
        return ta.MoESpec(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_dim=self.hidden_dim,
            score="softmax",  # over all experts, then renormalised; the paper's softmax of the chosen is the same
            renormalize=True,
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


class Mixtral(ta.BaseTransformer):
    model_type = "mixtral"
    Config = MixtralConfig
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: MixtralConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: MixtralConfig) -> ta.StateDictAdapter:
        experts = ta.PerExpert(gate="w1", up="w3", down="w2")
        mixtures = ta.moe_rows(config, "model.layers.{moe}.block_sparse_moe", "layers.{moe}.moe", layout=experts)
        return ta.StateDictAdapter(*ta.decoder_rows(config, feed_forward=mixtures), **ta.layer_ranges(config))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> MixtralConfig:
        absent = {"num_key_value_heads": 8, "num_experts_per_tok": 2}  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        fields = r.decoder_fields()
        fields["num_experts"] = r.take_either("num_local_experts", "num_experts")
        fields["top_k"] = r.take("num_experts_per_tok")
        fields["windows"] = r.one_window(fields["num_layers"])
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: MixtralConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: MixtralConfig) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "MixtralForCausalLM", cls.model_type)
        return {
            **published,
            **ta.hf_one_window(config.windows),
            "hidden_act": "silu",
            "intermediate_size": config.hidden_dim,
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, MixtralConfig]:
        gqa = MixtralConfig(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, hidden_dim=64, num_experts=8, top_k=2,
            windows=(None, None), rope=ta.RopeSpec(theta=1e6, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        llama3 = ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
        scaled = gqa.rope.model_copy(update={"theta": 1e4, "scaling": llama3})
        return {
            "window in every layer, square experts, llama3 rope": gqa.model_copy(
                update={"windows": (5, 5), "hidden_dim": 96, "rope": scaled}
            ),
            "tied, one kv head, 2 * width = dim, four of eight": gqa.model_copy(
                update={"tied_embeddings": True, "num_kv_heads": 1, "dim": 128, "top_k": 4}
            ),
            "one of three, width 40, linear rope": gqa.model_copy(
                update={
                    "num_experts": 3,
                    "top_k": 1,
                    "hidden_dim": 40,
                    "rope": gqa.rope.model_copy(update={"scaling": ta.LinearScaling(factor=4.0)}),
                }
            ),
        }
