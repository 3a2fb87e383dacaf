"""What the engine computes with, read back: some platforms repack weights after loading."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from titan_adapters.fingerprints import chunk_length
from titan_adapters.vllm.compat import keeps_packed_copy
from titan_adapters.vllm.weight_map import ZERO

ASKED_ROWS = 256
"""Columns of a weight to ask a repacked linear for at once."""

Pieces = Iterator[tuple[Tensor, Tensor]]
"""Values, and the numbers of the same elements in a `ParameterMap`; both flat and of equal length, on one device."""


class NotReadable(Exception):
    """Says why this platform does not show a parameter."""


def held_pieces(module: nn.Module, kind: str, templates: dict[str, Tensor], numbers: Tensor) -> Pieces:
    """The values of parameter `kind` that `module` computes with, in pieces.

    A linear that the CPU has repacked is asked for them: a product with a one-hot row is exact in any dtype. Three
    things show as the layer computes with them, and not as they are held: zero has no sign, bf16's subnormals are zero
    on CPUs whose instructions for it take them so, and NaN or infinity spread over all inputs of their output feature.

    Args:
        templates: The module's parameters as they were loaded, on the meta device, by kind.
        numbers: Of the elements of this one, as it was loaded.

    Raises:
        NotReadable: the layout here is not known.
    """
    if isinstance(module, RoutedExperts):
        numbers = _repacked(module, kind, templates, numbers)
    elif kind == "weight" and keeps_packed_copy(module) and type(module) is not VocabParallelEmbedding:
        yield from _asked(module, templates[kind].dtype, numbers)
        return
    yield from plain_pieces(getattr(module, kind), numbers)


def plain_pieces(tensor: Tensor, numbers: Tensor) -> Pieces:
    """Pieces of a tensor in the layout that `numbers` describe."""
    if tensor.shape != numbers.shape:
        raise NotReadable(f"it is held as {tuple(tensor.shape)}, {tuple(numbers.shape)} was loaded")
    yield from _chunks(tensor.detach(), numbers)


def _chunks(values: Tensor, numbers: Tensor) -> Pieces:
    values, numbers = values.reshape(-1), numbers.reshape(-1)
    step = chunk_length(values.device)
    for start in range(0, values.numel(), step):
        piece = values[start : start + step]
        yield piece, numbers[start : start + step].to(piece.device, torch.int64)


def _asked(linear: Any, dtype: torch.dtype, numbers: Tensor) -> Pieces:
    columns = numbers.shape[1]
    for start in range(0, columns, ASKED_ROWS):
        size = min(ASKED_ROWS, columns - start)
        one_hot = torch.zeros(size, columns, dtype=dtype)
        one_hot[torch.arange(size), start + torch.arange(size)] = 1
        yield from _chunks(linear.quant_method.apply(linear, one_hot, None).T, numbers[:, start : start + size])


def _repacked(experts: RoutedExperts, kind: str, templates: dict[str, Tensor], numbers: Tensor) -> Tensor:
    """`numbers` in the layout in which the kernel of these experts wants them.

    Not by knowing it: element positions go through the function that repacks the weights.
    """
    method = vars(experts.quant_method)
    backend, kernel = method.get("unquantized_backend"), method.get("moe_kernel")
    if backend is None or kernel is None:
        raise NotReadable(f"{type(experts.quant_method).__name__} keeps experts in a layout of its own")
    if backend.name in ("TRITON", "BATCHED_TRITON"):  # as they were loaded
        return numbers
    in_order = torch.arange(1, numbers.numel() + 1)
    positions = in_order.view(numbers.shape)
    if backend.name == "FLASHINFER_CUTLASS":
        if kind.endswith("bias"):
            return numbers
        positions = _converted(experts, backend, kind, positions)
    elif backend.name == "CPU":
        positions = _packed_positions(kernel.fused_experts, kind, templates, positions)
    else:
        raise NotReadable(f"vLLM's {backend.value} kernel keeps experts in a layout of its own")
    if not positions[positions > 0].sort().values.equal(in_order):
        raise NotReadable(f"vLLM's {backend.value} kernel does more than to move the elements of experts")
    moved = torch.cat([torch.tensor([ZERO], dtype=numbers.dtype), numbers.reshape(-1)])  # position 0: filled up
    return moved[positions]


def _converted(experts: RoutedExperts, backend: Any, kind: str, positions: Tensor) -> Tensor:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import convert_to_unquantized_kernel_format

    other = torch.zeros(1, 2, 1, dtype=torch.int64)
    w13, w2 = (positions, other) if kind == "w13_weight" else (other, positions)
    converted = convert_to_unquantized_kernel_format(
        backend, moe_config=experts.moe_config, w13_weight=w13, w2_weight=w2
    )
    return converted[0 if kind == "w13_weight" else 1]


def _packed_positions(kernel: Any, kind: str, templates: dict[str, Tensor], positions: Tensor) -> Tensor:
    """The CPU's repacking takes only weights of the model's dtype: positions travel in their bits, some at a time."""
    bits = 8 * templates[kind].dtype.itemsize
    integers = {16: torch.int16, 32: torch.int32}[bits]
    packed = torch.zeros((), dtype=torch.int64)
    for shift in range(0, positions.numel().bit_length(), bits):
        stand_in = nn.Module()
        for name, template in templates.items():
            weights = torch.zeros(template.shape, dtype=template.dtype)
            if name == kind:
                weights.view(integers).copy_(positions >> shift)
            stand_in.register_parameter(name, nn.Parameter(weights, requires_grad=False))
        kernel.process_weights_after_loading(stand_in)
        found = stand_in.get_parameter(kind).data.view(integers).long() & (1 << bits) - 1
        packed = packed | found << shift
    return packed
