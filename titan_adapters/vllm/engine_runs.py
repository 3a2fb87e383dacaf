"""The engines that `verify` starts, and what is run on each."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titan_adapters.checkpoint import read_identity
from titan_adapters.errors import EngineError
from titan_adapters.fingerprints import dtype_name
from titan_adapters.verify import prompts as tokens_of
from titan_adapters.verify.judge import Run
from titan_adapters.verify.records import StageRecords
from titan_adapters.verify.references import WIDER
from titan_adapters.verify.report import Row
from titan_adapters.vllm import scenarios
from titan_adapters.vllm.llm import LLM
from titan_adapters.vllm.parallel import Parallel, share_cores
from titan_adapters.vllm.plugin import POISON
from titan_adapters.vllm.proof import weight_proof
from titan_adapters.vllm.scenarios import NEW_TOKENS, attempt
from titan_adapters.vllm.stages import record_stages

if TYPE_CHECKING:
    import vllm

Prompt = str | Sequence[int]

SMALL_BUDGET = 32
"""max_num_batched_tokens of the small engine: the usual prompts are computed in several chunks."""
SMALL_BLOCK = 32
SMALL_LONGEST = 512
"""Tokens: longer prompts are not run on the small engine."""

LOADED = "weights: nothing is left out"
LOADED_WHY = "every parameter was NaN before weights were loaded, and none was after"


class EngineRuns:
    """Starts one engine after the other, and keeps what they said."""

    def __init__(
        self, checkpoint: Path, dtype: str | None, seed: int, progress: Callable[[str], None], options: dict[str, Any]
    ):
        self.checkpoint, self.seed, self._progress = checkpoint, seed, progress
        self.identity = read_identity(checkpoint)
        self.config = self.identity.config
        dtypes = {dtype_name(known): known for known in WIDER}
        name = dtype or self.config.dtype
        if name not in dtypes:
            raise EngineError(f"There is no yardstick for dtype {name!r}.", fix=f"choose from {', '.join(dtypes)}.")
        self.dtype = dtypes[name]
        tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json")
        self.tokenizer = "tokenizer" in options or any((checkpoint / name).exists() for name in tokenizers)
        ours = {"skip_tokenizer_init": not self.tokenizer, "dtype": name}
        self.options: dict[str, Any] = ours | cpu_cache(options) | options
        self.tp = options.get("tensor_parallel_size", 1)
        self.pp = options.get("pipeline_parallel_size", 1)
        self.runs: dict[str, tuple[str, Run]] = {}
        """Row -> engine, and what it said."""
        self.rows: list[Row] = []
        """Rows that are not about logprobs."""
        self.engines: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, float] = {}
        self.records: list[StageRecords] = []
        self.not_recorded = ""
        """Why there are no records of stages."""
        self.prompts: list[list[int]] = []
        self.described = ""
        self.longest = 0
        """Tokens of the longest prompt that the served engine ran in one go."""

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        self._progress(title)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[title] = round(time.perf_counter() - start, 2)

    @contextmanager
    def engine(self, name: str, start: Callable[[], "vllm.LLM"]) -> Iterator["vllm.LLM"]:
        """One engine at a time: it is gone afterwards, with its memory."""
        with self.phase(f"start the {name} engine"):
            llm = start()
        try:
            self.engines[name] = engine_settings(llm)
            with self.phase(f"run the {name} engine"):
                yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _start(self, **options: Any) -> "vllm.LLM":
        # Metrics tell of preemptions.
        return LLM(checkpoint=self.checkpoint, **{"disable_log_stats": False, **self.options, **options})

    def start_native(self, folder: Path) -> "vllm.LLM":
        """vLLM's own implementation, with the served settings; refused if there is only the Transformers backend."""
        import vllm

        share_cores(Parallel.from_arguments(self.options))  # as for ours
        return vllm.LLM(str(folder), model_impl="vllm", **self.options)

    # Engines

    def served(self, given: Sequence[Prompt] | None) -> None:
        with self.engine("served", self._start) as llm:
            limit = llm.llm_engine.model_config.max_model_len - NEW_TOKENS
            block = llm.llm_engine.vllm_config.cache_config.block_size
            self._choose_prompts(llm, given, limit)
            self._weights(llm)
            edges = tokens_of.edge_lengths(self.config, self.tp, block, limit)
            self.longest = max([*edges, *map(len, self.prompts)])
            counts = tokens_of.random_prompts(self.config.vocab_size, edges, self.seed)
            long = [tokens_of.stretched(self.prompts, n, skip) for skip, n in ((0, block + 9), (1, 2 * block + 1))]
            whole = self._run("whole prompt", "served", scenarios.whole_prompts, llm, self.prompts)
            self._run("token counts", "served", scenarios.token_counts, llm, counts)
            self._run("mixed batch", "served", scenarios.mixed_batch, llm, self.prompts, whole)
            self._run("prefix-cache hit", "served", scenarios.prefix_cache, llm, [p for p in long if len(p) <= limit])
            self._run("decode against prefill", "served", scenarios.decode_against_prefill, llm, whole)

    def small(self) -> None:
        """The eager engine with a small budget and cache."""
        block = self.options.get("block_size") or SMALL_BLOCK
        short = [prompt for prompt in self.prompts if len(prompt) <= SMALL_LONGEST]
        needed = max([len(prompt) + NEW_TOKENS for prompt in short] + [4 * SMALL_BLOCK])
        blocks = -(-needed // block) + 1
        # The longest request must fit, many must not. vLLM keeps layers in groups of one kind and equal size, each with
        # blocks of its own.
        kinds = [(spec.window, spec.chunk) for spec in self.config.attention_specs()]
        counts = [kinds.count(kind) for kind in set(kinds)]
        groups = sum(-(-count // min(counts)) for count in counts)
        requests = blocks + 2
        options = {
            "enforce_eager": True,
            "block_size": block,
            "max_model_len": min(blocks * block, self.config.max_seq_len),
            "max_num_seqs": requests,
            "max_num_batched_tokens": max(SMALL_BUDGET, requests),
            "num_gpu_blocks_override": groups * blocks + 1,
            "enable_prefix_caching": False,
            "additional_config": {POISON: True} | (self.options.get("additional_config") or {}),
        }
        rows = ("chunked prefill", "preemption and resume", "compiled against eager")
        try:
            with self.engine("small", lambda: self._start(**options)) as llm:
                self.rows.append(Row(name=LOADED, verdict="proven", why=LOADED_WHY, engine="small"))
                whole = attempt(lambda: Run(scenarios.alone(llm, short)))
                chunked = self._run(rows[0], "small", scenarios.chunked_prefill, llm, whole)
                chunked.failure = whole.failure
                crowd = [tokens_of.stretched(self.prompts, block - 2, skip=i) for i in range(requests)]
                self._run(rows[1], "small", scenarios.preemption, llm, crowd)
                self.runs[rows[2]] = ("small", self._compiled(whole))
                self._record_stages(llm, short)
        except Exception as error:  # of any layer of vLLM
            reason = f"the engine for it could not be run: {scenarios.one_line(error)}"
            if POISON in str(error):
                self.rows.append(Row(name=LOADED, verdict="failed", why=scenarios.one_line(error), engine="small"))
            self.not_recorded = self.not_recorded or reason
            for row in rows:
                self.runs.setdefault(row, ("small", Run(missing=reason)))

    def one_rank(self) -> None:
        name = "TP against one rank"
        if self.tp == self.pp == 1:
            self.runs[name] = ("served", Run(missing="the served engine has one rank"))
            return
        options = {
            "enforce_eager": True,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "enable_expert_parallel": False,
        }
        try:
            with self.engine("one-rank", lambda: self._start(**options)) as llm:
                outputs = attempt(lambda: Run(scenarios.alone(llm, self.prompts)))
        except Exception as error:  # of any layer of vLLM
            outputs = Run(missing=f"the engine for it could not be run: {scenarios.one_line(error)}")
        run = self._beside_served(outputs)
        sizes = f"tensor_parallel_size = {self.tp}, pipeline_parallel_size = {self.pp}"
        run.how = f"{len(run.outputs)} prompts with {sizes}, and with one rank"
        self.runs[name] = ("one-rank", run)

    def _compiled(self, eager: Run) -> Run:
        mode = self.engines["served"]["compilation"]
        if self.options.get("enforce_eager") or mode == "NONE":
            return Run(missing="the served engine is eager: nothing compiled was run")
        run = self._beside_served(eager)
        run.how = f"{len(run.outputs)} prompts in the served engine (compiled: {mode}), and in an eager one"
        return run

    def _beside_served(self, other: Run) -> Run:
        """What another engine said, with what the served one said of the same prompts."""
        served = {scenarios.prompt_of(s): s for s in self.runs["whole prompt"][1].outputs}
        both = [(s, served[scenarios.prompt_of(s)]) for s in other.outputs if scenarios.prompt_of(s) in served]
        return Run([a for a, _ in both], [b for _, b in both], missing=other.missing, failure=other.failure)

    def _run(self, row: str, engine: str, scenario: Callable[..., Run], *args: Any) -> Run:
        run = attempt(scenario, *args)
        self.runs[row] = (engine, run)
        return run

    def _choose_prompts(self, llm: "vllm.LLM", given: Sequence[Prompt] | None, limit: int) -> None:
        if given is not None:
            texts = [p for p in given if isinstance(p, str)]
            if texts and not self.tokenizer:
                raise EngineError("Texts need a tokenizer.", texts, fix="pass token ids, or tokenizer=.")
            self.prompts = [self._encode(llm, p) if isinstance(p, str) else list(p) for p in given]
            self.described = f"{len(given)} given prompts"
            wrong = [f"prompt {i} has {len(p)} tokens" for i, p in enumerate(self.prompts) if not 0 < len(p) <= limit]
            if wrong or not given:
                raise EngineError("These prompts can't be run.", wrong, fix=f"give prompts of 1 to {limit} tokens.")
        elif self.tokenizer:
            self.prompts = [self._encode(llm, text)[:limit] for text in tokens_of.TEXTS]
            self.described = f"{len(self.prompts)} built-in texts"
        else:
            lengths = [n for n in tokens_of.LENGTHS if n <= limit]
            self.prompts = tokens_of.random_prompts(self.config.vocab_size, lengths, self.seed)
            self.described = f"{len(self.prompts)} prompts of random tokens"
        self.described += f"; random tokens are drawn with seed {self.seed}"

    def _encode(self, llm: "vllm.LLM", text: str) -> list[int]:
        return list(llm.get_tokenizer().encode(text))

    # What is not about logprobs

    def _weights(self, llm: "vllm.LLM") -> None:
        for row in weight_proof(llm, against=self.checkpoint):
            why = row.detail if row.verdict == "proven" else "; ".join(row.problems[:3])
            more = len(row.problems) - 3
            why += f"; and {more} more" if row.verdict != "proven" and more > 0 else ""
            self.rows.append(Row(name=f"weights: {row.claim}", verdict=row.verdict, why=why, engine="served"))

    def _record_stages(self, llm: "vllm.LLM", prompts: list[list[int]]) -> None:
        if not prompts:
            self.not_recorded = f"no prompt has at most {SMALL_LONGEST} tokens"
            return
        asked = [max(prompts, key=len)]
        with record_stages(llm) as recorded:
            outputs = scenarios.generate(llm, asked, 4)
        self.records = [recorded.of(output) for output in outputs]


def engine_settings(llm: "vllm.LLM") -> dict[str, str]:
    """What vLLM made of the arguments, as far as it changes what is computed and how it is scheduled."""
    config = llm.llm_engine.vllm_config
    model, scheduler, cache, parallel = (
        config.model_config,
        config.scheduler_config,
        config.cache_config,
        config.parallel_config,
    )
    settings = {
        "dtype": dtype_name(model.dtype),
        "compilation": config.compilation_config.mode.name,
        "CUDA graphs": str(config.compilation_config.cudagraph_mode),
        "max_model_len": model.max_model_len,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "chunked prefill": scheduler.enable_chunked_prefill,
        "prefix caching": cache.enable_prefix_caching,
        "block_size": cache.block_size,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "KV cache dtype": cache.cache_dtype,
        "tensor parallel": parallel.tensor_parallel_size,
        "pipeline parallel": parallel.pipeline_parallel_size,
        "expert parallel": parallel.enable_expert_parallel,
        "seed": model.seed,
    }
    return {name: str(value) for name, value in settings.items()}


def cpu_cache(options: dict[str, Any]) -> dict[str, Any]:
    """On a CPU a KV cache of a moderate size, if none is given: vLLM wants nearly all of the host's memory for it."""
    from vllm.platforms import current_platform

    given = options.keys() & {"kv_cache_memory_bytes", "gpu_memory_utilization"}
    if given or "VLLM_CPU_KVCACHE_SPACE" in os.environ or not current_platform.is_cpu():
        return {}
    return {"kv_cache_memory_bytes": 2**30}
