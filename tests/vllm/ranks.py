"""What the parallel tests run on several ranks: `torchrun -m tests.vllm.ranks GROUP FOLDER`; not a test.

A group builds one engine after the other in the same processes, because processes cost more than engines. The first
rank prints one line of JSON for each, prefixed with RESULT.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

import titan_adapters as ta
from tests.conftest import random_tokens
from tests.vllm.conftest import SMALL, error_against_torch, generate
from tests.vllm.parallel_cases import GROUPS, Case

RANK = int(os.environ["RANK"])
ENGINES = []
"""Kept: the end of one engine would be the end of the process groups that all of them share."""


def name_shared_memory_apart() -> None:
    """Two such jobs on one host, or one after another that was killed, would find each other's shared memory.

    vLLM names it after the port of the process group, and torchrun's address has none in it.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original, job = _CPUSHMDistributed.make_group_name, os.environ["MASTER_PORT"]
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: job + original(communicator).strip("/"))


def run(case: Case, folder: Path) -> dict:
    model = case.model()
    config = model.config
    options = SMALL | {"skip_tokenizer_init": True, "distributed_executor_backend": "external_launcher"}
    begin = time.perf_counter()
    llm = ta.vllm.LLM(checkpoint=folder / case.name, **options | case.options)
    ENGINES.append(llm)
    started = time.perf_counter() - begin
    prompts = [random_tokens(config, length, seed=length).tolist() for length in case.lengths]
    outputs = generate(llm, prompts, max_tokens=4)
    result = {"name": case.name, "error": error_against_torch(model, outputs), "start": started}
    result["extra"] = case.extra(llm, model, outputs) if case.extra else None
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    name_shared_memory_apart()
    for case in GROUPS[sys.argv[1]]:
        try:
            result = run(case, Path(sys.argv[2]))
        except Exception as error:
            traceback.print_exc()
            result = {"name": case.name, "failure": f"{type(error).__name__}: {error}"}
        if RANK == 0:
            print("RESULT " + json.dumps(result), flush=True)
