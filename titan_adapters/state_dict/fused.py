"""Projections that are published as one tensor: query, key and value; gate and up."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan_adapters.errors import StateDictError
from titan_adapters.state_dict.ops import Deinterleave, Op
from titan_adapters.state_dict.rows import Binding, Ranges, Row, Split, fills, set_fields


@dataclass(frozen=True, init=False, kw_only=True)
class FusedQKV(Row):
    """One published tensor (weight or bias) to native q, k and v, cut along dim 0.

    Args:
        native: Names of q, k and v.
        layout: "concat": all query heads, then all key heads, then all value heads. "grouped": for each kv head in
            turn, its query heads, then its key and its value (GPT-NeoX, Falcon, InternLM 2).
    """

    hf: str
    native: tuple[str, ...]
    layout: Literal["concat", "grouped"]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __init__(
        self,
        hf: str,
        native: Sequence[str],
        *,
        layout: Literal["concat", "grouped"],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ):
        if len(native) != 3 or layout not in ("concat", "grouped") or num_heads % num_kv_heads:
            raise StateDictError(
                f"FusedQKV can't cut {hf} into {list(native)}: layout {layout!r}, {num_heads} query heads, "
                f"{num_kv_heads} kv heads.",
                fix="name q, k and v; layout is 'concat' or 'grouped'; num_heads is a multiple of num_kv_heads.",
            )
        set_fields(self, hf=hf, native=tuple(native), layout=layout, ops=())
        set_fields(self, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    def bindings(self, ranges: Ranges) -> Iterator[Binding]:
        for fill in fills([self.hf, *self.native], ranges):
            yield Binding(self, (self.hf.format(**fill),), tuple(name.format(**fill) for name in self.native))

    @property
    def rearranges(self) -> bool:
        return self.layout == "grouped"

    @property
    def _groups(self) -> tuple[int, list[int]]:
        """How often the pattern repeats along dim 0, and the rows of q, k and v in each repetition."""
        if self.layout == "concat":
            heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
            return 1, [n * self.head_dim for n in heads]
        return self.num_kv_heads, [n * self.head_dim for n in (self.num_heads // self.num_kv_heads, 1, 1)]

    def to_native(self, tensors: list[Tensor]) -> list[Tensor]:
        groups, sizes = self._groups
        (fused,) = tensors
        if fused.shape[0] != groups * sum(sizes):
            raise StateDictError(
                f"{self}: the tensor has shape {tuple(fused.shape)}.", fix=f"dim 0 must be {groups * sum(sizes)}."
            )
        parts = fused.unflatten(0, (groups, -1)).split(sizes, dim=1)
        return [part.flatten(0, 1) for part in parts]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        groups, sizes = self._groups
        wanted = [groups * size for size in sizes]
        actual = [tensor.shape[0] for tensor in tensors]
        if actual != wanted:
            raise StateDictError(f"{self}: q, k and v have {actual} rows.", fix=f"they must have {wanted}.")
        return [torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], dim=1).flatten(0, 1)]


def split_gate_up(
    hf: str,
    native: Mapping[str, str],
    *ops: Op,
    order: str,
    interleaved: bool,
    hidden_dim: int,
    dim: int = 0,
) -> Split:
    """One published tensor to native gate and up projections, cut along `dim`.

    Args:
        native: Names of "gate" and "up"; of "up" only where there is no gate.
        ops: Applied before the cut.
        order: "gate_up", "up_gate", or "up" where there is no gate.
        interleaved: Entries alternate along `dim`: 2i is entry i of what `order` names first, 2i + 1 of the second.
        hidden_dim: F, the length of each part.
    """
    parts = order.split("_")
    if sorted(parts) != sorted(native):
        raise StateDictError(
            f"{hf} can't be cut in the order {order!r} into {list(native)}.", fix="use 'gate_up', 'up_gate' or 'up'."
        )
    if interleaved:
        ops = (*ops, Deinterleave(len(parts), dim))
    return Split(hf, [native[part] for part in parts], *ops, sizes=[hidden_dim] * len(parts), dim=dim)
