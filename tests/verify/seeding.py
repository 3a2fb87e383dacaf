"""How a fault is put into a running engine, and taken out again; not a test."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import titan_adapters as ta
from tests.conftest import random_model
from tests.vllm.conftest import engine_model, generate
from titan_adapters.nn import SequenceInfo
from titan_adapters.nn.rope import cos_sin_table
from titan_adapters.state_dict import native_tensors
from titan_adapters.verify.prompts import random_prompts, stretched

Weights = dict[str, Tensor]
Patches = Callable[[Any], list[AbstractContextManager]]


@dataclass(frozen=True)
class Fault:
    """One thing wrong in an engine, and what of `verify` finds it where."""

    name: str
    model: str
    """Registered name."""
    path: str = ""
    """Of the first stage that gives another function; empty: none does."""
    kind: ta.verify.Kind | None = None
    since: int = 0
    """The worst token there is not before this one."""
    claims: tuple[str, ...] = ()
    """Claims about weights that fail. None: whatever they say, if something else is expected."""
    names: tuple[str, ...] = ()
    """What each of these claims names."""
    rows: tuple[str, ...] = ()
    """Rows of logprobs that fail. None: likewise."""
    weights: Callable[[Weights], Weights] | None = None
    """From the right weights, on which it may write, to those that are wrong."""
    patches: Patches | None = None
    """What to patch in the engine's `BaseTransformer`."""
    around: Callable[[Any, ta.BaseTransformer], AbstractContextManager] | None = None
    """Whatever else, given the engine and the plain model."""

    @property
    def found(self) -> list[tuple[str, str]]:
        """By what, and where."""
        found = []
        if self.path:
            found.append(("stages", f"`{self.path}` ({self.kind}{f', from token {self.since} on' * (self.since > 0)})"))
        if self.claims:
            found.append((f"weights: {', '.join(self.claims)}", ", ".join(f"`{name}`" for name in self.names)))
        if self.rows:
            found.append(("logprobs", ", ".join(self.rows)))
        return found

    @contextmanager
    def seeded(self, llm: Any, model: ta.BaseTransformer) -> Iterator[None]:
        """The fault is in `llm`, which serves `model`, inside the block."""
        right = native_tensors(model)
        with ExitStack() as stack:
            if self.weights is not None:
                stack.callback(load, llm, right)  # once nothing is patched any more
            for patch in self.patches(engine_model(llm).backbone.model) if self.patches else []:
                stack.enter_context(patch)
            if self.around is not None:
                stack.enter_context(self.around(llm, model))
            if self.weights is not None:
                load(llm, right | self.weights({name: tensor.detach().clone() for name, tensor in right.items()}))
            yield


def load(llm: Any, weights: Weights) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})


def prompts(model: ta.BaseTransformer) -> list[list[int]]:
    """What `verify` is to run: fewer tokens than a step of its small engine may take, one more, and many more."""
    return random_prompts(model.config.vocab_size, (5, 33, 61), seed=0)


def swap(one: str, other: str) -> Callable[[Weights], Weights]:
    return lambda w: {one: w[other], other: w[one]}


