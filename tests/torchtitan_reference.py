"""Run torchtitan's own debug models and write what they computed; a script for `test_torchtitan.py`, not a test.

It runs in a process of its own because it puts a stand-in for triton into `sys.modules`: torchtitan imports triton for
expert-parallel GPU kernels, none of which run here, and the real one is a gigabyte.

Usage: python torchtitan_reference.py OUTPUT_FOLDER
"""

import os
import sys
import types
from pathlib import Path

# Read when torch is imported: no compiler is needed, and eager flex attention is the plain formula in fp32.
os.environ["TORCH_COMPILE_DISABLE"] = "1"


class StandIn(types.ModuleType):
    """A module of which every attribute exists; `jit` and the like return the decorated function."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return decorator


def decorator(*args, **options):
    return args[0] if args and callable(args[0]) and not options else decorator


def main(folder: Path) -> None:
    import torch
    import torch._inductor.runtime.triton_compat  # torch must find out that it has no triton before the stand-in comes
    import torch.nn.attention.flex_attention
    from safetensors.torch import save_file

    for name in ("triton", "triton.language"):
        sys.modules[name] = StandIn(name)
    sys.modules["triton"].language = sys.modules["triton.language"]
    import torchtitan.distributed.minimal_async_ep.kernels  # noqa: F401

    del sys.modules["triton"], sys.modules["triton.language"]  # nobody else may take it for the real one
    torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.qwen3 import qwen3_configs

    for family, configs in (("llama3", llama3_configs), ("qwen3", qwen3_configs)):
        torch.manual_seed(0)
        model = configs["debugmodel"]("flex").build()
        model.init_states()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # drawn as ones, which would hide a norm that is left out or swapped
                    parameter.uniform_(0.5, 1.5)
                elif parameter.std() < 0.1:  # drawn so small that attention would be nearly uniform
                    parameter.normal_(std=0.1)
            tokens = torch.randint(2048, (2, 64))
            # Row 0 is one document, row 1 holds two: positions restart at its 41st token.
            positions = torch.arange(64).repeat(2, 1)
            positions[1, 40:] -= 40
            masks = model.get_attention_masks(positions)
            logits = model(tokens, positions, masks)
        state = {f"state.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(
            {"tokens": tokens, "positions": positions, "logits": logits, **state}, folder / f"{family}.safetensors"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
