"""Checkpoint folders: safetensors with an index, in native or published names."""

from titan_adapters.checkpoint.api import (
    adapter_for,
    convert_checkpoint,
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from titan_adapters.checkpoint.folder import WeightsFolder, open_weights
from titan_adapters.checkpoint.identity import Identity, read_identity, write_identity

__all__ = [
    "Identity",
    "WeightsFolder",
    "adapter_for",
    "convert_checkpoint",
    "load_checkpoint",
    "load_model",
    "open_weights",
    "read_identity",
    "save_checkpoint",
    "write_identity",
]
