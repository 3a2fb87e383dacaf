"""The contract suite's second tier: a tiny model in a real vLLM engine, in this process, eager, against plain torch.

Imports vllm only when an engine is started, which takes a few seconds.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from titan_adapters.checkpoint import save_checkpoint
from titan_adapters.contract import BaseTransformer
from titan_adapters.testing.case import Case, Skip, close

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "block_size": 32,  # the smallest that attention on the CPU takes
    "num_gpu_blocks_override": 64,
    "max_logprobs": -1,  # whole distributions, so that every logit is compared
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
}
TOLERANCE = 1e-4
"""Relative, over whole distributions in fp32. Measured on the CPU: 3e-7 to 1.2e-6; GPUs sum in other orders."""
LENGTH = 72
"""Tokens of the usual prompt: two and a quarter cache blocks, more than a tiny config's windows."""


@dataclass
class Served:
    """A torch model, and an engine that serves the same weights."""

    model: BaseTransformer
    llm: Any
    tolerance: float = TOLERANCE

    @classmethod
    def start(cls, case: Case) -> "Served":
        """Serve the case's weights in fp32; Skip if this platform's attention can't."""
        from titan_adapters.vllm import LLM
        from titan_adapters.vllm.compat import platform_problems

        if problems := platform_problems(case.config):
            raise Skip("; ".join(problems))
        config = case.config.model_copy(update={"dtype": "float32"})
        model = case.cls(config)
        model.load_state_dict(case.model.state_dict())
        length = min(OPTIONS["max_model_len"], config.max_seq_len)
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, ENVIRONMENT):
            save_checkpoint(model, Path(folder) / "native")
            return cls(model, LLM(checkpoint=Path(folder) / "native", **OPTIONS | {"max_model_len": length}))

    def prompt(self, length: int = LENGTH, seed: int = 1) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.model.config.vocab_size, (length,), generator=generator).tolist()

    def close_to_torch(self, outputs: list[Any], what: str) -> str:
        """Fail unless every logprob of every output is torch's, and the engine chose its best tokens."""
        greedy = [list(output.outputs[0].token_ids) for output in outputs]
        best = [logprobs_of(o)[-len(chosen) :].argmax(-1).tolist() for o, chosen in zip(outputs, greedy)]
        assert greedy == best, f"{what}: the engine did not choose its best tokens"
        ours, torchs = ([of(o) for o in outputs] for of in (logprobs_of, self.torch_logprobs_of))
        return close(torch.cat(ours), torch.cat(torchs), what, self.tolerance)

    def torch_logprobs_of(self, output: Any) -> Tensor:
        return torch_logprobs_of(self.model, output)


def shut_down(engines: Iterable[Any]) -> None:
    """End engines of this process. They share vLLM's process groups, so end all before starting another."""
    with mock.patch("gc.collect"):  # most of a second each time
        for engine in engines:
            engine.llm_engine.engine_core.shutdown()


def generate(llm: Any, prompts: list[list[int]], max_tokens: int = 12, prompt_logprobs: bool = True) -> list[Any]:
    """Greedy outputs for prompts of token ids, with logprobs of all tokens of the vocabulary.

    vLLM reads no cached prefixes for requests that ask for prompt logprobs.
    """
    import vllm

    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=-1,
        prompt_logprobs=-1 if prompt_logprobs else None,
        detokenize=False,
    )
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def logprobs_of(output: Any) -> Tensor:
    """[positions, V]: of prompt tokens 1 and later if the output has them, then of generated ones."""
    rows = list(output.prompt_logprobs or [None])[1:] + list(output.outputs[0].logprobs)
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


def torch_logprobs_of(model: BaseTransformer, output: Any) -> Tensor:
    """What `logprobs_of(output)` should be: one forward pass over prompt and continuation."""
    tokens = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
    with torch.no_grad():
        logprobs = model(tokens).float().log_softmax(-1)[:-1]
    return logprobs if output.prompt_logprobs else logprobs[len(output.prompt_token_ids) - 1 :]


