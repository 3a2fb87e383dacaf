"""Which tokens are run: varied texts if there is a tokenizer, seeded random ones otherwise."""

from collections.abc import Sequence
from itertools import chain, cycle, islice

import torch

from titan_adapters.config import TransformerConfig

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, for the first time,",
    "import numpy as np\n\ndef softmax(x):\n    e = np.exp(x - x.max())\n    return e / e.sum()\n\n",
    "The history of the Roman Empire begins with the founding of the city. It grew into a great power that ruled the "
    "Mediterranean for centuries, and its laws, language and roads",
    "Q: What is 12 times 12?\nA:",
    "Die Hauptstadt von Deutschland ist",
    '{"name": "Ada", "born": 1815, "field": "',
    "Chapter 1\n\nIt was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when it "
    "was checked by a violent gust of wind which swept up the streets, rattling along the housetops, and fiercely "
    "agitating the scanty flame of the lamps that struggled against the darkness. Step by step, the traveller",
)
LENGTHS = (5, 9, 17, 33, 48, 61, 70, 90)
"""Of random prompts."""
LONGEST_COUNT = 1100
"""Tokens: longer prompts are not made up. What only they could show is reported as not proven."""


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Reproducible on every platform: drawn on the CPU, each from a generator of its own."""
    return [
        torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed * 1_000_003 + n)).tolist()
        for n in lengths
    ]


def stretched(prompts: Sequence[Sequence[int]], length: int, skip: int = 0) -> list[int]:
    """`length` tokens, of the prompts one after the other, again and again, without the first `skip`."""
    return list(islice(chain.from_iterable(cycle(prompts)), skip, skip + length))


def edge_lengths(config: TransformerConfig, tp: int, block_size: int, limit: int) -> list[int]:
    """Token counts where code has edges: few, around the ranks, a cache block, every window and chunk."""
    spans = {span for spec in config.attention_specs() for span in (spec.window, spec.chunk) if span is not None}
    edges = {1, 2, 3} | {edge + step for edge in (tp, block_size, *spans) for step in (-1, 0, 1)}
    return sorted(n for n in edges if 0 < n <= min(limit, LONGEST_COUNT))


def spans_reached(config: TransformerConfig, longest: int) -> tuple[list[str], list[str]]:
    """Windows and chunks that a sequence of `longest` tokens goes beyond, and those that it does not."""
    specs = config.attention_specs()
    spans = {("window", spec.window) for spec in specs} | {("chunk", spec.chunk) for spec in specs}
    found: tuple[list[str], list[str]] = ([], [])
    for kind, span in sorted((kind, span) for kind, span in spans if span is not None):
        found[span >= longest].append(f"a {kind} of {span}")
    return found
