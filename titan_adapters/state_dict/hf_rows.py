"""Row lists that several published families share."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from titan_adapters.config import AttentionSpec, LayerNormSpec, TransformerConfig
from titan_adapters.errors import StateDictError
from titan_adapters.moe_spec import FeedForwardSpec
from titan_adapters.spec import Spec
from titan_adapters.state_dict.fused import split_gate_up
from titan_adapters.state_dict.ops import Op, Permute, VocabPadding
from titan_adapters.state_dict.rows import Rename, Row, Tie

PRE_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
"""Published names of a Llama-shaped layer's norms -> ours."""

POST_NORMS = {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "ffn_norm"}
"""The same of a layer whose norms follow its halves."""

SANDWICH_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
"""The same of Gemma's layers, with norms before and after each half."""


def attention_rows(
    config: TransformerConfig, hf: str, native: str, published: Literal["half", "interleaved"] = "half"
) -> list[Row]:
    """Separate q, k, v and o projections with optional biases and QK norm.

    Args:
        published: Rope layout of the published q and k rows.
    """
    spec = one_shape(config)
    layouts = {s.rope.layout for s in config.attention_specs() if s.rope is not None}
    rotary_dims = {s.rope.rotary_dim for s in config.attention_specs() if s.rope is not None}

    def rope_layout(heads: int) -> tuple[Op, ...]:
        if layouts <= {published}:
            return ()
        if layouts != {"interleaved"} or len(rotary_dims) != 1 or any(s.rope is None for s in config.attention_specs()):
            raise StateDictError(
                f"These rows can't turn {published} rope rows into {sorted(layouts)} ones.",
                fix="use one layout and rotary_dim in all layers, or write the rows of q and k by hand.",
            )
        return (Permute(heads, spec.head_dim, rotary_dims.copy().pop()),)

    ops = {"q": rope_layout(spec.num_heads), "k": rope_layout(spec.num_kv_heads), "v": ()}
    rows: list[Row] = []
    for p in "qkv":
        kinds = ("weight", "bias") if p in spec.biases else ("weight",)
        rows += [Rename(f"{hf}.{p}_proj.{kind}", f"{native}.qkv_linear.w{p}.{kind}", *ops[p]) for kind in kinds]
    rows += linear_rows(f"{hf}.o_proj", f"{native}.wo", "o" in spec.biases)
    if spec.sinks:
        rows.append(Rename(f"{hf}.sinks", f"{native}.inner_attention.sinks"))
    if spec.output_gate is not None:
        rows.append(Rename(f"{hf}.gate_proj.weight", f"{native}.wg.weight"))
    if spec.qk_norm is not None and spec.qk_norm.weight:
        full = spec.qk_norm.scope == "full"
        heads = {"q": spec.num_heads if full else 1, "k": spec.num_kv_heads if full else 1}
        rows += [Rename(f"{hf}.{p}_norm.weight", f"{native}.{p}_norm.weight", *rope_layout(heads[p])) for p in "qk"]
    return rows


SHAPING = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "biases", "sinks", "output_gate", "qk_norm")
"""Fields of an AttentionSpec that decide which parameters a layer has, and their shapes."""


def one_shape(config: TransformerConfig) -> AttentionSpec:
    """The first layer's spec, once all layers are known to have parameters of its shapes."""
    alike({layer: _shaped(spec) for layer, spec in enumerate(config.attention_specs())}, SHAPING)
    return config.attention(0)


def _shaped(spec: AttentionSpec) -> AttentionSpec:
    """`spec` without what its QK norm computes: only a weight, and what it ranges over, makes parameters."""
    norm = spec.qk_norm
    if norm is not None:
        computed = {"eps": 1.0, "offset": 0.0, "weight_in_fp32": False, "after_rope": False}
        norm = norm.model_copy(update=computed) if norm.weight else None
    return spec.model_copy(update={"qk_norm": norm})


S = TypeVar("S", bound=Spec)


