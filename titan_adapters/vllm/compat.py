"""What differs between the supported vLLM versions (0.26 to 0.32), in one place."""

import importlib.util
from typing import Any

import torch
from torch import nn

from titan_adapters.config import TransformerConfig, layers_by_value


def platform_problems(config: TransformerConfig) -> list[str]:
    """What vLLM's attention on this platform can't do for this model, found without building anything.

    On the CPU an unsupported head size would fail only at the first forward. On other platforms vLLM itself selects
    a backend for each layer when the model is built, before weights are read, and says why if there is none.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported = CPUAttentionBackend.get_supported_head_sizes()
    wider = [  # the smaller of the two is filled up
        ("head_dim", spec.head_dim) if spec.head_dim >= spec.v_head_dim else ("v_head_dim", spec.v_head_dim)
        for spec in config.attention_specs()
    ]
    unsupported = ((size, layer) for layer, size in enumerate(wider) if size[1] not in supported)
    return [
        f"{name} {size} of layers {ids} is not supported by vLLM's CPU attention (supported: {supported})"
        for (name, size), ids in layers_by_value(unsupported).items()
    ]


def sinks_dtype() -> torch.dtype:
    """What to hold sinks in, where torch's default is the served dtype.

    At the first forward, vLLM's CPU attention replaces fp16 sinks by a copy in fp32, which no reload would reach.
    """
    from vllm.platforms import current_platform

    served = torch.get_default_dtype()
    return torch.float32 if served == torch.float16 and current_platform.is_cpu() else served


def multiprocess_engine() -> bool:
    """Whether vLLM will run the engine in a process of its own."""
    from vllm import envs

    return envs.VLLM_ENABLE_V1_MULTIPROCESSING


def keeps_packed_copy(module: nn.Module) -> bool:
    """Whether `module` computes with repacked weights: on the CPU linears, everywhere fused experts, after loading."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if isinstance(module, RoutedExperts):
        return module.quant_method.moe_kernel is not None
    return hasattr(module, "cpu_linear")


def forget_repacking(module: nn.Module) -> None:
    """Let `module`, which is being reloaded, repack its new weights too.

    On the CPU, vLLM's fused experts repack weights only when they build their kernel, which they do once: after a
    reload they would read the new weights in the wrong layout.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.platforms import current_platform

    if isinstance(module, RoutedExperts) and current_platform.is_cpu():
        module.quant_method.moe_kernel = None


def choice_is_hidden() -> bool:
    """Whether vLLM's CPU kernel of fused experts also chooses them, so that nobody sees which; gone by 0.32."""
    from vllm.platforms import current_platform

    legacy = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
    return current_platform.is_cpu() and importlib.util.find_spec(legacy) is not None


def fused_moe(**options: Any) -> nn.Module:
    """vLLM's fused experts with their routing; called as `runner(x [T, D], router_logits)`."""
    from vllm.model_executor.layers.fused_moe import layer

    # Renamed in 0.32.
    factory = vars(layer).get("FusedMoEFactory") or vars(layer)["FusedMoE"]
    return factory(**options)
