"""A trainer that writes DCP checkpoints, for the engine to serve; not a test."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import titan_adapters as ta
from tests.conftest import random_model


def train_and_save(name: str, config: ta.TransformerConfig, axes: dict[str, int], folders: list[Path]) -> None:
    """Before each save, one step of SGD."""
    model = random_model(ta.get_model(name), config)
    ta.parallelize(model, init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, folder in enumerate(folders):
        tokens = torch.randint(config.vocab_size, (2, 2, 24), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[1].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        ta.save_checkpoint(model, folder, "dcp")