def change(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    return lambda w: {name: function(w[name])}


def attribute(path: str, name: str, function: Callable[[Any], Any]) -> Patches:
    """Another value for an attribute of the engine's module at `path`."""

    def patches(model: Any) -> list[AbstractContextManager]:
        module = model
        for part in path.split(".") if path else []:
            module = getattr(module, part)
        return [mock.patch.object(module, name, function(getattr(module, name)))]

    return patches


def table(path: str, other: Callable[[ta.nn.Rope], Tensor]) -> Patches:
    """Another table of cosines and sines. It stays a buffer: a reload of weights counts on it."""

    def patches(model: Any) -> list[AbstractContextManager]:
        rope = model.get_submodule(path)
        return [mock.patch.dict(rope._buffers, {"cos_sin": other(rope)})]

    return patches


def rope_spec(**changes: Any) -> Callable[[ta.nn.Rope], Tensor]:
    return lambda rope: cos_sin_table(rope.spec.model_copy(update=changes), rope.max_seq_len, rope.cos_sin.device)


def times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


def spec(**changes: Any) -> Callable[[Any], Any]:
    return lambda spec: spec.model_copy(update=changes)


def heads(num_heads: int, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`function` of a projection's rows as [heads, head_dim, ...]."""
    return lambda w: function(w.unflatten(0, (num_heads, -1))).reshape(w.shape).contiguous()


def interleaved(x: Tensor) -> Tensor:
    """Heads [N, H, ...] with the two halves of their channels in turns."""
    return torch.stack(x.chunk(2, dim=1), dim=2)


def one_row(row: int) -> Callable[[Tensor], Tensor]:
    """Another row in place of this one."""

    def function(x: Tensor) -> Tensor:
        x[row] = x[row + 1]
        return x

    return function


def backwards(model: Any) -> Callable[..., Any]:
    def run_layers(x: Tensor, seq: Any, start: int = 0, stop: int | None = None) -> Tensor:
        for layer in reversed(model.layers[start:stop]):
            x = layer(x, seq)
        return x

    return run_layers


def without_residual(model: Any) -> list[AbstractContextManager]:
    block = model.layers[1]

    def forward(x: Tensor, seq: Any) -> Tensor:
        x = x + block.attention(block.attention_norm(x), seq)
        return block.ffn(block.ffn_norm(x))

    return [mock.patch.object(block, "forward", forward)]


def gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


# ----- what goes wrong only for some tokens, in some batches, or after something else


def next_bf16(name: str, row: int) -> Callable[[Weights], Weights]:
    """One element of `name`, the first of this row, one rounding step larger."""

    def function(w: Tensor) -> Tensor:
        w.view(torch.int16)[row, 0] += 1
        return w

    return change(name, function)


def from_position(first: int, other: Callable[[ta.nn.Rope], Tensor]) -> Callable[[ta.nn.Rope], Tensor]:
    """The table that `other` makes from this position on, the right one before it."""
    return lambda rope: torch.cat([rope.cos_sin[:first], other(rope)[first:]])


def chunks(positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token of a step [T]: the number of its chunk, its place in it, and the chunk's length.

    A chunk is what the step takes of one request. Its positions follow each other.
    """
    starts = positions.diff(prepend=positions[:1] - 2) != 1
    chunk, index = starts.cumsum(0) - 1, torch.arange(len(positions))
    return chunk, index - index[starts][chunk], chunk.bincount()[chunk]


def other_positions(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """For `NormRope.forward`: the positions that `change` makes of a step's [T]."""
    return lambda forward: lambda q, k, positions, *rest: forward(q, k, change(positions), *rest)


def restarting(positions: Tensor) -> Tensor:
    """Counted anew in each chunk of a prompt."""
    _, place, length = chunks(positions)
    return torch.where(length > 1, place, positions)


def later_when_decoding(positions: Tensor) -> Tensor:
    return positions + (chunks(positions)[2] == 1)


def through_the_batch(positions: Tensor) -> Tensor:
    """Counted on from one request to the next."""
    return positions[0] + torch.arange(len(positions))


def forgetting(model: Any) -> list[AbstractContextManager]:
    """In layer 1, the tokens of a chunk do not see the chunks before."""
    inner = model.layers[1].attention.inner_attention
    original, plain = inner.forward, ta.nn.InnerAttention(model.config.attention(1), 1)

    def forward(q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        right = original(q, k, v, seq)  # which also fills the cache
        chunk, _, length = chunks(seq.positions)
        return torch.where((length > 1).view(-1, 1, 1), plain(q, k, v, SequenceInfo(seq.positions, chunk)), right)

    return [mock.patch.object(inner, "forward", forward)]


def stale_prefix_cache(llm: Any, model: ta.BaseTransformer) -> AbstractContextManager:
    """Where `verify` resets the cache, weights are updated instead: what it looks up then is of the weights before."""

    def update() -> None:
        load(llm, native_tensors(random_model(type(model), model.config, seed=1)))
        block = llm.llm_engine.vllm_config.cache_config.block_size
        long = [stretched(prompts(model), block + 9, skip) for skip in (0, 1)]
        generate(llm, long, 1, prompt_logprobs=False)
        load(llm, native_tensors(model))

    return mock.patch.object(llm, "reset_prefix_cache", update)


def untied(model: Any) -> list[AbstractContextManager]:
    head = model.lm_head.head
    return [mock.patch.object(head, "weight", torch.nn.Parameter(head.weight.flip(0), requires_grad=False))]
