"""Models and sizes of the parallel tests, importable by their ranks; not a test."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import titan_adapters as ta
from tests.conftest import random_model
from tests.vllm.models import TINY, Free, FreeAttention, Mixture, OwnParts


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
        ta.register_model(self.cls)
        return random_model(self.cls, self.config)


def tiny(name: str, index: int = 0, **changes: Any) -> tuple[type[ta.BaseTransformer], ta.TransformerConfig]:
    cls = ta.get_model(name)
    return cls, list(cls.tiny_configs().values())[index].model_copy(update=changes)


TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
EP2 = TP2 | {"enable_expert_parallel": True}
TORCH_EXPERTS = {"additional_config": {"titan_experts": "torch"}}

FREE = list(FreeAttention.tiny_configs().values())
MIXTURES = dict(zip(("plain", "shared", "sigmoid", "bias"), Mixture.tiny_configs().values(), strict=True))


def one_kv_head(config: Any) -> Any:
    """All layers of a `FreeAttention` config with one kv head, which two ranks replicate."""
    specs = tuple(spec.model_copy(update={"num_kv_heads": 1}) for spec in config.specs)
    return config.model_copy(update={"specs": specs})


GROUPS: dict[str, list[Case]] = {
    "tp2": [
        Case("llama", *tiny("llama"), TP2),
        Case("llama-tied", *tiny("llama", 1), TP2),
        Case("llama-biases-one-kv-head", *tiny("llama", 2), TP2),
        Case("qwen3-one-kv-head", *tiny("qwen3", 1), TP2),
        Case("gemma3", *tiny("gemma3_text"), TP2),
        Case("olmo2", *tiny("olmo2"), TP2),
        Case("olmo2-one-kv-head", *tiny("olmo2", 1), TP2),
        Case("starcoder2", *tiny("starcoder2"), TP2),
        Case("sinks", FreeAttention, FREE[0], TP2),
        Case("wide-values-gated-channels", FreeAttention, FREE[3], TP2),
        Case("narrow-values-gated-heads", FreeAttention, FREE[4], TP2),
        Case("separate-projections-one-kv-head", FreeAttention, one_kv_head(FREE[4]), TP2),
        Case("own-parts", OwnParts, TINY, TP2),
        Case("ungated", Free, list(Free.tiny_configs().values())[1], TP2),
        *(Case(f"fused-{name}", Mixture, config, TP2) for name, config in MIXTURES.items()),
        *(Case(f"torch-{name}", Mixture, config, TP2 | TORCH_EXPERTS) for name, config in MIXTURES.items()),
        *(Case(f"whole-{name}", Mixture, config, EP2) for name, config in MIXTURES.items()),
    ],
    "pp2": [
        Case("llama", *tiny("llama"), PP2),
        Case("llama-tied", *tiny("llama", 1), PP2),
        Case("gemma3", *tiny("gemma3_text"), PP2),
        Case("olmo2", *tiny("olmo2"), PP2),
        Case("mixture", Mixture, MIXTURES["shared"], PP2),
    ],
}
