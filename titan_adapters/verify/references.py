"""What an engine is compared with: plain torch in two precisions, and transformers' model of the same weights."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from titan_adapters.contract import BaseTransformer
from titan_adapters.verify.metrics import Scored, score_logits
from titan_adapters.verify.replay import Exact

Tokens = tuple[int, ...]

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
"""Of a served dtype, the next wider precision, in which the same function is computed as the reference."""


def score_with_torch(model: BaseTransformer, sequences: Iterable[Tokens]) -> dict[Tokens, Scored]:
    """By plain torch, in the dtype and on the device of `model`; each sequence once."""
    device, dtype = model.tok_embeddings.weight.device, model.tok_embeddings.weight.dtype
    with torch.no_grad(), Exact() if dtype == torch.float64 else nullcontext():
        return {tokens: score_logits(tokens, model(torch.tensor(tokens, device=device))) for tokens in set(sequences)}


def score_with_transformers(
    folder: str | Path, sequences: Iterable[Tokens], device: torch.device
) -> dict[Tokens, Scored]:
    """By transformers, from a published folder, in fp32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    with torch.no_grad():
        return {
            tokens: score_logits(tokens, model(torch.tensor([tokens], device=device)).logits[0])
            for tokens in set(sequences)
        }
