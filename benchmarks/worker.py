"""The child process of bench.py: one engine, one request per line of standard input, one RESULT line per answer."""

import json
import os
import random
import resource
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that this process is the engine, and its memory ours to read
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def start(name: str, folder: str, options: dict):
    import vllm

    # Prompts are token ids, and random checkpoints have no tokenizer.
    options = options | {"enable_prefix_caching": False, "skip_tokenizer_init": True}
    if name == "ours":
        import titan_adapters as ta

        return ta.vllm.LLM(checkpoint=folder, **options)
    return vllm.LLM(folder, model_impl="transformers" if name == "transformers" else "auto", **options)


def timed(llm, prompts: list[list[int]], max_tokens: int) -> float:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return time.perf_counter() - begin


def main() -> None:
    name, folder, options, lengths = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
    decode_tokens, (prefill_requests, prefill_length) = lengths["decode_tokens"], lengths["prefill"]
    draw = random.Random(0)  # the same prompts for every implementation
    llm = None
    for line in sys.stdin:
        request = line.strip()
        if request == "start":
            begin = time.perf_counter()
            llm = start(name, folder, options)
            result = {"start s": time.perf_counter() - begin}
        elif request == "memory":
            result = {"host peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # of host memory
        elif request == "prefill":
            prompts = [[draw.randrange(5, 40000) for _ in range(prefill_length)] for _ in range(prefill_requests)]
            result = {"prefill tok/s": prefill_requests * prefill_length / timed(llm, prompts, 1)}
        else:
            size = int(request.removeprefix("decode "))
            prompts = [[draw.randrange(5, 40000) for _ in range(16)] for _ in range(size)]
            result = {f"decode {size} tok/s": size * decode_tokens / timed(llm, prompts, decode_tokens)}
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
