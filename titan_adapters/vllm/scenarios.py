"""What is run on an engine, each time so that it is certain that what the row says did happen."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from titan_adapters.verify.judge import Run
from titan_adapters.verify.metrics import BEST, Scored
from titan_adapters.vllm.compare import comparison_sampling, scored

if TYPE_CHECKING:
    import vllm

Prompts = Sequence[Sequence[int]]
NEW_TOKENS = 12
"""Generated per prompt."""


def generate(llm: "vllm.LLM", prompts: Prompts, max_tokens: int = NEW_TOKENS, *, prompt_logprobs: bool = True) -> list:
    """Greedy outputs for prompts of token ids, all at once."""
    sampling = comparison_sampling(max_tokens, best=_best(llm), prompt=prompt_logprobs)
    sampling.ignore_eos, sampling.detokenize = True, False
    asked: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return llm.generate(asked, sampling, use_tqdm=False)


def _best(llm: "vllm.LLM") -> int:
    limit, vocabulary = llm.llm_engine.model_config.max_logprobs, llm.llm_engine.model_config.get_vocab_size()
    return min(BEST, vocabulary, limit if limit >= 0 else vocabulary)


def prompt_of(whole: Scored) -> tuple[int, ...]:
    """What was given, of what `alone` returned."""
    return whole.tokens[: len(whole.tokens) - NEW_TOKENS]


def alone(llm: "vllm.LLM", prompts: Prompts, max_tokens: int = NEW_TOKENS) -> list[Scored]:
    return [scored(generate(llm, [prompt], max_tokens)[0]) for prompt in prompts]


def whole_prompts(llm: "vllm.LLM", prompts: Prompts) -> Run:
    budget = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    fitting = [prompt for prompt in prompts if len(prompt) <= budget]
    if not fitting:
        return Run(missing=f"every prompt is longer than max_num_batched_tokens = {budget}")
    how = f"{len(fitting)} prompts of up to {max(map(len, fitting))} tokens, one after the other"
    return Run(alone(llm, fitting), how=how)


def token_counts(llm: "vllm.LLM", prompts: Prompts) -> Run:
    counts = sorted({len(prompt) for prompt in prompts})
    outputs = alone(llm, prompts, 2)
    return Run(outputs, how=f"steps of {', '.join(map(str, counts))} tokens, then of one")


def mixed_batch(llm: "vllm.LLM", prompts: Prompts, whole: Run) -> Run:
    if len({len(prompt) for prompt in prompts}) < 2:
        return Run(missing="all prompts have the same length")
    if llm.llm_engine.vllm_config.scheduler_config.max_num_seqs < 2:
        return Run(missing="max_num_seqs = 1")
    outputs = [scored(output) for output in generate(llm, prompts)]
    if len(whole.outputs) < len(prompts):
        return Run(outputs, how=f"{len(prompts)} prompts at once, some of them longer than a step may be")
    return Run(outputs, whole.outputs, how=f"the same {len(prompts)} prompts at once, and each alone")


def prefix_cache(llm: "vllm.LLM", prompts: Prompts) -> Run:
    cache = llm.llm_engine.vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return Run(missing="enable_prefix_caching is off")
    llm.reset_prefix_cache()
    long = [prompt for prompt in prompts if len(prompt) > cache.block_size]
    if not long:
        return Run(missing=f"no prompt is longer than a cache block of {cache.block_size} tokens")
    # One after the other. Requests for prompt logprobs read no cached prefixes.
    first, again = ([generate(llm, [p], prompt_logprobs=False)[0] for p in long] for _ in range(2))
    hits = [output.num_cached_tokens or 0 for output in again]
    if not all(hits):
        return Run(missing=f"the engine reports no cached tokens for {hits.count(0)} of {len(hits)} repeated prompts")
    how = f"{len(long)} prompts twice; the engine reports {min(hits)} to {max(hits)} cached tokens for the second time"
    return Run([scored(output) for output in again], [scored(output) for output in first], how=how)


def decode_against_prefill(llm: "vllm.LLM", whole: Run) -> Run:
    limit = llm.llm_engine.model_config.max_model_len
    decoded = [sequence for sequence in whole.outputs if len(sequence.tokens) < limit]
    if not decoded:
        return Run(missing="nothing was generated before")
    prefilled = alone(llm, [sequence.tokens for sequence in decoded], 1)
    generated = [s.between(len(s.tokens) - NEW_TOKENS, len(s.tokens)) for s in decoded]
    how = f"{NEW_TOKENS} tokens of {len(decoded)} prompts, generated one by one, and again as a part of a prompt"
    return Run(generated, [s.between(s.start, len(s.tokens) - 1) for s in prefilled], how=how)


def chunked_prefill(llm: "vllm.LLM", whole: Run) -> Run:
    """Which of the prompts that ran were longer than a step may be."""
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    budget = scheduler.max_num_batched_tokens
    long = [s for s in whole.outputs if len(s.tokens) - NEW_TOKENS > budget]
    if not scheduler.enable_chunked_prefill or not long:
        return Run(missing=f"no prompt is longer than max_num_batched_tokens = {budget}, or chunked prefill is off")
    longest = max(len(s.tokens) for s in long) - NEW_TOKENS
    return Run(long, how=f"{len(long)} prompts of up to {longest} tokens, of which a step takes at most {budget}")


def preemption(llm: "vllm.LLM", prompts: Prompts) -> Run:
    before = preemptions(llm)
    outputs = generate(llm, prompts, prompt_logprobs=False)
    happened = preemptions(llm) - before
    if not happened:
        return Run(missing="the engine's metrics report no preemption")
    how = (
        f"{len(prompts)} requests in a KV cache too small for them; the engine's metrics report {happened} preemptions"
    )
    return Run([scored(output) for output in outputs], how=how)


def preemptions(llm: "vllm.LLM") -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")  # type: ignore[attr-defined]


def attempt(scenario: Callable[..., Run], *args: Any) -> Run:
    """What a scenario gives, or what the engine broke with, so that the other rows are still written."""
    try:
        return scenario(*args)
    except Exception as error:  # of any layer of vLLM
        return Run(failure=one_line(error))


def one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
