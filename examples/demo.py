"""The main job, end to end: real weights, one model definition, vLLM, and a comparison with vLLM's own Llama.

    python examples/demo.py [--compile]

Checkpoint folders are kept in .demo and used again. Engines run in this process; without --compile they are eager,
which starts faster and generates slower.
"""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

from smollm2 import native_folder, published_folder

PROMPT = "The capital of France is"
PROMPTS = [
    PROMPT,
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "To make a good cup of tea, first",
    "In 1969, for the first time,",
    "The opposite of 'cold' is",
    "The history of the Roman Empire begins with the founding of the city. It grew into a great power that ruled the "
    "Mediterranean for centuries, and its laws, language and roads",
    "import numpy as np\n\ndef softmax(x):\n    e = np.exp(x - x.max())\n    return e / e.sum()\n\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
]
TOKENS = 64
WIDEST_GAP = 0.5  # nats between native's two best tokens where continuations may part: four bf16 steps of a logit


def main() -> None:
    root = Path(".demo")
    published, native = published_folder(root), native_folder(root)
    print(f"Checkpoint: {native} ({', '.join(sorted(p.name for p in native.iterdir()))})")

    import vllm

    import titan_adapters as ta
    from titan_adapters.vllm.compare import compare_outputs, comparison_sampling

    options = {"max_model_len": 1024, "max_num_seqs": 32, "enforce_eager": "--compile" not in sys.argv}
    print("Starting vLLM with titan_models.llama:Llama ...", flush=True)
    start = time.perf_counter()
    ours = ta.vllm.LLM(checkpoint=native, **options)
    print(f"Started in {time.perf_counter() - start:.1f} s")
    continuation = ours.generate(PROMPT, vllm.SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
    text = continuation.outputs[0].text
    print(f"\n    {PROMPT}\033[1m{text}\033[0m\n")
    if "Paris" not in text:
        raise SystemExit("the continuation should contain 'Paris'")

    fixed = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for prompts in (PROMPTS[:1], (PROMPTS * 3)[:32]):
        start = time.perf_counter()
        ours.generate(prompts, fixed, use_tqdm=False)
        rate = len(prompts) * TOKENS / (time.perf_counter() - start)
        print(f"{rate:.0f} tokens per second with {len(prompts)} request(s) at once")

    outputs = ours.generate(PROMPTS, comparison_sampling(TOKENS), use_tqdm=False)
    print("Starting vLLM's own Llama on the same weights ...", flush=True)
    reference = vllm.LLM(str(published), **options)
    comparison = compare_outputs(outputs, reference.generate(PROMPTS, comparison_sampling(TOKENS), use_tqdm=False))
    print(f"Ours against vLLM's native Llama in bf16: {comparison}")
    print("Bitwise equality is not to be had in bf16, nor does native have it with itself: see docs/numerics.md")
    if comparison.largest_gap > WIDEST_GAP:
        raise SystemExit("that is more than rounding: " + "; ".join(comparison.mismatches))


if __name__ == "__main__":
    main()
