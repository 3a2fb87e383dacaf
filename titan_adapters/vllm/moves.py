"""Where native weights are in a swapped model, and memory for what stayed the author's."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import EngineError
from titan_adapters.vllm.moe import ExpertShard, write_experts
from titan_adapters.vllm.stage import Elsewhere


@dataclass(frozen=True)
class ReplicatedHeads:
    """Each of `num_heads` heads is on `replicas` ranks in a row, so the loader is given it as often."""

    num_heads: int
    replicas: int

    def repeat(self, whole: Tensor) -> Tensor:
        return whole.unflatten(0, (self.num_heads, -1)).repeat_interleave(self.replicas, 0).flatten(0, 1)


Shard = str | int | ExpertShard | ReplicatedHeads | None
"""Which part of a packed engine parameter a native one is, or how its heads are spread."""


@dataclass
class Swap:
    """An author's model whose planned modules have become vLLM's, and where its native weights went."""

    model: BaseTransformer
    moved: dict[str, tuple[str, Shard]] = field(default_factory=dict)
    """Native module path -> (engine module path, shard of a packed parameter or None)."""
    moved_parameters: dict[str, tuple[str, Shard]] = field(default_factory=dict)
    """The same for single parameters: native name -> (engine name, shard)."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Engine parameter name -> another name under which the same parameter serves."""
    moe_paths: dict[str, list[str]] = field(default_factory=dict)
    """How mixtures are computed, in words -> their paths."""

    def target(self, native: str) -> tuple[str, Shard]:
        """Engine parameter name, relative to the model, and packed shard, of a native parameter name."""
        if native in self.moved_parameters:
            return self.moved_parameters[native]
        module, _, kind = native.rpartition(".")
        path, shard = self.moved.get(module, (module, None))
        return (f"{path}.{kind}" if path else kind), shard

    def is_elsewhere(self, native: str) -> bool:
        """Whether another pipeline stage has this native parameter."""
        return any(native.startswith(f"{path}.") for path in self._elsewhere)

    @cached_property
    def _elsewhere(self) -> list[str]:
        return [path for path, module in self.model.named_modules() if isinstance(module, Elsewhere)]

    def by_module(self, natives: Iterable[str]) -> dict[str, list[str]]:
        """`natives` by the path of the engine module that they went into."""
        found: dict[str, list[str]] = {}
        for native in natives:
            found.setdefault(self.target(native)[0].rpartition(".")[0], []).append(native)
        return found


def moved_feed_forward(native: str, engine: str) -> dict[str, tuple[str, Shard]]:
    """Where the linears of the `FeedForward` at `native` are in the `EngineFeedForward` at `engine`."""
    return {
        f"{native}.w1": (f"{engine}.w13", 0),
        f"{native}.w3": (f"{engine}.w13", 1),
        f"{native}.w2": (f"{engine}.w2", None),
    }


def write_one(parameter: Tensor, name: str, tensor: Tensor, shard: Shard) -> bool:
    """Write a native `tensor` into engine parameter `name` through its own loader; whether any is this rank's."""
    if isinstance(shard, ExpertShard):
        return write_experts(parameter, name, tensor, shard)
    loader: Callable[..., None] = getattr(parameter, "weight_loader", default_weight_loader)
    if shard is None:
        loader(parameter, tensor)
    elif isinstance(shard, ReplicatedHeads):
        loader(parameter, shard.repeat(tensor))
    else:
        loader(parameter, tensor, shard)
    return True


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory, NaN until loaded, and let buffers rebuild themselves on `device`."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.full_like(parameter, float("nan"), device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        buffers = dict(module.named_buffers(recurse=False))
        if any(buffer.is_meta for buffer in buffers.values()):
            module._apply(lambda t: torch.full_like(t, float("nan"), device=device) if t.is_meta else t, recurse=False)
            lost = [
                name
                for name, buffer in module.named_buffers(recurse=False)
                if name in module._non_persistent_buffers_set and buffer.is_floating_point() and _is_all_nan(buffer)
            ]
            if lost:
                raise EngineError(
                    f"{path}: non-persistent buffers {lost} are computed in __init__, which runs on the meta device.",
                    fix="recompute them in _apply, as titan_adapters.nn.Rope does, or make them persistent.",
                )


def _is_all_nan(tensor: Tensor) -> bool:
    """Tables of long contexts are large, and one number shows that they were computed."""
    return bool(tensor[(0,) * tensor.ndim].isnan()) and bool(tensor.isnan().all()) if tensor.numel() else False
