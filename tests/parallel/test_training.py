"""Training in parallel against training alone: loss, every gradient and, after the steps, every parameter.

Tolerance: relative 1e-5 in fp32 (other orders of summation).
"""

import pytest

import titan_adapters as ta
from tests.parallel.models import Parts
from tests.parallel.processes import run_processes
from tests.parallel.training import Case, errors_of_training

TOLERANCE = 1e-5


def _config(model: type[ta.BaseTransformer], start: str) -> ta.TransformerConfig:
    (found,) = (config for name, config in model.tiny_configs().items() if name.startswith(start))
    return found


def _cases(world_size: int) -> dict[str, Case]:
    families = {name: ta.get_model(name) for name in ("llama", "qwen3", "gemma3_text", "olmo2")}
    cases = {}
    if world_size == 2:
        for model in [*families.values(), Parts]:
            for name, config in model.tiny_configs().items():
                for axes in ({"tp": 2}, {"fsdp": 2}):
                    cases[f"{model.model_type}, {name}, {axes}"] = Case(model, config, axes)
                if config.moe_specs():
                    cases[f"{model.model_type}, {name}, ep"] = Case(model, config, {"ep": 2})
                    for axis in ("tp", "ep"):
                        case = Case(model, config, {axis: 2}, kernel="grouped")
                        cases[f"{model.model_type}, {name}, {axis}, grouped"] = case
        llama = families["llama"]
        for axes in ({"fsdp": 1, "tp": 2}, {"dp_shard": 1, "tp": 2}, {"fsdp": 2, "tp": 1}):
            cases[f"llama, {axes}"] = Case(llama, _config(llama, "tied"), axes)
        cases["llama, adamw"] = Case(llama, _config(llama, "gqa"), {"tp": 2}, optimizer="adamw")
    return cases


@pytest.fixture(scope="module")
def errors_of_two() -> list[dict[str, dict[str, float]]]:
    return run_processes(2, errors_of_training, _cases(2))


@pytest.mark.parametrize("case", _cases(2))
def test_two_processes_train_as_one(errors_of_two: list[dict[str, dict[str, float]]], case: str) -> None:
    for errors in errors_of_two:
        wrong = {name: error for name, error in errors[case].items() if not error <= TOLERANCE}
        assert not wrong
