"""Weights by which exchanged tensors are found out."""

import torch
from torch import Tensor

from titan_adapters.contract import BaseTransformer
from titan_adapters.state_dict import native_tensors


def unique_fill(model: BaseTransformer) -> BaseTransformer:
    """Give every native tensor of `model` values of its own, in place; returns the model.

    No two tensors of one shape, nor two experts, heads or rows of one, are alike then, as the norms, zero biases and
    copied experts of a new model are. So a load that exchanges any two of them changes fingerprints:

        ta.save_checkpoint(unique_fill(cls(config)), folder, "hf")
        llm = ta.vllm.LLM(checkpoint=folder)
        ta.vllm.weight_proof(llm, against=model)

    Published names go through the model's rows both when they are saved and when they are loaded. So this compares
    the ways on which weights travel; that the rows mean what the stock architecture does is a matter of its logits.

    Values are pseudo-random, the same in every run, of either sign, between 2^-7 and 2, and exact in fp32, bf16 and
    fp16. The model is one process's, on a real device.
    """
    with torch.no_grad():
        for seed, tensor in enumerate(native_tensors(model).values()):
            tensor.copy_(_values(tensor.shape, seed))
    return model


def _values(shape: torch.Size, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(0x3C00, 0x4000, shape, generator=generator).to(torch.int16).view(torch.bfloat16)
    return magnitudes * (1 - 2 * torch.randint(2, shape, generator=generator))
