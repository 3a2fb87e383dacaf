"""Mixtures of experts in the engine: vLLM's fused kernels where they compute the same function, else the torch path.

Shapes: T tokens of a step  D model dim  E experts  K chosen experts per token.
"""

import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform

from titan_adapters.errors import EngineError
from titan_adapters.moe_spec import ClampedSwiGLU, MoESpec
from titan_adapters.nn import InnerExperts, MoE, Routing, choose_experts
from titan_adapters.vllm.compat import choice_is_hidden, fused_moe
from titan_adapters.vllm.layers import local_parameter

Path = Literal["auto", "fused", "torch"]
Projection = Literal["w1", "w2", "w3"]
OPTION = "titan_experts"
"""Key of vLLM's `additional_config`: "auto", "fused" (refuse what has no fused kernel) or "torch"."""

TUNED = pathlib.Path(__file__).with_name("tuned")
"""Tiles for the Triton kernel, of shapes that vLLM has no file for; see `benchmarks/tune_experts.py`."""

GPT_OSS = ClampedSwiGLU(alpha=1.702, limit=7.0)


@dataclass(frozen=True)
class ExpertShard:
    """Which projection of a fused parameter a native tensor is, and of which expert; None: of all, [E, ...]."""

    projection: Projection
    expert: int | None = None


def requested_path(vllm_config: VllmConfig) -> Path:
    """What the user asked for in `additional_config`."""
    given = vllm_config.additional_config
    path = given.get(OPTION, "auto") if isinstance(given, dict) else "auto"
    if path not in get_args(Path):
        raise EngineError(f"additional_config[{OPTION!r}] is {path!r}.", fix=f"use one of {', '.join(get_args(Path))}.")
    return cast(Path, path)


def native_routing(spec: MoESpec) -> dict[str, Any] | None:
    """Arguments with which vLLM's own router computes `spec`; None if it has none that does."""
    deepseek = spec.correction_bias and (spec.groups is None or spec.groups.score == "top2_sum")
    # On the CPU vLLM leaves out the guard against sigmoids that are all zero.
    if spec.score == "sigmoid" and deepseek and not current_platform.is_cpu():
        groups = (1, 1) if spec.groups is None else (spec.groups.num_groups, spec.groups.top_groups)
        return {
            "use_grouped_topk": True,
            "num_expert_group": groups[0],
            "topk_group": groups[1],
            "scoring_func": "sigmoid",
            "renormalize": spec.renormalize,
            "routed_scaling_factor": spec.scaling_factor,
        }
    if spec.score != "sigmoid" and not spec.correction_bias and spec.groups is None and spec.scaling_factor == 1.0:
        # A softmax over the chosen logits is the softmax over all, renormalised.
        return {"scoring_func": "softmax", "renormalize": spec.renormalize or spec.score == "softmax_of_top_k"}
    return None


def expert_options(spec: MoESpec) -> dict[str, Any]:
    """Arguments for vLLM's fused experts.

    Raises:
        ValueError: no fused kernel computes these experts; says why.
    """
    options: dict[str, Any] = {
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "intermediate_size": spec.hidden_dim,
        "has_bias": spec.bias,
    }
    if not spec.gated:
        raise ValueError("vLLM's fused experts are gated")
    if spec.weighs == "input":
        if spec.top_k != 1:
            raise ValueError("vLLM's fused experts weigh the input for top_k = 1 only")
        options["apply_router_weight_on_input"] = True
    if not isinstance(spec.activation, ClampedSwiGLU):
        options["activation"] = spec.activation
    elif not current_platform.is_cpu():
        options |= {"activation": "swigluoai_uninterleave", "swiglu_beta": 1.0}
        options |= {"swiglu_alpha": spec.activation.alpha, "swiglu_limit": spec.activation.limit}
    elif spec.activation == GPT_OSS:
        options["activation"] = "swigluoai"  # both numbers are in the kernel
    else:
        raise ValueError(f"vLLM's CPU kernel has ClampedSwiGLU with {GPT_OSS} only")
    return options


