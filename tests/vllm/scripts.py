"""What the tests run in interpreters of their own: `python -m tests.vllm.scripts NAME FOLDER...`; not a test.

Each prints one line of JSON, prefixed with RESULT.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import titan_adapters as ta
from tests.vllm.models import TINY, Llama

PROMPTS = [[5, 17, 99, 3, 64, 23, 8, 120, 77, 41, 2, 19], [7, 7, 1]]
OPTIONS = {
    "max_model_len": 128,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 64,
    "max_logprobs": -1,
    "skip_tokenizer_init": True,
}


class OnlyHere(Llama):
    model_type = "only-here"


def sampling():
    import vllm

    return vllm.SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=-1, detokenize=False
    )


def logprobs_of(output) -> list:
    """[position][token]: of prompt tokens and of four greedy ones."""
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [[row[token].logprob for token in range(len(row))] for row in rows]


def logprobs(llm) -> list:
    """`logprobs_of` each prompt."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling(), use_tqdm=False)
    return [logprobs_of(output) for output in outputs]


def stock(folder: str) -> dict:
    """A stock script: nothing of ours but the registration, vLLM's own defaults: compiled, in an engine process."""
    import vllm

    ta.register_model("tests.vllm.models:Registered")
    llm = vllm.LLM(folder, config_format="titan", dtype="float32", **OPTIONS)
    client = type(llm.llm_engine.engine_core).__name__
    return {"logprobs": logprobs(llm), "client": client}


def two_compiled(first: str, second: str) -> dict:
    """Two models, compiled, in one process at the same time."""
    engines = [ta.vllm.LLM(checkpoint=folder, **OPTIONS) for folder in (first, second)]
    return {"logprobs": [logprobs(llm) for llm in engines], "again": [logprobs(llm) for llm in engines]}


def in_main(folder: str) -> dict:
    """A class of this script, which is `__main__`: refused for an engine process, served in this one."""
    ta.register_model(OnlyHere)
    ta.save_checkpoint(OnlyHere(TINY), Path(folder) / "checkpoint")
    try:
        ta.vllm.LLM(checkpoint=Path(folder) / "checkpoint", enforce_eager=True, **OPTIONS)
        refusal = None
    except ta.TitanError as error:
        refusal = str(error)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = ta.vllm.LLM(checkpoint=Path(folder) / "checkpoint", enforce_eager=True, **OPTIONS)
    return {"refusal": refusal, "served": len(logprobs(llm))}


def parallel(folder: str, options: str) -> dict:
    """One engine over several processes, which vLLM starts as it does for users."""
    llm = ta.vllm.LLM(checkpoint=folder, enforce_eager=True, **OPTIONS | json.loads(options))
    return {"logprobs": logprobs(llm), "fingerprint": ta.vllm.fingerprint(llm)}


def replicas(folder: str) -> dict:
    """Two engines behind one front end, each of which answers one prompt."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = ta.vllm.engine_args(checkpoint=folder, data_parallel_size=2, enforce_eager=True, **OPTIONS)

    async def last(llm, rank: int):
        async for output in llm.generate(
            {"prompt_token_ids": PROMPTS[rank]}, sampling(), f"request-{rank}", data_parallel_rank=rank
        ):
            latest = output
        return latest

    async def all_outputs():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        outputs = await asyncio.gather(*(last(llm, rank) for rank in range(2)))
        llm.shutdown()
        return outputs

    return {"logprobs": [logprobs_of(output) for output in asyncio.run(all_outputs())]}


if __name__ == "__main__":
    scripts = (stock, two_compiled, in_main, parallel, replicas)
    script = {script.__name__: script for script in scripts}[sys.argv[1]]
    print("RESULT " + json.dumps(script(*sys.argv[2:])), flush=True)
