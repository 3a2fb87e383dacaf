"""What an engine is compared with: plain torch in two precisions, and transformers' model of the same weights."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch

from titan_adapters.checkpoint import load_model
from titan_adapters.contract import BaseTransformer
from titan_adapters.verify.metrics import Scored, score_logits
from titan_adapters.verify.replay import Exact

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
"""Of a served dtype, the next wider precision, in which the same function is computed as the reference."""


class References:
    """Scores of token sequences, computed once each."""

    def __init__(self, sequences: Iterable[tuple[int, ...]]):
        self.sequences = sorted(set(sequences), key=len)

    def torch(self, model: BaseTransformer) -> dict[tuple[int, ...], Scored]:
        """By plain torch, in the dtype and on the device of `model`."""
        device = model.tok_embeddings.weight.device
        found = {}
        exactly = Exact() if next(model.parameters()).dtype == torch.float64 else nullcontext()
        with torch.no_grad(), exactly:
            for tokens in self.sequences:
                found[tokens] = score_logits(tokens, model(torch.tensor(tokens, device=device)))
        return found

    def transformers(self, folder: str | Path, device: torch.device) -> dict[tuple[int, ...], Scored]:
        """By transformers, from a published folder, in fp32."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model = model.to(device).eval()
        found = {}
        with torch.no_grad():
            for tokens in self.sequences:
                found[tokens] = score_logits(tokens, model(torch.tensor([tokens], device=device)).logits[0])
        return found


def load_in(folder: str | Path, dtype: torch.dtype, device: torch.device) -> BaseTransformer:
    """The checkpoint's model in `dtype`, for evaluation; what modules keep in fp32 is fp32 unless `dtype` is fp64."""
    if dtype == torch.float64:
        return load_model(folder, dtype=torch.float32, device=device).eval().double()
    return load_model(folder, dtype=dtype, device=device).eval()
