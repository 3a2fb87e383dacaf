"""What the parallel tests run on several ranks: `torchrun -m tests.vllm.ranks GROUP FOLDER`; not a test.

A group builds one engine after the other in the same processes, because processes cost more than engines. The first
rank prints one line of JSON for each, prefixed with RESULT.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

import titan_adapters as ta
from tests.conftest import random_tokens
from tests.vllm.conftest import SMALL, error_against_torch, generate
from tests.vllm.parallel_cases import GROUPS, Case, of_every_rank, reload
from titan_adapters.state_dict import native_tensors
from titan_adapters.vllm.loader import WeightWriter

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


@contextmanager
def shapes_before_loading() -> Iterator[dict[str, list[int]]]:
    """Shapes of the engine's parameters as they are first written. Later, the CPU's linears keep a repacked copy."""
    original, shapes = WeightWriter.write, {}

    def write(writer: WeightWriter, weights):
        for name, parameter in writer._swap.model.named_parameters():
            shapes.setdefault(name, list(parameter.shape))
        return original(writer, weights)

    with mock.patch.object(WeightWriter, "write", write):
        yield shapes


def run(case: Case, folder: Path) -> dict:
    """Start the engine and compare all logprobs with the torch model's."""
    model = case.model()
    options = SMALL | {"skip_tokenizer_init": True, "distributed_executor_backend": "external_launcher"}
    with shapes_before_loading() as shapes:
        llm = ta.vllm.LLM(checkpoint=folder / case.name, **options | case.options)
        ENGINES.append(llm)
        if case.options.get("load_format") == "titan_skip":
            reload(llm, native_tensors(model))
    prompts = [random_tokens(model.config, length, seed=length).tolist() for length in case.lengths]
    # Under torchrun, vLLM computes prompt logprobs on every stage, also those without a head.
    one_stage = "pipeline_parallel_size" not in case.options
    batches = [*([prompt] for prompt in prompts if len(prompt) < 4), prompts]  # also steps of very few tokens
    outputs = [o for batch in batches for o in generate(llm, batch, max_tokens=4, prompt_logprobs=one_stage)]
    return {
        "name": case.name,
        "error": error_against_torch(model, outputs),
        "shapes": of_every_rank(shapes),
        "extra": case.extra(llm, model, outputs) if case.extra else None,
        "claims": {row.claim: [row.verdict, row.problems] for row in ta.vllm.weight_proof(llm, model)},
    }


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
