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
    from torchtitan.models.gpt_oss import gptoss_configs
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.qwen3 import qwen3_configs

    # Its experts round what they get to bf16, whatever the model's dtype. The formula is compared, so here they don't.
    torch.Tensor.bfloat16 = lambda tensor: tensor
    for family, config in (
        ("llama3", llama3_configs["debugmodel"]("flex")),
        ("qwen3", qwen3_configs["debugmodel"]("flex")),
        ("qwen3_moe", qwen3_configs["debugmodel_moe"]("flex")),
        ("gpt_oss", gptoss_configs["debugmodel"]("standard", "flex")),
    ):
        if family in ("qwen3_moe", "gpt_oss"):
            config.layers = config.layers[:2]  # of 8 and 4: 64 experts a layer are 150 MB
        torch.manual_seed(0)
        model = config.build()
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
            results = {"tokens": tokens, "positions": positions, "logits": model(tokens, positions, masks)}
            results |= {f"state.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
            if family == "qwen3_moe":  # once more with biases as load balancing makes them, of a score's size
                for name, bias in model.named_buffers():
                    if name.endswith("expert_bias_E"):
                        results[f"biased.{name}"] = bias.normal_(std=0.02)
                results["biased_logits"] = model(tokens, positions, masks)
        save_file(results, folder / f"{family}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
