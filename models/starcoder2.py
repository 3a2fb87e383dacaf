"""StarCoder 2 (arXiv:2402.19173): Llama's layout with layer norms, biases everywhere and a plain GELU feed-forward."""

from typing import Any

import titan_adapters as ta


class Starcoder2Config(ta.TransformerConfig):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    bias: bool
    """Whether all projections have biases. The norms always have."""
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
            biases="qkvo" if self.bias else "",
            rope=self.rope,
            temperature=None,
            output_gate=None,
        )

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec:
        return ta.FeedForwardSpec(hidden_dim=self.hidden_dim, activation="gelu_tanh", gated=False, bias=self.bias)

    def norm(self) -> ta.LayerNormSpec:
        return ta.LayerNormSpec(eps=self.norm_eps, bias=True)


class Starcoder2(ta.BaseTransformer):
    model_type = "starcoder2"
    Config = Starcoder2Config
    Block = ta.nn.PreNormBlock

    @classmethod
    def parallel_plan(cls, config: Starcoder2Config) -> ta.ParallelPlan:
        return ta.decoder_plan(config)

    @classmethod
    def state_dict_adapter(cls, config: Starcoder2Config) -> ta.StateDictAdapter:
        hf, native = "model.layers.{layer}.mlp", "layers.{layer}.feed_forward"
        feed_forward = [
            *ta.linear_rows(f"{hf}.c_fc", f"{native}.w1", config.bias),
            *ta.linear_rows(f"{hf}.c_proj", f"{native}.w2", config.bias),
        ]
        rows = ta.decoder_rows(config, feed_forward=feed_forward)
        return ta.StateDictAdapter(*rows, layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> Starcoder2Config:
        absent = {
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "norm_epsilon": 1e-5,
        }  # what transformers takes
        r = ta.HFReader(absent | hf, cls.model_type)
        r.expect("hidden_act", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
        r.expect("norm_type", "layer_norm", default="layer_norm")
        r.expect("mlp_type", "default", default="default")
        fields = r.decoder_fields("norm_epsilon")
        fields["bias"] = r.take("use_bias", True)
        fields["windows"] = r.one_window(fields["num_layers"])
        fields["rope"] = r.rope(fields["head_dim"], "half", fields["max_seq_len"])
        return r.finish(lambda: Starcoder2Config(**fields))

    @classmethod
    def to_hf_config(cls, config: Starcoder2Config) -> dict[str, Any]:
        published = ta.hf_decoder_config(config, "Starcoder2ForCausalLM", cls.model_type, "norm_epsilon")
        return published | ta.hf_one_window(config.windows) | {"use_bias": config.bias}

    @classmethod
    def tiny_configs(cls) -> dict[str, Starcoder2Config]:
        gqa = Starcoder2Config(
            dim=96, num_layers=2, vocab_size=131, max_seq_len=128, norm_eps=1e-5, tied_embeddings=True,
            dtype="float32", num_heads=6, num_kv_heads=2, head_dim=32, hidden_dim=80, bias=True, windows=(5, 5),
            rope=ta.RopeSpec(theta=1e6, rotary_dim=32, layout="half", scaling=None),
        )  # fmt: skip
        yarn = ta.YarnScaling(
            factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=True, attention_factor=None,
            mscale=None, mscale_all_dim=None,
        )  # fmt: skip
        scaled = gqa.rope.model_copy(update={"scaling": yarn, "theta": 1e4})
        return {
            "tied, window, head_dim != dim / heads": gqa,
            "untied, no biases, no window": gqa.model_copy(
                update={"tied_embeddings": False, "bias": False, "windows": (None, None)}
            ),
            "one kv head, square mlp, window, yarn": gqa.model_copy(
                update={"num_kv_heads": 1, "hidden_dim": 96, "rope": scaled}
            ),
        }
