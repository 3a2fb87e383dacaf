"""Row lists for decoders with mixtures of experts, and the layers that their placeholders range over."""

from collections.abc import Sequence

from titan_adapters.config import TransformerConfig
from titan_adapters.state_dict.expert_rows import PerExpert, StackedExperts, expert_rows
from titan_adapters.state_dict.hf_rows import alike, linear_rows, mlp_rows
from titan_adapters.state_dict.rows import Rename, Row

SHAPING = ("num_experts", "hidden_dim", "correction_bias", "router_bias", "gated", "bias", "shared")
"""Fields of a MoESpec that decide which parameters a layer has, and their shapes."""


def moe_rows(
    config: TransformerConfig,
    hf: str,
    native: str,
    *,
    layout: PerExpert | StackedExperts,
    router: str = "gate",
    shared: str = "shared_experts",
) -> list[Row]:
    """Router, experts, shared experts and their gate, as the mixtures' specs have them; no rows without mixtures.

    Args:
        hf: Prefix of the published names, such as "model.layers.{moe}.mlp".
        native: Prefix of ours, such as "layers.{moe}.moe".
        layout: How the experts are published, under `{hf}.experts`.
        router: Published name of the router. Its correction bias is `{router}.e_score_correction_bias`.
        shared: Published name of the shared experts. Their gate is `{shared}_gate`.

    Raises:
        StateDictError: mixtures have parameters of different shapes.
    """
    if not config.moe_specs():
        return []
    spec = alike(config.moe_specs(), SHAPING)
    rows = linear_rows(f"{hf}.{router}", f"{native}.router.gate", spec.router_bias)
    if spec.correction_bias:
        rows.append(Rename(f"{hf}.{router}.e_score_correction_bias", f"{native}.router.correction_bias"))
    rows += expert_rows(f"{hf}.experts", f"{native}.experts", layout=layout, bias=spec.bias)
    if spec.shared is not None:
        rows += mlp_rows(spec.shared.feed_forward, f"{hf}.{shared}", f"{native}.shared_experts")
        if spec.shared.output_gate:
            rows += linear_rows(f"{hf}.{shared}_gate", f"{native}.shared_gate", False)
    return rows


def layer_ranges(config: TransformerConfig) -> dict[str, Sequence[int]]:
    """What the placeholders range over: `layer` all layers, `dense` and `moe` those with such a feed-forward part,
    and `expert` the experts of a mixture."""
    mixtures = config.moe_specs()
    num_experts = alike(mixtures, ("num_experts",)).num_experts if mixtures else 0
    return {
        "layer": range(config.num_layers),
        "dense": list(config.dense_specs()),
        "moe": list(mixtures),
        "expert": range(num_experts),
    }
