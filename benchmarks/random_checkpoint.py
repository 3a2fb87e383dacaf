"""Random weights in the shape of a published model, in both formats, for benchmarks on machines without a model hub.

python benchmarks/random_checkpoint.py qwen3-0.6b FOLDER      # writes FOLDER/published and FOLDER/native
"""

from pathlib import Path

import torch
import typer
from shapes import SHAPES

import titan_adapters as ta


def main(shape: str, folder: Path) -> None:
    """Write FOLDER/published and FOLDER/native."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"one of {', '.join(SHAPES)}")
    cls, config = ta.read_hf_config(SHAPES[shape])
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, config.dtype))
    model = cls(config)
    ta.save_checkpoint(model, folder / "native")
    ta.save_checkpoint(model, folder / "published", "hf")


if __name__ == "__main__":
    typer.run(main)
