"""The second row table: state dicts of torchtitan 0.3.0, whose names are native but for a few in mixtures and sinks.

Shapes: E experts, F an expert's hidden dim, G = 2F, D model dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, float32

from titan_adapters.errors import StateDictError
from titan_adapters.moe_spec import ClampedSwiGLU, MoESpec
from titan_adapters.state_dict.adapter import StateDictAdapter, native_adapter
from titan_adapters.state_dict.fused import split_gate_up
from titan_adapters.state_dict.rows import Binding, Ranges, Rename, Row, fills, set_fields

if TYPE_CHECKING:
    from titan_adapters.contract import BaseTransformer


def torchtitan_adapter(model: "BaseTransformer", *, expert_bias: bool = True) -> StateDictAdapter:
    """The table between `model` and a torchtitan model of the same architecture, the latter in the place of "hf".

    `model.load_state_dict(torchtitan_adapter(model).to_native(theirs))`, with `strict=False` if the head is tied, whose
    alias is not written. The config must say what their model computes: its rope layout is not in the names (Llama 3's
    is interleaved, Qwen 3's and gpt-oss's half). Their experts always compute in bf16, ours in the model's dtype.

    Args:
        expert_bias: Whether their mixtures have a load-balancing bias, which is their default (`load_balance_coeff`).
            Where ours has no correction bias it must be zero, and is written as zeros.

    Raises:
        StateDictError: on conversion, such a bias that is not zero.
    """
    config = model.config
    rows = [
        row for layer, spec in config.moe_specs().items() for row in _moe_rows(f"layers.{layer}", spec, expert_bias)
    ]
    for layer, spec in enumerate(config.attention_specs()):
        if spec.sinks:
            sinks = f"layers.{layer}.attention.sinks"
            rows.append(Rename(sinks, f"layers.{layer}.attention.inner_attention.sinks"))
    renamed = {name for row in rows for binding in row.bindings({}) for name in binding.native}
    same = [b.row for b in native_adapter(model).bindings if not renamed.intersection(b.native)]
    return StateDictAdapter(*same, *rows)


def _moe_rows(layer: str, spec: MoESpec, expert_bias: bool) -> list[Row]:
    theirs, experts, router = f"{layer}.moe.routed_experts.inner_experts", f"{layer}.moe.experts", f"{layer}.moe.router"
    bias = f"{layer}.moe.expert_bias_E"
    rows: list[Row] = []
    if spec.correction_bias:
        rows.append(Rename(bias, f"{router}.correction_bias"))
    elif expert_bias:
        rows.append(ZeroBias(f"{router}.gate.weight", bias, f"{router}.gate.weight"))
    if not isinstance(spec.activation, ClampedSwiGLU):
        shapes = {"w1": "EFD", "w2": "EDF"} | ({"w3": "EFD"} if spec.gated else {})
        return rows + [Rename(f"{theirs}.{name}_{shape}", f"{experts}.{name}") for name, shape in shapes.items()]
    # gpt-oss: [E, G, D], gate and up alternate row by row, as published.
    letters = {"w": ("weight_EGD", "weight_EDF")} | ({"b": ("bias_EG", "bias_ED")} if spec.bias else {})
    for letter, (first, second) in letters.items():
        parts = {"gate": f"{experts}.{letter}1", "up": f"{experts}.{letter}3"}
        rows += [
            split_gate_up(
                f"{theirs}.mlp1_{first}",
                parts,
                order="gate_up",
                interleaved=True,
                hidden_dim=spec.hidden_dim,
                dim=1,
            ),
            Rename(f"{theirs}.mlp2_{second}", f"{experts}.{letter}2"),
        ]
    return rows


@dataclass(frozen=True, init=False, kw_only=True)
class ZeroBias(Row):
    """A router's gate [E, D], next to a load-balancing bias [E] that our model has no place for and that must be 0."""

    hf: str
    bias: str
    native: str

    def __init__(self, hf: str, bias: str, native: str):
        set_fields(self, hf=hf, bias=bias, native=native, ops=())

    def bindings(self, ranges: Ranges) -> Iterator[Binding]:
        for fill in fills([self.hf, self.bias, self.native], ranges):
            yield Binding(self, (self.hf.format(**fill), self.bias.format(**fill)), (self.native.format(**fill),))

    def to_native(self, tensors: list[Tensor]) -> list[Tensor]:
        gate, bias = tensors
        if not bias.is_meta and bias.any():
            raise StateDictError(
                f"{self.bias} takes part in torchtitan's choice of experts, and this model has no such bias.",
                fix="use a config whose MoESpec has correction_bias=True, or train without load_balance_coeff.",
            )
        return [gate]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        (gate,) = tensors
        return [gate, gate.new_zeros(gate.shape[0], dtype=float32)]
