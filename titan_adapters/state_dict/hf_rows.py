"""Row lists that several published families share."""

from titan_adapters.config import TransformerConfig
from titan_adapters.state_dict.ops import Op, Permute
from titan_adapters.state_dict.rows import Rename, Row, Tie


def attention_rows(config: TransformerConfig, hf: str, native: str) -> list[Row]:
    """Separate q, k, v and o projections with optional biases and per-head QK norm, published in half layout.

    Layers must agree on head counts, biases, norms and rope layout; rows for others are written by hand.
    """
    spec = config.attention(0)

    def rope_layout(heads: int) -> tuple[Op, ...]:
        if spec.rope is None or spec.rope.layout == "half":
            return ()
        return (Permute(heads, spec.head_dim, spec.rope.rotary_dim),)

    ops = {"q": rope_layout(spec.num_heads), "k": rope_layout(spec.num_kv_heads), "v": ()}
    rows: list[Row] = []
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        rows += [Rename(f"{hf}.{p}_proj.{kind}", f"{native}.qkv_linear.w{p}.{kind}", *ops[p]) for p in "qkv"]
    for kind in ("weight", "bias") if spec.out_bias else ("weight",):
        rows.append(Rename(f"{hf}.o_proj.{kind}", f"{native}.wo.{kind}"))
    if spec.qk_norm is not None:
        rows += [Rename(f"{hf}.{p}_norm.weight", f"{native}.{p}_norm.weight", *rope_layout(1)) for p in "qk"]
    return rows


def feed_forward_rows(config: TransformerConfig, hf: str, native: str) -> list[Row]:
    """gate_proj, up_proj and down_proj as w1, w3 and w2."""
    kinds = ("weight", "bias") if config.feed_forward(0).bias else ("weight",)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return [
        Rename(f"{hf}.{theirs}.{kind}", f"{native}.{ours}.{kind}") for theirs, ours in names.items() for kind in kinds
    ]


def decoder_rows(config: TransformerConfig) -> list[Row]:
    """Everything outside and inside the layers of a Llama-shaped decoder, under the names that transformers uses."""
    hf, native = "model.layers.{layer}", "layers.{layer}"
    embedding, head = ("model.embed_tokens.weight", "tok_embeddings.weight"), ("lm_head.weight", "lm_head.weight")
    return [
        Rename(*embedding),
        *attention_rows(config, f"{hf}.self_attn", f"{native}.attention"),
        *feed_forward_rows(config, f"{hf}.mlp", f"{native}.feed_forward"),
        Rename(f"{hf}.input_layernorm.weight", f"{native}.attention_norm.weight"),
        Rename(f"{hf}.post_attention_layernorm.weight", f"{native}.ffn_norm.weight"),
        Rename("model.norm.weight", "norm.weight"),
        Tie(head[0], embedding[0], head[1], embedding[1]) if config.tied_embeddings else Rename(*head),
    ]
