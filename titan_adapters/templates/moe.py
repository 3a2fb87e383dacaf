"""MyModel: a decoder whose layers are mixtures of experts.

Say here what it is, and cite where it comes from.
"""

import titan_adapters as ta


class MyModelConfig(ta.TransformerConfig):
    # dim, num_layers, vocab_size, max_seq_len, norm_eps, tied_embeddings and dtype are there already. CHANGE: add what
    # varies between sizes of your model. Give no defaults, so that a checkpoint can't mean another function.
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    num_experts: int
    top_k: int
    expert_dim: int

    def attention(self, layer: int) -> ta.AttentionSpec:
        # CHANGE: state what your layers compute; they may differ. A spec has no defaults, and the engine refuses what
        # it can't honour. `titan-adapters check --fields` lists every field.
        rope = ta.RopeSpec(theta=self.rope_theta, rotary_dim=self.head_dim, layout="half", scaling=None)
        return ta.AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, v_head_dim=self.head_dim,
            scale=self.head_dim**-0.5, window=None, chunk=None, sinks=False, softcap=None, qk_norm=None, biases="",
            rope=rope, temperature=None, output_gate=None,
        )  # fmt: skip

    def feed_forward(self, layer: int) -> ta.MoESpec:
        # CHANGE: how experts are chosen and weighed. Return a ta.FeedForwardSpec for layers that are dense.
        return ta.MoESpec(
            num_experts=self.num_experts, top_k=self.top_k, hidden_dim=self.expert_dim, score="softmax",
            renormalize=True, scaling_factor=1.0, groups=None, correction_bias=False, weighs="output",
            router_dtype="model", router_bias=False, activation="silu", gated=True, bias=False, shared=None,
        )  # fmt: skip

    def norm(self) -> ta.RMSNormSpec:
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


@ta.register_model
class MyModel(ta.BaseTransformer):
    model_type = "my_model"  # its name in checkpoints
    Config = MyModelConfig
    # CHANGE: a class of your own, an nn.Module built as Block(config, layer) and called as block(x, seq). Compose it
    # from ta.nn, so that an engine finds its seams; tokens may meet in ta.nn.InnerAttention only.
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: MyModelConfig) -> ta.ParallelPlan:
        # CHANGE: a row for each module of your own that has parameters, as `extra={"layers.*.my_norm": ta.replicate}`.
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: MyModelConfig) -> ta.StateDictAdapter:
        # CHANGE: how your published weights are called. These are Qwen3-MoE's names on Hugging Face.
        experts = ta.PerExpert(gate="gate_proj", up="up_proj", down="down_proj")
        mixtures = ta.moe_rows(config, "model.layers.{moe}.mlp", "layers.{moe}.moe", layout=experts)
        return ta.StateDictAdapter(*ta.decoder_rows(config, feed_forward=mixtures), **ta.layer_ranges(config))

    # If transformers has this architecture, also override from_hf_config and to_hf_config: then its published folders
    # load as they are, and the suite compares logits with transformers.

    @classmethod
    def tiny_configs(cls) -> dict[str, MyModelConfig]:
        # What the suite runs on. CHANGE: use every option of your config. Keep the awkward numbers: they find mistakes.
        gqa = MyModelConfig(
            dim=48, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=False,
            dtype="float32", num_heads=4, num_kv_heads=2, head_dim=32, rope_theta=10000.0, num_experts=8, top_k=2,
            expert_dim=80,
        )  # fmt: skip
        return {
            "gqa, head_dim != dim / heads": gqa,
            "tied, one kv head, square experts": gqa.model_copy(
                update={"tied_embeddings": True, "num_kv_heads": 1, "expert_dim": 48}
            ),
            "one of three experts": gqa.model_copy(update={"num_experts": 3, "top_k": 1}),
        }
