"""The benchmark's child process: one engine, one JSON request per line of standard input, one JSON answer each.

Run by path, and free of titan_adapters unless it serves ours: vLLM's own implementations start without us.
"""

import json
import os
import platform
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def start(implementation: str, folder: str, options: dict[str, Any]) -> tuple[Any, float]:
    """The engine, a `vllm.LLM`, and the seconds that it took, without imports."""
    import vllm
    from vllm.platforms import current_platform

    # Prompts are token ids, and random checkpoints have no tokenizer.
    options = {"enable_prefix_caching": False, "skip_tokenizer_init": True} | options
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if implementation == "ours":
        from titan_adapters.vllm import LLM

        begin = time.perf_counter()
        return LLM(checkpoint=folder, **options), time.perf_counter() - begin
    if on_cpu and options["tensor_parallel_size"] > 1:
        from titan_adapters.vllm.parallel import Parallel, share_cores

        share_cores(Parallel.from_arguments(options))  # as ours does, and without which vLLM may refuse to start
    options["model_impl"] = "transformers" if implementation == "transformers" else "auto"
    begin = time.perf_counter()
    return vllm.LLM(folder, **options), time.perf_counter() - begin


def machine() -> dict[str, str]:
    """Versions and hardware, from the process that has them loaded anyway."""
    import torch
    import transformers
    import vllm
    from vllm.platforms import current_platform

    found = {"python": platform.python_version(), "vllm": vllm.__version__}
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    return found if current_platform.is_cpu() else found | {"gpu": current_platform.get_device_name()}


def generate(llm: Any, prompts: list[int], outputs: list[int], seed: str) -> float:
    """Seconds for requests of these prompt and output lengths, sent at once; random tokens, the same for one seed."""
    from vllm import SamplingParams

    draw = random.Random(seed)
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    tokens = [{"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(length)]} for length in prompts]
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in outputs]
    begin = time.perf_counter()
    llm.generate(tokens, sampling, use_tqdm=False)
    return time.perf_counter() - begin


def profiled(llm: Any, prompts: list[int], outputs: list[int], seed: str) -> dict[str, list[float]]:
    """Such requests once more, with a profiler on rank 0 only: by name, the calls, and microseconds of the device."""
    llm.collective_rpc(start_profiler)
    try:
        generate(llm, prompts, outputs, seed)
    finally:
        found = llm.collective_rpc(stop_profiler)
    return found[0]


def start_profiler(worker: Any) -> None:
    if worker.rank == 0:
        worker.bench_profiler = new_profiler()
        worker.bench_profiler.start()


def stop_profiler(worker: Any) -> dict[str, list[float]]:
    if worker.rank != 0:
        return {}
    profiler = worker.__dict__.pop("bench_profiler")
    profiler.stop()
    return kernel_times(profiler)


def new_profiler() -> Any:
    """torch's, of the device if there is one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])


def kernel_times(profiler: Any) -> dict[str, list[float]]:
    """By name of a kernel or of a function of CUDA: calls, and microseconds on the device."""
    import torch

    time = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return {event.key: [event.count, getattr(event, time)] for event in profiler.key_averages()}


def model_class(worker: Any) -> str:
    """Of the model that one rank serves: `worker` is vLLM's."""
    return type(worker.get_model()).__name__


def graphs(worker: Any) -> str:
    """Where one rank's compiled graphs came from, by vLLM's own counters."""
    from vllm.compilation.counter import compilation_counter as counter

    if counter.num_aot_compiles:
        return "compiled"
    return "from the cache" if counter.num_aot_artifacts_loaded else "none"


def peak_memory(worker: Any) -> dict[str, float]:
    """GiB of one rank. On a device, what was allocated at most less the KV cache, whose size is
    chosen, not needed."""
    import torch

    memory = {"host peak GiB": host_peak()}
    if torch.cuda.is_available():
        runner = worker.model_runner
        storages = [tensor.untyped_storage() for tensor in runner.kv_caches]
        cache = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        memory["weights GiB"] = runner.model_memory_usage / 2**30
        memory["device peak GiB"] = (torch.cuda.max_memory_allocated() - cache) / 2**30
    return memory


def host_peak() -> float:
    """GiB. Of this program alone: what getrusage tells begins with what the parent process had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError("/proc/self/status has no VmHWM")


def all_memory(llm: Any, options: dict[str, Any]) -> dict[str, float]:
    """Sums over ranks, and this process if it is none of them."""
    ranks = llm.collective_rpc(peak_memory)
    total = {key: sum(rank[key] for rank in ranks) for key in ranks[0]}
    if options["tensor_parallel_size"] > 1:
        total["host peak GiB"] += host_peak()
    return total


def serve(answer: Any) -> None:
    implementation, folder, options = json.loads(sys.argv[1])
    llm, seconds = start(implementation, folder, options)
    served = llm.collective_rpc(model_class)[0]  # "native" is not, if vLLM fell back to Transformers
    found = {"machine": machine(), "class": served, "graphs": ", ".join(sorted({*llm.collective_rpc(graphs)}))}
    answer({"engine start s": seconds, **found})
    requests: dict[str, Callable[..., dict[str, Any]]] = {
        "seconds": lambda **lengths: {"seconds": generate(llm, **lengths)},
        "profile": lambda **lengths: profiled(llm, **lengths),
        "memory": lambda: all_memory(llm, options),
    }
    for line in sys.stdin:
        what, arguments = json.loads(line)
        answer(requests[what](**arguments))
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that this process is the engine, or else its ranks' parent
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to the log

    def answer(result: dict[str, Any]) -> None:
        print(json.dumps(result), file=answers, flush=True)

    try:
        serve(answer)
    except Exception as error:
        traceback.print_exc()
        answer({"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]})
        sys.exit(1)


if __name__ == "__main__":
    main()
