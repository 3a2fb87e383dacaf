"""Helpers that all tests share: `from tests.conftest import ...`.

The test folders are packages, so that two of them may each have a conftest, and so that `tests/` itself is never on
the import path, where its `vllm` folder would pass for the engine.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import titan_adapters as ta
from titan_adapters import registry
from titan_adapters.state_dict import native_tensors

# The models are so small that handing work to other threads costs more than doing it: 6 s against 90 on two busy cores.
torch.set_num_threads(1)

# No deadline, because the machine may be busy; the same examples every time, because a red run must be repeatable.
settings.register_profile("titan", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("titan")

INSTALLED = [info.name for info in ta.list_models() if info.source.startswith("installed")]

EVERY_MODEL = [
    pytest.param(model, config, id=f"{installed}: {name}")
    for installed in INSTALLED
    for model in [ta.get_model(installed)]
    for name, config in model.tiny_configs().items()
]
"""(model class, config) of every installed model's every tiny config."""


WINDOWED = [info.name for info in ta.list_models() if "windows" in ta.get_model(info.name).Config.model_fields]


def load_script(path: Path) -> ModuleType:
    """A script that no package holds, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_windowed_layer(cls: type[ta.BaseTransformer], *windows: int) -> ta.TransformerConfig:
    """The first tiny config of a family in `WINDOWED`, with as many layers as there are `windows`.

    Only so few layers show the edge of a window: n of them reach n times as far back.
    """
    config = next(iter(cls.tiny_configs().values()))
    changed: dict[str, object] = {"num_layers": len(windows), "windows": windows}
    for name, field in cls.Config.model_fields.items():
        if "per layer" in field.metadata and name != "windows":
            changed[name] = getattr(config, name)[:1] * len(windows)
    config = config.model_copy(update=changed)
    assert [spec.window for spec in config.attention_specs()] == list(windows)
    return config


def random_model(model: type[ta.BaseTransformer], config: ta.TransformerConfig, seed: int = 0) -> ta.BaseTransformer:
    """A model whose weights are all random, so that no bias is zero and no norm is a no-op.

    Deviation 0.2 keeps scores far from uniform; norms are around 1, none within 0.1 of it.
    """
    torch.manual_seed(seed)
    built = model(config).to(getattr(torch, config.dtype))
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.normal_(std=0.2)
            if name.endswith("norm.weight"):
                parameter.add_(torch.where(parameter < 0, 0.9, 1.1))
        for name, tensor in native_tensors(built).items():
            if not isinstance(tensor, nn.Parameter):  # a persistent buffer, such as a router's correction bias
                built.get_buffer(name).normal_(std=0.2)
    return built.eval()


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """2-norm of the difference over the 2-norm of the reference, both in fp64; NaN anywhere is a failure."""
    assert actual.shape == reference.shape
    actual, reference = actual.detach().double(), reference.detach().double()
    assert not actual.isnan().any() and not reference.isnan().any()
    assert reference.norm() > 0
    return float((actual - reference).norm() / reference.norm())


def random_tokens(config: ta.TransformerConfig, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def assert_bitwise_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def titan_error_text(caught: pytest.ExceptionInfo) -> str:
    """The message of a TitanError, after a check of what all of them promise: the last line says what to do."""
    text = str(caught.value)
    assert text.splitlines()[-1].startswith("Fix: ") and len(text.splitlines()[-1]) > 10
    return text


@pytest.fixture(scope="module")
def no_registrations_left() -> Iterator[None]:
    """Models that a module's tests register are gone after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
        patch.setenv(registry.ENVIRONMENT, os.environ.get(registry.ENVIRONMENT, ""))
        yield
