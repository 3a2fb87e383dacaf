"""Training in parallel against training alone: loss, every gradient and, after the steps, every parameter.

Tolerance: relative 1e-5 in fp32 (other orders of summation).
"""

from functools import cache

import pytest

import titan_adapters as ta
from tests.parallel.models import TINY, Gained, Llama, Parts, Whole
from tests.parallel.processes import run_processes
from tests.parallel.training import TOKENS, Case, errors_of_training, replicas_of_gained
from titan_adapters.parallel_sizes import size_problems

TOLERANCE = 1e-5
BATCH = 30
"""So many cases share processes, whose start takes as long as one or two; a crash of theirs fails all of them."""


def _every(*names: str) -> dict[str, tuple[type[ta.BaseTransformer], ta.TransformerConfig]]:
    """Every tiny config of installed families (those in `names`, if any) and of the tests' own models."""
    installed = [ta.get_model(info.name) for info in ta.list_models() if info.source.startswith("installed")]
    models = [*(m for m in installed if not names or m.model_type in names), Parts, Gained]
    return {f"{m.model_type}, {name}": (m, config) for m in models for name, config in m.tiny_configs().items()}


@cache
def _cases(world_size: int) -> dict[str, Case]:
    """By name, so that the tests' processes and their parent mean the same."""
    llama = ta.get_model("llama")
    tied = llama.tiny_configs()["tied, llama3 rope"]
    cases = {}
    if world_size == 2:
        for name, (model, config) in _every().items():
            if config == next(iter(model.tiny_configs().values())) or config.moe_specs():
                cases[f"{name}, fsdp"] = Case(model, config, {"fsdp": 2})
            for axis in ("tp", "ep"):
                if not size_problems(config, **{axis: 2}):
                    cases[f"{name}, {axis}"] = Case(model, config, {axis: 2})
        for name, (model, config) in _every("gpt_oss").items():
            for axis in ("tp", "ep"):
                if config.moe_specs() and not size_problems(config, **{axis: 2}):
                    cases[f"{name}, {axis}, grouped"] = Case(model, config, {axis: 2}, kernel="grouped")
        cases |= {f"{axes}": Case(llama, tied, axes) for axes in ({"fsdp": 1, "tp": 2}, {"dp_shard": 2, "tp": 1})}
        for axes in ({"tp": 2}, {"fsdp": 2}):
            cases[f"recomputed, {axes}"] = Case(llama, tied, axes, recompute=True)
        cases |= _sequence_parallel_cases()
        return cases | {"adamw": Case(llama, tied, {"tp": 2}, optimizer="adamw")}
    for name, (model, config) in _every("llama", "olmo2", "qwen3_moe").items():
        layouts = [{"ep": 2, "tp": 2}, {"fsdp": 2, "ep": 2}] if config.moe_specs() else [{"fsdp": 2, "tp": 2}]
        for axes in layouts:
            if not size_problems(config, ep=axes.get("ep", 1)):
                cases[f"{name}, {' and '.join(axes)}"] = Case(
                    model, config, axes, sequence_parallel="tp" in axes and model is not llama
                )
    olmo2 = ta.get_model("olmo2")
    four = Case(olmo2, next(iter(olmo2.tiny_configs().values())), {"tp": 4})
    return cases | {"two kv heads over four": four, "tokens over four": four._replace(sequence_parallel=True)}


def _sequence_parallel_cases() -> dict[str, Case]:
    """Each family once, and every kind of layer; the numbers of tokens, in `TOKENS`, leave a rank none, or fewer."""
    chosen = {
        name: (model, config)
        for name, (model, config) in _every().items()
        if model is Parts or config == next(iter(model.tiny_configs().values())) or name.startswith("qwen3, tied, one")
    }
    cases = {
        f"{name}, tokens over tp": Case(model, config, {"tp": 2}, sequence_parallel=True)
        for name, (model, config) in chosen.items()
        if not size_problems(config, tp=2)
    }
    first = Case(Llama, TINY, {"tp": 2}, sequence_parallel=True)
    mixtures = {f"{name}, balanced": case for name, case in cases.items() if case.config.moe_specs()}
    return (
        cases
        | {name: case._replace(balance=True) for name, case in mixtures.items()}
        | {"attention, embedding and head whole, tokens over tp": first._replace(model=Whole)}
        | {"recomputed, tokens over tp": first._replace(recompute=True)}
    )


@pytest.mark.parametrize("case", _cases(2))
def test_two_processes_train_as_one(case: str) -> None:
    _check(2, case)


@pytest.mark.parametrize("case", _cases(4))
def test_four_processes_train_as_one(case: str) -> None:
    _check(4, case)


def _check(world_size: int, case: str) -> None:
    for errors in _errors_of_batch(world_size, list(_cases(world_size)).index(case) // BATCH):
        assert sum(name.endswith(" loss") for name in errors[case]) == len(TOKENS)
        assert not {name: error for name, error in errors[case].items() if not error <= TOLERANCE}


@cache
def _errors_of_batch(world_size: int, batch: int) -> list[dict[str, dict[str, float]]]:
    """Per rank, what `errors_of_training` says of these cases."""
    cases = list(_cases(world_size).items())[batch * BATCH : (batch + 1) * BATCH]
    return run_processes(world_size, errors_of_training, dict(cases))


def test_drifting_replicas_are_found() -> None:
    for wrong, right in run_processes(2, replicas_of_gained):
        names = [f"layers.{layer}.feed_forward.gain.weight differs over tp by" for layer in range(3)]
        assert all(name in wrong for name in names) and wrong.count(" - ") == 3
        assert wrong.splitlines()[0] == "Ranks that hold the same parameter have different gradients."
        assert "ta.partwise, not ta.replicate" in wrong.splitlines()[-1]
        assert right == ""
