"""Random weights in the shape of a published model, in both formats, for benchmarks on machines without a model hub.

python benchmarks/random_checkpoint.py qwen3-0.6b FOLDER      # writes FOLDER/published and FOLDER/native
"""

from pathlib import Path

import torch
import typer

import titan_adapters as ta

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rope_theta": 1e6, "dtype": "bfloat16",
}  # fmt: skip
LLAMA3 = {
    "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rope_theta": 5e5, "dtype": "bfloat16",
}  # fmt: skip
SHAPES = {
    "qwen3-0.6b": QWEN3
    | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
    | {"tie_word_embeddings": True},
    "qwen3-4b": QWEN3
    | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
    | {"tie_word_embeddings": True},
    "llama3-8b": LLAMA3
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
}


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