@contextmanager
def recorded_steps(llm: Any) -> Iterator[list[Any]]:
    """The scheduler's output of every step: `num_scheduled_tokens` by request, `preempted_req_ids`."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original, steps = scheduler.schedule, []

    def schedule(*args: Any, **kwargs: Any) -> Any:
        steps.append(original(*args, **kwargs))
        return steps[-1]

    scheduler.schedule = schedule
    try:
        yield steps
    finally:
        scheduler.schedule = original


@contextmanager
def chunks_of(llm: Any, size: int) -> Iterator[None]:
    """At most `size` tokens per step, as with `max_num_batched_tokens=size`, without starting another engine."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, size
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


def engine_whole_prompt(served: Served) -> str:
    """A prompt in one step, and greedy tokens after it: every logprob is plain torch's."""
    with recorded_steps(served.llm) as steps:
        outputs = generate(served.llm, [served.prompt()])
    assert [*steps[0].num_scheduled_tokens.values()] == [LENGTH], "the prompt was not taken whole"
    return served.close_to_torch(outputs, "whole prompt")


def engine_chunked_prompt(served: Served) -> str:
    """The same with prompts in chunks of 16, 7 and 1 tokens.

    If only this fails, something of the model depends on how many tokens it sees at once.
    """
    details = []
    for size in (16, 7, 1):
        with chunks_of(served.llm, size), recorded_steps(served.llm) as steps:
            outputs = generate(served.llm, [served.prompt()])
        chunks = [n for step in steps for n in step.num_scheduled_tokens.values()][: -(-LENGTH // size)]
        assert max(chunks) == size and sum(chunks) == LENGTH, f"the prompt came in chunks of {chunks}"
        details.append(served.close_to_torch(outputs, f"chunks of {size}"))
    return details[-1]


def engine_prefix_cache(served: Served) -> str:
    """A prompt again, and another that shares its start: the same logprobs from cached keys and values."""
    served.llm.reset_prefix_cache()
    prompt = served.prompt()
    first = generate(served.llm, [prompt], prompt_logprobs=False)
    again = generate(served.llm, [prompt], prompt_logprobs=False)
    forked = generate(served.llm, [prompt[:70] + served.prompt(20, seed=2)], prompt_logprobs=False)
    cached = [output.num_cached_tokens for output in first + again + forked]
    assert cached == [0, 64, 64], f"cached tokens: {cached}, not 0, 64, 64, which are whole blocks of 32"
    return served.close_to_torch(first + again + forked, "cached prefix")


def engine_decode(served: Served) -> str:
    """Tokens that were generated one by one, given as a prompt, get the logprobs that they were generated with."""
    (decoded,) = generate(served.llm, [served.prompt(5)], max_tokens=40)
    (prefilled,) = generate(served.llm, [served.prompt(5) + list(decoded.outputs[0].token_ids)], max_tokens=1)
    return close(logprobs_of(decoded), logprobs_of(prefilled)[:-1], "decode against prefill", served.tolerance)


def engine_mixed_batch(served: Served) -> str:
    """Six prompts of very different lengths together give what each gives alone."""
    prompts = [served.prompt(length, seed=length) for length in (1, 2, 3, 17, 61, LENGTH)]
    alone = [generate(served.llm, [prompt])[0] for prompt in prompts]
    with recorded_steps(served.llm) as steps:
        together = generate(served.llm, prompts)
    assert max(len(step.num_scheduled_tokens) for step in steps) > 3, "the prompts were not batched"
    for one, other in zip(alone, together, strict=True):
        length = len(one.prompt_token_ids)
        assert one.outputs[0].token_ids == other.outputs[0].token_ids, f"{length} tokens: another continuation"
        close(logprobs_of(other), logprobs_of(one), f"{length} tokens, batched against alone", served.tolerance)
    return served.close_to_torch(together, "mixed batch")


ENGINE_CHECKS: tuple[Callable[[Served], str], ...] = (
    engine_whole_prompt,
    engine_chunked_prompt,
    engine_prefix_cache,
    engine_decode,
    engine_mixed_batch,
)
