"""Sequence parallelism (arXiv:2205.05198): between the parts that "tp" splits, each rank has some of the tokens.

Shapes: B rows  S tokens of a row  D model dim  tp ranks of "tp". Rank-local: S / tp.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import PlanError
from titan_adapters.parallel.collectives import Parts


class TokenSplit:
    """Which tokens of the present forward pass are whose: of each row, every rank has as many, or one more.

    Any number of tokens can be split; ranks may be left without.
    """

    def __init__(self, tp: ProcessGroup):
        self._tp = tp
        self._shape = torch.Size()

    def attach(self, model: BaseTransformer) -> None:
        """Learn the tokens' shape from what `model` is called with, and from each layer, which may be run again."""
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.register_forward_hook(self._after_model)
        for layer in model.layers:
            layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)

    def own(self, x: Tensor) -> Parts:
        """How to exchange this rank's tokens [B, S / tp, D], [S / tp, D], or [B * S / tp, D]."""
        parts = self._parts(x)
        self._check(x, parts.dim, parts.sizes[self._tp.rank()])
        return parts

    def all(self, x: Tensor) -> Parts:
        """How to exchange all tokens [B, S, D], [S, D], or [B * S, D] with rank after rank."""
        parts = self._parts(x)
        self._check(x, parts.dim, sum(parts.sizes))
        return parts

    def _parts(self, x: Tensor) -> Parts:
        each, more = divmod(self._shape[-1], self._tp.size())
        sizes = [each + (rank < more) for rank in range(self._tp.size())]
        if x.dim() == 2:  # whatever the order of flattened rows, what is gathered comes back the same way
            rows = self._shape[:-1].numel()
            return Parts(self._tp, 0, [size * rows for size in sizes])
        return Parts(self._tp, len(self._shape) - 1, sizes)

    def _check(self, x: Tensor, dim: int, wanted: int) -> None:
        if x.dim() <= dim or x.shape[dim] != wanted:
            raise PlanError(
                f"Activations of shape {tuple(x.shape)} are not those of {wanted} of the tokens {tuple(self._shape)}.",
                fix="keep the tokens' dims as they are between layers' halves, or leave out sequence_parallel.",
            )

    def _before_model(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._shape = (args[0] if args else kwargs["tokens"]).shape

    def _before_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._shape = (args[1] if len(args) > 1 else kwargs["seq"]).positions.shape

    def _after_model(self, model: nn.Module, args: Any, logits: Tensor) -> None:
        self._check(logits, len(self._shape) - 1, self._shape[-1])
