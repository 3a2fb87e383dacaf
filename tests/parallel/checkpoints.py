"""Saving in one layout and loading in another; not a test."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import titan_adapters as ta
from tests.conftest import random_model
from tests.parallel.models import TINY, Llama, Parts
from titan_adapters.checkpoint.sharded import whole_tensors
from titan_adapters.contract import meta_model
from titan_adapters.errors import CheckpointError
from titan_adapters.state_dict import native_tensors

Axes = dict[str, int]


class Move(NamedTuple):
    """A checkpoint written by the layout `source` and read by `target`; None for one process alone."""

    model: type[ta.BaseTransformer]
    config: ta.TransformerConfig
    format: str
    source: Axes | None
    target: Axes | None


def move_all(moves: dict[str, Move], folder: Path) -> dict[str, tuple[list[str], float]]:
    """Of each move, what is not bitwise as it was, and the largest difference of the logits."""
    ta.register_model(Parts)
    return {name: _move(move, folder / str(i)) for i, (name, move) in enumerate(moves.items())}


def _move(move: Move, path: Path) -> tuple[list[str], float]:
    original = random_model(move.model, move.config)
    tokens = torch.randint(move.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        reference = original(tokens)
    rank = torch.distributed.get_rank()
    expected = {name: tensor.detach().clone() for name, tensor in native_tensors(original).items()}
    prints = ta.fingerprint(original)
    if move.source is None:
        if rank == 0:
            ta.save_checkpoint(original, path, move.format)
        torch.distributed.barrier()
    else:
        parallel = _parallel(original, move.source)
        with torch.no_grad():
            parallel(tokens)  # a checkpoint may be written while FSDP holds whole parameters
        ta.save_checkpoint(parallel, path, move.format)
    if move.target is None:
        loaded = ta.load_model(path)
    else:
        loaded = _parallel(meta_model(move.model, move.config), move.target)
        ta.load_checkpoint(loaded, path)
    actual = dict(whole_tensors(native_tensors(loaded)))
    wrong = sorted(set(actual) ^ set(expected)) + [
        name for name, tensor in expected.items() if not _same(actual[name], tensor)
    ]
    wrong += ta.fingerprint_differences(ta.fingerprint(loaded), prints)
    assert (loaded.lm_head.weight is loaded.tok_embeddings.weight) == move.config.tied_embeddings
    with torch.no_grad():
        return wrong, (loaded(tokens) - reference).abs().max().item()


def refused_saves(folder: Path) -> list[str]:
    """What saving over a folder that is none of ours raises on this rank, in a safetensors format and in DCP."""
    (folder / "there").mkdir(exist_ok=True)
    (folder / "there" / "notes.md").touch()
    model = _parallel(random_model(Llama, TINY), {"tp": 2})
    texts = []
    for format in ("native", "dcp"):
        with pytest.raises(CheckpointError) as caught:
            ta.save_checkpoint(model, folder / "there", format, overwrite=True)
        texts.append(str(caught.value))
    return texts


def _parallel(model: ta.BaseTransformer, axes: Axes) -> ta.BaseTransformer:
    return ta.parallelize(model, init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))


def _same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual, expected)
