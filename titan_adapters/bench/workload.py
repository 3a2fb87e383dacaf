"""What the engines are asked to generate."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from titan_adapters.errors import ConfigError

POINTS = ("start", "prefill", "decode", "mixed", "long", "memory")
DECODE_PROMPT = 16

Seconds = Callable[[list[int], list[int]], float]
"""Seconds for requests of these prompt and output lengths, sent at once."""


@dataclass(frozen=True)
class Workload:
    """Lengths are in tokens."""

    points: tuple[str, ...]
    batches: tuple[int, ...]
    """Requests that are decoded at once."""
    decode_tokens: int
    prefill_requests: int
    prefill_length: int
    mixed_requests: int
    long_requests: int
    long_lengths: tuple[int, ...]
    long_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        needed = {
            "decode": DECODE_PROMPT + self.decode_tokens,
            "prefill": self.prefill_length + 1,
            "mixed": self.decode_tokens + 1,
        }
        problems = [f"{p} needs {n}" for p, n in needed.items() if p in self.points and n > self.max_model_len]
        if problems:
            raise ConfigError(f"Requests don't fit max_model_len {self.max_model_len}.", problems, fix="enlarge it.")

    def measurements(self) -> dict[str, Callable[[Seconds], dict[str, float]]]:
        """By title: what asks an engine for seconds, and returns rates by the name of the point."""
        found: dict[str, Callable[[Seconds], dict[str, float]]] = {}
        if "prefill" in self.points:
            found["prefill"] = self._prefill
        if "decode" in self.points:
            for batch in self.batches:
                found[f"decode {batch}"] = partial(self._decode, batch)
        if "mixed" in self.points:
            found["mixed"] = self._mixed
        if "long" in self.points:
            for length in self.fitting_lengths():
                found[f"long {length}"] = partial(self._long, length)
        return found

    def fitting_lengths(self) -> tuple[int, ...]:
        """Of the long prompts, those that leave room for their output."""
        return tuple(length for length in self.long_lengths if length + self.long_tokens <= self.max_model_len)

    def _prefill(self, seconds: Seconds) -> dict[str, float]:
        prompts = [self.prefill_length] * self.prefill_requests
        return {"prefill tok/s": sum(prompts) / seconds(prompts, [1] * len(prompts))}

    def _decode(self, batch: int, seconds: Seconds) -> dict[str, float]:
        outputs = [self.decode_tokens] * batch
        return {f"decode {batch} tok/s": sum(outputs) / seconds([DECODE_PROMPT] * batch, outputs)}

    def _mixed(self, seconds: Seconds) -> dict[str, float]:
        """Prompts and outputs of many lengths, short ones more often; read and written tokens count alike."""
        draw = random.Random(0)

        def lengths(longest: int) -> list[int]:
            return [round(math.exp(draw.uniform(0, math.log(longest)))) for _ in range(self.mixed_requests)]

        outputs = lengths(self.decode_tokens)
        prompts = lengths(self.max_model_len - self.decode_tokens)
        return {"mixed tok/s": sum(prompts + outputs) / seconds(prompts, outputs)}

    def _long(self, length: int, seconds: Seconds) -> dict[str, float]:
        """Decoding takes what is left after the time of the same prompts with one token each."""
        prompts, n = [length] * self.long_requests, self.long_requests
        first = seconds(prompts, [1] * n)
        all_tokens = seconds(prompts, [self.long_tokens] * n)
        rates = {f"prefill of {length} tok/s": sum(prompts) / first}
        if all_tokens > first:  # else the machine was disturbed
            rates[f"decode after {length} tok/s"] = n * (self.long_tokens - 1) / (all_tokens - first)
        return rates