def fused_experts(**options: Any) -> nn.Module:
    """vLLM's fused experts, with loaders of our own for what vLLM's does not load, or not as the kernel reads it.

    Raises:
        ValueError: expert parallelism on the CPU, where vLLM's kernel crashes the process; a kernel that also routes.
    """
    if choice_is_hidden():
        raise ValueError("vLLM's CPU kernel of this version chooses the experts itself")
    if get_current_vllm_config().parallel_config.enable_expert_parallel and current_platform.is_cpu():
        raise ValueError("vLLM's CPU kernel does not run under expert parallelism")
    if current_platform.is_cuda():
        os.environ.setdefault("VLLM_TUNED_CONFIG_FOLDER", str(TUNED))
    runner = fused_moe(**options)
    experts, interleaved = runner.routed_experts, options.get("activation") == "swigluoai"
    assert isinstance(experts, RoutedExperts)
    for name, parameter in experts.named_parameters():
        # vLLM 0.26 leaves biases as they are, and says nothing.
        if name.endswith("bias") or (interleaved and name.startswith("w13")):
            vars(parameter)["weight_loader"] = _own_loader(experts, interleaved)
    return runner


def _own_loader(experts: RoutedExperts, interleaved: bool) -> Callable[..., bool]:
    """In place of vLLM's loader, for one expert's w13_weight, w13_bias or w2_bias.

    Args:
        interleaved: The kernel wants w1 and w3 row by row in turn, not one above the other.
    """

    def load(
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: Projection,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        local, rank = experts._map_global_expert_id_to_local_expert_id(expert_id), experts.moe_config.tp_rank
        if local < 0:
            return False
        if shard_id == "w2":  # a bias: added before the sum over ranks, so all but the first add zeros
            param.data[local] = loaded_weight if rank == 0 else 0
            return True
        width = param.shape[1] // 2
        if interleaved:
            rows = slice(0 if shard_id == "w1" else 1, None, 2)
        else:
            rows = slice(0, width) if shard_id == "w1" else slice(width, None)
        param.data[local, rows] = loaded_weight.narrow(0, rank * width, width)
        return True

    return load


class EngineMoE(nn.Module):
    """`MoE` over vLLM's fused experts, with vLLM's routing if it is the same function, else with ours.

    Raises:
        ValueError: no fused kernel computes this mixture; says why.
    """

    def __init__(self, module: MoE, path: str, shared: nn.Module | None):
        super().__init__()
        spec = module.spec
        self.router = module.router
        self.shared = shared
        routing = native_routing(spec)
        # vLLM's softmax kernel reads the model's dtype and computes in fp32. On the CPU it would compute in that dtype.
        self.rounded_logits = (
            routing is not None
            and routing["scoring_func"] == "softmax"
            and spec.router_dtype == "model"
            and not current_platform.is_cpu()
        )
        if routing is None:
            routing = {"custom_routing_function": self._choose}
        elif spec.correction_bias:
            routing["e_score_correction_bias"] = self.router.correction_bias
        self.runner = fused_experts(
            hidden_size=module.experts.w1.shape[-1],
            prefix=f"{path}.experts",
            shared_experts=shared,
            router_logits_dtype=None if self.rounded_logits else torch.float32,
            **expert_options(spec),
            **routing,
        )

    @property
    def vllm_router(self) -> BaseRouter:
        router = self.runner.router
        assert isinstance(router, BaseRouter)
        return router

    def _choose(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        experts, weights = choose_experts(self.router.spec, gating_output, self.router.correction_bias)
        return _for_kernels(experts, weights)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.runner(x_TD, (self.router.gate if self.rounded_logits else self.router.logits)(x_TD))


class EngineExperts(nn.Module):
    """`InnerExperts` of a mixture whose router or block is the author's own, over vLLM's fused experts.

    Raises:
        ValueError: no fused kernel computes these experts; says why.
    """

    def __init__(self, module: InnerExperts, path: str):
        super().__init__()
        self.runner = fused_experts(
            hidden_size=module.w1.shape[-1],
            prefix=path,
            router_logits_dtype=torch.float32,
            custom_routing_function=_unpack_routing,
            **expert_options(module.spec),
        )

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        # The choice travels in place of the logits. Indices are exact in fp32.
        return self.runner(x_TD, torch.cat([routing.weights, routing.experts.float()], dim=-1))


def _loading_zeros(loader: Callable[..., None]) -> Callable[..., None]:
    def load(param: Tensor, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> None:
        loader(param, torch.zeros_like(loaded_weight), *args, **kwargs)

    return load


class ShardedExperts(nn.Module):
    """`InnerExperts` in torch over tensor-parallel ranks, each of which has whole experts, or a part of every one.

    Args:
        module: The experts of all ranks, on the meta device.
        whole_experts: Expert parallelism: rank r has the r-th E / ranks experts. Otherwise their width F is split.
    """

    def __init__(self, module: InnerExperts, device: torch.device, *, whole_experts: bool):
        super().__init__()
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        spec, dim = module.spec, module.w1.shape[-1]
        field = "num_experts" if whole_experts else "hidden_dim"
        size = getattr(spec, field) // ranks
        self.first_expert = rank * size if whole_experts else 0
        with torch.device("meta"):
            self.local = InnerExperts(dim, spec.model_copy(update={field: size}))
        self.local.use_static_kernel()
        self.local.partial = whole_experts
        for name, meta in list(self.local.named_parameters()):
            dim_split = 0 if whole_experts else {"w2": 2}.get(name, 1)
            parameter = local_parameter(tuple(meta.shape), dim_split, rank, meta.dtype, device)
            if name == "b2" and not whole_experts:  # not split, and added before the sum over ranks
                loader = _loading_zeros(default_weight_loader) if rank else default_weight_loader
                vars(parameter)["weight_loader"] = loader
            setattr(self.local, name, parameter)

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        if self.first_expert:
            routing = routing._replace(experts=routing.experts - self.first_expert)
        return tensor_model_parallel_all_reduce(self.local(x_TD, routing))


def _unpack_routing(
    hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    weights, experts = gating_output.chunk(2, dim=-1)
    return _for_kernels(experts, weights)


def _for_kernels(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The choice as vLLM's kernels take it: they read [T, K] row after row, whatever the strides."""
    return weights.contiguous(), experts.to(torch.int32).contiguous()


class EngineSharedExperts(nn.Module):
    """Shared experts behind their gate."""

    def __init__(self, feed_forward: nn.Module, gate: nn.Linear):
        super().__init__()
        self.feed_forward = feed_forward
        self.gate = gate

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.feed_forward(x_TD) * self.gate(x_TD).sigmoid()


def moved_experts(native: str, engine: str, spec: MoESpec) -> dict[str, tuple[str, ExpertShard]]:
    """Where the native tensors under `native` (the path of an `InnerExperts`) went in `engine` (that of a runner)."""
    kinds = {"w": "weight", "b": "bias"} if spec.bias else {"w": "weight"}
    packed: dict[Projection, str] = {"w1": "w13", "w2": "w2", "w3": "w13"}
    return {
        f"{native}.{letter}{projection[1]}": (f"{engine}.routed_experts.{name}_{kind}", ExpertShard(projection))
        for letter, kind in kinds.items()
        for projection, name in packed.items()
    }


def write_experts(parameter: Tensor, name: str, tensor: Tensor, shard: ExpertShard) -> bool:
    """Write a native tensor through vLLM's loader, which knows each rank's experts and slices.

    Returns whether this rank has any of it.
    """
    loader: Callable[..., bool | None] = vars(parameter)["weight_loader"]
    experts = enumerate(tensor) if shard.expert is None else [(shard.expert, tensor)]
    written = [
        loader(parameter, weight, name, shard_id=shard.projection, expert_id=expert, return_success=True)
        for expert, weight in experts
    ]
    return any(done is not False for done in written)  # None: put off, in a reload