def alike(specs: Mapping[int, S], fields: Sequence[str]) -> S:
    """The first layer's spec, once the specs of these layers are known to agree in `fields`."""
    first, spec = next(iter(specs.items()))
    for layer, other in specs.items():
        for name in fields:
            ours, theirs = getattr(spec, name), getattr(other, name)
            if ours != theirs:
                raise StateDictError(
                    f"Layers {first} and {layer} differ in {name} ({ours}, {theirs}), which these rows can't say.",
                    fix="write the rows of such layers by hand.",
                )
    return spec


def linear_rows(hf: str, native: str, bias: bool) -> list[Row]:
    """Weight, and bias if there is one."""
    return [Rename(f"{hf}.{kind}", f"{native}.{kind}") for kind in (("weight", "bias") if bias else ("weight",))]


def norm_rows(config: TransformerConfig, hf: str, native: str) -> list[Row]:
    """A norm on the residual stream, with its bias if it has one."""
    spec = config.norm()
    return linear_rows(hf, native, isinstance(spec, LayerNormSpec) and spec.bias)


def first_dense(config: TransformerConfig) -> FeedForwardSpec:
    """The spec of the first layer that has a dense feed-forward part."""
    return next(iter(config.dense_specs().values()))


def feed_forward_rows(config: TransformerConfig, hf: str, native: str) -> list[Row]:
    """gate_proj, up_proj and down_proj of dense layers as w1, w3 and w2; no rows if there are no such layers."""
    return mlp_rows(first_dense(config), hf, native) if config.dense_specs() else []


def mlp_rows(spec: FeedForwardSpec, hf: str, native: str) -> list[Row]:
    """gate_proj, up_proj and down_proj as w1, w3 and w2."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return [
        row for theirs, ours in names.items() for row in linear_rows(f"{hf}.{theirs}", f"{native}.{ours}", spec.bias)
    ]


def gate_up_rows(
    config: TransformerConfig,
    hf: str,
    native: str,
    *,
    order: Literal["gate_up", "up_gate"] = "gate_up",
    interleaved: bool = False,
) -> list[Row]:
    """gate_up_proj, which is w1 and w3 in one tensor, and down_proj as w2.

    Args:
        order: Which half comes first.
        interleaved: The halves alternate row by row, instead of one above the other.
    """
    spec = first_dense(config)
    rows: list[Row] = [
        split_gate_up(
            f"{hf}.gate_up_proj.{kind}",
            {"gate": f"{native}.w1.{kind}", "up": f"{native}.w3.{kind}"},
            order=order,
            interleaved=interleaved,
            hidden_dim=spec.hidden_dim,
        )
        for kind in (("weight", "bias") if spec.bias else ("weight",))
    ]
    return rows + linear_rows(f"{hf}.down_proj", f"{native}.w2", spec.bias)


def decoder_rows(
    config: TransformerConfig,
    *,
    norms: Mapping[str, str] = PRE_NORMS,
    attention: Sequence[Row] | None = None,
    feed_forward: Sequence[Row] | None = None,
    padded_vocab_size: int | None = None,
) -> list[Row]:
    """Everything outside and inside the layers of a decoder, under the names that transformers uses.

    Args:
        norms: Published names of a layer's norms -> ours.
        attention: Rows in place of `attention_rows`.
        feed_forward: Rows in place of `feed_forward_rows`.
        padded_vocab_size: Rows of the published embedding and head, if that is not the vocabulary's size.
    """
    hf, native = "model.layers.{layer}", "layers.{layer}"
    embedding, head = ("model.embed_tokens.weight", "tok_embeddings.weight"), ("lm_head.weight", "lm_head.weight")
    if attention is None:
        attention = attention_rows(config, f"{hf}.self_attn", f"{native}.attention")
    if feed_forward is None:
        feed_forward = feed_forward_rows(config, f"{hf}.mlp", f"{native}.feed_forward")
    padding = () if padded_vocab_size is None else (VocabPadding(config.vocab_size, padded_vocab_size),)
    return [
        Rename(*embedding, *padding),
        *attention,
        *feed_forward,
        *(row for theirs, ours in norms.items() for row in norm_rows(config, f"{hf}.{theirs}", f"{native}.{ours}")),
        *norm_rows(config, "model.norm", "norm"),
        Tie(head[0], embedding[0], head[1], embedding[1]) if config.tied_embeddings else Rename(*head, *padding),
    ]
