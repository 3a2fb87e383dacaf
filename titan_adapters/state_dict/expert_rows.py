"""Row lists for the experts of a mixture, in every layout that they are published in.

Shapes: E experts, F an expert's hidden dim, D model dim.
"""

from dataclasses import dataclass
from typing import Literal

from titan_adapters.state_dict.fused import split_gate_up
from titan_adapters.state_dict.ops import Transpose
from titan_adapters.state_dict.rows import Rename, Row, Stack


@dataclass(frozen=True, kw_only=True)
class PerExpert:
    """One tensor per expert and projection, `{hf}.{expert}.{name}.weight` (and `.bias`): [F, D], down [D, F].

    Mixtral, Qwen-MoE, OLMoE, GLM-4-MoE and DeepSeek on disk; transformers 5 stacks them when it loads them (its
    `conversion_mapping.py`).

    Args:
        gate: Name of the gate projection, such as "gate_proj" or "w1"; None for ungated experts.
        up: The same of the up projection, such as "up_proj" or "w3".
        down: The same of the down projection, such as "down_proj" or "w2".
    """

    gate: str | None
    up: str
    down: str


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """`{hf}.gate_up_proj` and `{hf}.down_proj` for all experts (and `..._bias`: [E, 2F] and [E, D]).

    gpt-oss: order "gate_up", interleaved, both transposed. Llama 4: the same, not interleaved. Most others are held so
    only in memory, by transformers 5: order "gate_up", not interleaved, not transposed.

    Args:
        hidden_dim: F.
        order: What comes first along 2F. "up" for ungated experts: the tensor is then called `up_proj`, and has F.
        interleaved: Gate and up alternate along 2F: 2i is entry i of what `order` names first, 2i + 1 of the second.
        gate_up_transposed: gate_up_proj is [E, D, 2F] and not [E, 2F, D].
        down_transposed: down_proj is [E, F, D] and not [E, D, F].
    """

    hidden_dim: int
    order: Literal["gate_up", "up_gate", "up"]
    interleaved: bool
    gate_up_transposed: bool
    down_transposed: bool


def expert_rows(hf: str, native: str, *, layout: PerExpert | StackedExperts, bias: bool) -> list[Row]:
    """Experts to `{native}.w1` (gate) and `.w3` (up) [E, F, D], `.w2` (down) [E, D, F].

    With `bias` also `.b1` and `.b3` [E, F] and `.b2` [E, D]. Ungated experts have no `.w3` and `.b3`: w1 is the up
    projection. `PerExpert` needs a range for the placeholder `expert`.

    Args:
        hf: Prefix of the published names, such as "model.layers.{layer}.mlp.experts".
        native: Prefix of ours, such as "layers.{layer}.moe.experts".

    Raises:
        StateDictError: unknown order; on conversion, lengths other than F.
    """
    if isinstance(layout, PerExpert):
        return _per_expert_rows(hf, native, layout, bias)
    return _stacked_rows(hf, native, layout, bias)


def _per_expert_rows(hf: str, native: str, layout: PerExpert, bias: bool) -> list[Row]:
    names = {"1": layout.up} if layout.gate is None else {"1": layout.gate, "3": layout.up}
    kinds = {"w": "weight", "b": "bias"} if bias else {"w": "weight"}
    return [
        Stack(f"{hf}.{{expert}}.{theirs}.{kind}", f"{native}.{letter}{number}", over="expert")
        for number, theirs in (names | {"2": layout.down}).items()
        for letter, kind in kinds.items()
    ]


def _stacked_rows(hf: str, native: str, layout: StackedExperts, bias: bool) -> list[Row]:
    gated = layout.order != "up"
    published = f"{hf}.gate_up_proj" if gated else f"{hf}.up_proj"

    def cut(suffix: str, letter: str, *ops: Transpose) -> Row:
        parts = {"gate": f"{native}.{letter}1", "up": f"{native}.{letter}3"} if gated else {"up": f"{native}.{letter}1"}
        return split_gate_up(
            published + suffix,
            parts,
            *ops,
            order=layout.order,
            interleaved=layout.interleaved,
            hidden_dim=layout.hidden_dim,
            dim=1,
        )

    rows = [
        cut("", "w", *((Transpose(),) if layout.gate_up_transposed else ())),
        Rename(f"{hf}.down_proj", f"{native}.w2", *((Transpose(),) if layout.down_transposed else ())),
    ]
    if bias:
        rows += [cut("_bias", "b"), Rename(f"{hf}.down_proj_bias", f"{native}.b2")]
    return rows
