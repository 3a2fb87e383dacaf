"""One hash per parameter, which does not depend on how the parameter is split.

Each element contributes `mix(bits, index in the whole tensor)` modulo 2^64, in two lanes with constants of their own,
and contributions are added. So the parts of a tensor can be hashed where they are, in any order, and their sums added.
mix is the finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection.

What that is worth: any change of a single element changes both lanes. A swap, a permutation or any other accident goes
unnoticed with a chance of about 2^-128. It is no cryptographic hash: whoever wants two tensors to collide can do that.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from titan_adapters.checkpoint.api import checked_weights, stored_dtypes
from titan_adapters.checkpoint.identity import read_identity
from titan_adapters.checkpoint.sharded import own_class, whole_tensors
from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import CheckpointError
from titan_adapters.state_dict import native_tensors

UNKNOWN = "unknown: "
"""What an entry starts with that is no fingerprint but says why there is none. It equals nothing."""

_LANES = (
    (-0x61C8864680B583EB, -0x4B47D0C5E7E4B4A5, 0x1B873593CC9E2D51),
    (-0x3D4D51C2D82B14B1, 0x27D4EB2F165667C5, -0x2AB32D5C9A3B1F67),
)
"""Of each lane the odd factors of bits and index, and what is added."""
_PLACES_LANE = (0, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sums(NamedTuple):
    """What some elements of a tensor add to its hash; integers modulo 2^64, in the range of int64."""

    numel: int = 0
    places: int = 0
    """Over their indices alone: which elements these are."""
    first: int = 0
    second: int = 0

    def __add__(self, other: "Sums") -> "Sums":  # type: ignore[override]
        return Sums(self.numel + other.numel, *(_wrap(a + b) for a, b in zip(self[1:], other[1:], strict=True)))


def _wrap(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def chunk_length(device: torch.device) -> int:
    """Elements to hash at once: few enough for a CPU's cache, enough to keep an accelerator busy."""
    return 1 << 15 if device.type == "cpu" else 1 << 22


def element_sums(values: Tensor, indices: Tensor) -> Sums:
    """The sums of `values` (any dtype but complex), which are at `indices` (int64, same shape) of the whole tensor.

    Zero of either sign counts as the same: a product with a one-hot row, by which some engines have to be asked for
    their weights, does not keep it.
    """
    if values.is_floating_point() and values.dtype.itemsize > 1:
        values = values + 0.0
    bits = values.view(_BITS[values.dtype.itemsize]) if values.dtype != torch.bool else values
    bits = bits.to(torch.int64)
    lanes = [_mixed_sum(indices, *_PLACES_LANE[1:])] + [_mixed_sum(indices, b, c, bits * a) for a, b, c in _LANES]
    return Sums(values.numel(), *torch.stack(lanes).tolist())


def _mixed_sum(indices: Tensor, factor: int, added: int, bits: Tensor | int = 0) -> Tensor:
    x = indices * factor
    x += bits
    x += added
    shifted = torch.empty_like(x)
    for shift, multiplier in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        shifted &= (1 << 64 - shift) - 1  # torch's shift repeats the sign
        x ^= shifted
        x *= multiplier
    return x.sum()


@lru_cache(maxsize=256)
def places_sum(numel: int) -> int:
    """The `places` sum of a whole tensor. Layers repeat sizes, hence the cache."""
    total, step = 0, chunk_length(torch.device("cpu"))
    for start in range(0, numel, step):
        chunk = torch.arange(start, min(start + step, numel))
        total += int(_mixed_sum(chunk, *_PLACES_LANE[1:]))
    return _wrap(total)


def tensor_sums(tensor: Tensor, dtype: torch.dtype | None = None) -> Sums:
    """The sums of a whole tensor, where it is, cast to `dtype`, a chunk at a time."""
    flat, sums = tensor.detach().reshape(-1), Sums()
    step = chunk_length(flat.device)
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step].to(dtype or flat.dtype)
        sums += element_sums(chunk, torch.arange(start, start + chunk.numel(), device=flat.device))
    return sums


def dtype_name(dtype: torch.dtype | str) -> str:
    """As configs write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def render(dtype: torch.dtype | str, shape: Sequence[int], sums: Sums) -> str:
    """A fingerprint in writing: `bfloat16[96,48] ` and 32 hexadecimal digits."""
    digits = "".join(f"{lane % 2**64:016x}" for lane in (sums.first, sums.second))
    return f"{dtype_name(dtype)}[{','.join(map(str, shape))}] {digits}"


def fingerprint(source: BaseTransformer | str | Path, *, dtype: torch.dtype | None = None) -> dict[str, str]:
    """A hash of every parameter and persistent buffer, by native name; of tied names, the first.

    It says dtype, shape and content, and is the same however a parameter is split, saved or named in files. All ranks
    of a parallel model must call this; one whole tensor at a time is gathered.

    Args:
        source: A model, or a checkpoint folder of any format, which is read one tensor at a time through its rows.
        dtype: Cast first, as a checkpoint of a config with this dtype would be: what its modules keep in fp32 stays
            so. Compare a trainer's fp32 model with an engine that serves it in bf16 by `dtype=torch.bfloat16`.
            Default: a model as it is, a folder as its config says.

    Raises:
        CheckpointError: the model is on the meta device, or the folder is damaged.
        StateDictError: the folder does not fit its model.
    """
    if isinstance(source, BaseTransformer):
        tensors = native_tensors(source)
        if meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise CheckpointError("Weights on the meta device have no values.", meta, fix="load the model first.")
        wanted = {name: tensor.dtype for name, tensor in tensors.items()}
        if dtype is not None:
            # A head that the config wants tied, and is not, is in no such checkpoint, but belongs into a comparison.
            wanted = dict.fromkeys(tensors, dtype) | served_dtypes(own_class(source), source.config, dtype)
        rows = whole_tensors(tensors)
    else:
        identity = read_identity(source)
        weights, adapter, _ = checked_weights(identity, source)
        wanted = served_dtypes(identity.model, identity.config, dtype)
        rows = adapter.session("to_native").convert(weights.tensors(), partial=False)
    found = {name: render(wanted[name], tensor.shape, tensor_sums(tensor, wanted[name])) for name, tensor in rows}
    return dict(sorted(found.items()))


def served_dtypes(
    model: type[BaseTransformer], config: TransformerConfig, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype of each native tensor in a checkpoint of `config`, with another `dtype` if one is given."""
    if dtype is not None:
        config = type(config).from_json(config.to_json() | {"dtype": dtype_name(dtype)})
    return stored_dtypes(model, config)


def fingerprint_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Parameters that are not proven equal, one line each, by name; empty if all are."""
    absent = "not there"
    lines = []
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name, absent), theirs.get(name, absent)
        if a != b or a.startswith(UNKNOWN):
            lines.append(f"{name}: {a} against {b}")
    return lines


def total(fingerprints: Mapping[str, str]) -> str:
    """One hash over all names and fingerprints: 32 hexadecimal digits."""
    text = "\n".join(f"{name} {entry}" for name, entry in sorted(fingerprints.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
