"""Training in parallel against training alone: loss, every gradient and, after the steps, every parameter.

Tolerance: relative 1e-5 in fp32 (other orders of summation).
"""

import pytest

import titan_adapters as ta
from tests.parallel.models import Parts
from tests.parallel.processes import run_processes
from tests.parallel.training import TOKENS, Case, errors_of_training

TOLERANCE = 1e-5


def _config(model: type[ta.BaseTransformer], start: str) -> ta.TransformerConfig:
    (found,) = (config for name, config in model.tiny_configs().items() if name.startswith(start))
    return found


FAMILIES = [
    ta.get_model(name) for name in ("llama", "qwen3", "gemma3_text", "olmo2", "qwen3_moe", "gpt_oss", "qwen2_moe")
]
FOUR = (
    "llama, biases, one kv head, square",
    "olmo2, tied, one kv head, biases",
    "parts, sinks, gates, narrow values, one kv head",
)


def _cases(world_size: int) -> dict[str, Case]:
    """By name, so that the tests' processes and their parent mean the same."""
    every = {f"{m.model_type}, {name}": (m, c) for m in [*FAMILIES, Parts] for name, c in m.tiny_configs().items()}
    mixtures = {name: (model, config) for name, (model, config) in every.items() if config.moe_specs()}
    even = {
        name: (m, c) for name, (m, c) in mixtures.items() if all(s.num_experts % 2 == 0 for s in c.moe_specs().values())
    }
    llama, tied = FAMILIES[0], _config(FAMILIES[0], "tied")
    if world_size == 2:
        cases = {f"{name}, tp": Case(*what, {"tp": 2}) for name, what in every.items()}
        cases |= {f"{name}, fsdp": Case(*what, {"fsdp": 2}) for name, what in every.items()}
        cases |= {f"{name}, ep": Case(*what, {"ep": 2}) for name, what in even.items()}
        cases |= {f"{name}, grouped, ep": Case(*what, {"ep": 2}, kernel="grouped") for name, what in even.items()}
        cases |= {f"{name}, grouped, tp": Case(*what, {"tp": 2}, kernel="grouped") for name, what in mixtures.items()}
        cases |= {f"{axes}": Case(llama, tied, axes) for axes in ({"fsdp": 1, "tp": 2}, {"dp_shard": 2, "tp": 1})}
        return cases | {"adamw": Case(llama, tied, {"tp": 2}, optimizer="adamw")}
    cases = {f"{name}, fsdp and tp": Case(*every[name], {"fsdp": 2, "tp": 2}) for name in FOUR}
    cases |= {f"{name}, ep and tp": Case(*what, {"ep": 2, "tp": 2}) for name, what in even.items()}
    cases |= {f"{name}, fsdp and ep": Case(*what, {"fsdp": 2, "ep": 2}) for name, what in even.items()}
    olmo2 = FAMILIES[3]
    return cases | {"two kv heads over four ranks": Case(olmo2, _config(olmo2, "gqa"), {"tp": 4})}


@pytest.fixture(scope="module")
def errors_of_two() -> list[dict[str, dict[str, float]]]:
    return run_processes(2, errors_of_training, _cases(2))


@pytest.fixture(scope="module")
def errors_of_four() -> list[dict[str, dict[str, float]]]:
    return run_processes(4, errors_of_training, _cases(4))


@pytest.mark.parametrize("case", _cases(2))
def test_two_processes_train_as_one(errors_of_two: list[dict[str, dict[str, float]]], case: str) -> None:
    _check(errors_of_two, case)


@pytest.mark.parametrize("case", _cases(4))
def test_four_processes_train_as_one(errors_of_four: list[dict[str, dict[str, float]]], case: str) -> None:
    _check(errors_of_four, case)


def _check(errors_of_ranks: list[dict[str, dict[str, float]]], case: str) -> None:
    for errors in errors_of_ranks:
        assert sum(name.endswith(" loss") for name in errors[case]) == len(TOKENS)
        assert not {name: error for name, error in errors[case].items() if not error <= TOLERANCE}
