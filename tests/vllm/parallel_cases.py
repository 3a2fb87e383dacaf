"""Models and sizes of the parallel tests, importable by their ranks; not a test."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import titan_adapters as ta
from tests.conftest import random_model


@dataclass(frozen=True)
class Case:
    """One engine over several ranks, compared with the torch model in one process."""

    name: str
    cls: type[ta.BaseTransformer]
    config: ta.TransformerConfig
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 2, 3, 40)
    """Tokens of the prompts."""
    extra: Callable | None = None

    def model(self) -> ta.BaseTransformer:
        return random_model(self.cls, self.config)


def tiny(name: str, index: int = 0, **changes: Any) -> tuple[type[ta.BaseTransformer], ta.TransformerConfig]:
    cls = ta.get_model(name)
    return cls, list(cls.tiny_configs().values())[index].model_copy(update=changes)


TP2 = {"tensor_parallel_size": 2}
GROUPS: dict[str, list[Case]] = {
    "tp2": [
        Case("llama", *tiny("llama"), TP2),
        Case("qwen3-one-kv-head", *tiny("qwen3", 1), TP2),
        Case("gemma3", *tiny("gemma3_text"), TP2),
        Case("olmo2", *tiny("olmo2"), TP2),
        Case("olmo2-one-kv-head", *tiny("olmo2", 1), TP2),
    ]
}
