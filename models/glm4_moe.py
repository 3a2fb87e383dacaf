"""GLM-4.5 and its successors (arXiv:2508.06471): half of each head rotates, sigmoid routing with a correction bias."""

from typing import Any

import titan_adapters as ta

PUBLISHED = {
    "attention_bias": "attention_bias", "use_qk_norm": "qk_norm", "intermediate_size": "hidden_dim",
    "first_k_dense_replace": "num_dense_layers", "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_dim", "n_shared_experts": "num_shared_experts", "norm_topk_prob": "renormalize",
    "routed_scaling_factor": "scaling_factor",
}  # fmt: skip
"""The format's own keys -> our fields."""

MTP = (
    "embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
    "shared_head.head.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
    *(f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")), "self_attn.o_proj.weight",
    "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
    *(f"mlp.{of}.{p}_proj.weight" for of in ("experts.{expert}", "shared_experts") for p in ("gate", "up", "down")),
)  # fmt: skip
"""Tensors of the published layer past the last one, which predicts the token after next for speculative decoding.
The model itself does not use them: they are dropped, and an export says that there are none."""


class Glm4MoeConfig(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    """Whether q, k and v projections have biases."""
    qk_norm: bool
    """Whether query and key heads are normalised."""
    rope: ta.RopeSpec
    num_dense_layers: int
    """Layers that are no mixtures; they come first."""
    hidden_dim: int
    """Width of a dense layer."""
    num_experts: int
    top_k: int
    """Experts per token."""
    expert_dim: int
    """Width of one expert."""
    num_shared_experts: int
    groups: ta.ExpertGroupsSpec | None
    renormalize: bool
    scaling_factor: float

    def attention(self, layer: int) -> ta.AttentionSpec:
        norm = ta.QKNormSpec(**self.norm().model_dump(), scope="per_head", weight=True, after_rope=False)
        return ta.AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, v_head_dim=self.head_dim,
            scale=self.head_dim**-0.5, window=None, chunk=None, sinks=False, softcap=None,
            qk_norm=norm if self.qk_norm else None, biases="qkv" if self.attention_bias else "", rope=self.rope,
            temperature=None, output_gate=None,
        )  # fmt: skip

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec | ta.MoESpec:
        dense = ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="silu", gated=True, bias=False)
        if layer < self.num_dense_layers:
            return dense
        shared = dense.model_copy(update={"hidden_dim": self.num_shared_experts * self.expert_dim})
        return ta.MoESpec(
            num_experts=self.num_experts, top_k=self.top_k, hidden_dim=self.expert_dim, score="sigmoid",
            renormalize=self.renormalize, scaling_factor=self.scaling_factor, groups=self.groups, correction_bias=True,
            weighs="output", router_dtype="float32", router_bias=False, activation="silu", gated=True, bias=False,
            shared=ta.SharedExpertsSpec(feed_forward=shared, output_gate=False),
        )  # fmt: skip

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


class Glm4Moe(ta.BaseTransformer):
    model_type = "glm4_moe"
    Config = Glm4MoeConfig
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: Glm4MoeConfig) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Glm4MoeConfig) -> ta.StateDictAdapter:
        layout = ta.PerExpert(gate="gate_proj", up="up_proj", down="down_proj")
        feed_forward = [
            *ta.feed_forward_rows(config, "model.layers.{dense}.mlp", "layers.{dense}.feed_forward"),
            *ta.moe_rows(config, "model.layers.{moe}.mlp", "layers.{moe}.moe", layout=layout),
        ]
        rows = ta.decoder_rows(config, feed_forward=feed_forward)
        unused = [ta.Drop(f"model.layers.{{mtp}}.{name}") for name in MTP]
        return ta.StateDictAdapter(*rows, *unused, mtp=[config.num_layers], **ta.layer_ranges(config))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Glm4MoeConfig:
        absent = {  # what transformers takes
            "num_key_value_heads": 8, "attention_bias": False, "use_qk_norm": False, "n_shared_experts": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        }  # fmt: skip
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "silu")
        for spelling in ("num_nextn_predict_layers", "num_mtp_layers"):
            r.expect(spelling, 0, 1, default=0)
        fields = r.decoder_fields()
        fields |= {ours: r.take(theirs) for theirs, ours in PUBLISHED.items() if ours not in fields}
        fields["num_experts"] = r.take_either("n_routed_experts", "num_local_experts")
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"], partial=0.5)
        groups = {"num_groups": r.take("n_group", 1), "top_groups": r.take("topk_group", 1)}
        one = set(groups.values()) == {1}
        fields["groups"] = None if one else r.build(lambda: ta.ExpertGroupsSpec(**groups, score="top2_sum"))
        return r.finish(lambda: Glm4MoeConfig(**fields))

    @classmethod
    def to_hf_config(cls, config: Glm4MoeConfig) -> dict[str, Any]:
        return {
            **ta.hf_decoder_config(config, "Glm4MoeForCausalLM", cls.model_type),
            **ta.hf_rope(config.rope, config.max_seq_len, config.head_dim),
            **{theirs: getattr(config, ours) for theirs, ours in PUBLISHED.items()},
            "hidden_act": "silu",
            "n_routed_experts": config.num_experts,
            "n_group": config.groups.num_groups if config.groups else 1,
            "topk_group": config.groups.top_groups if config.groups else 1,
            "num_nextn_predict_layers": 0,
        }

    @classmethod
    def tiny_configs(cls) -> dict[str, Glm4MoeConfig]:
        grouped = Glm4MoeConfig(
            dim=96, num_layers=3, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, attention_bias=True, qk_norm=True,
            rope=ta.RopeSpec(theta=1e6, rotary_dim=16, layout="half", scaling=None), num_dense_layers=1, hidden_dim=80,
            num_experts=6, top_k=2, expert_dim=96, num_shared_experts=1, renormalize=True, scaling_factor=2.5,
            groups=ta.ExpertGroupsSpec(num_groups=3, top_groups=2, score="top2_sum"),
        )  # fmt: skip
        one_group = {"groups": None, "num_experts": 5, "top_k": 3, "renormalize": False, "scaling_factor": 1.0}
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=True, attention_factor=None,
            mscale=None, mscale_all_dim=None,
        )  # fmt: skip
        scaled = grouped.rope.model_copy(update={"theta": 1e4, "rotary_dim": 24, "scaling": yarn})
        plain = {"attention_bias": False, "qk_norm": False, "tied_embeddings": True, "num_kv_heads": 1}
        return {
            "groups, square experts": grouped,
            "one group, 2 * expert width = dim = dense width, two shared experts, two dense layers": grouped.model_copy(
                update=one_group | {"expert_dim": 48, "hidden_dim": 96, "num_shared_experts": 2, "num_dense_layers": 2}
            ),
            "no dense layer, neither biases nor norms, tied, one kv head, yarn": grouped.model_copy(
                update=plain | {"num_dense_layers": 0, "expert_dim": 64, "rope": scaled}
            ),
        }
