"""Models and sizes of the parallel tests, importable by their ranks; not a test."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

import titan_adapters as ta
from tests.conftest import random_model
from tests.verify.faults import RANK_FAULTS
from tests.vllm.conftest import error_against_torch, generate
from tests.vllm.models import TINY, Free, FreeAttention, OwnParts
from tests.vllm.moe_models import Mixture
from titan_adapters.state_dict import native_tensors


def of_every_rank(value: Any) -> list[Any]:
    from vllm.distributed import get_world_group

    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value, group=get_world_group().cpu_group)
    return gathered


def reload(llm: Any, weights: dict[str, Tensor]) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})


def update(llm: Any, model: ta.BaseTransformer, outputs: list) -> list[float]:
    """Errors after reloads that bring other weights, of the whole model and then of one layer."""
    ours, errors = native_tensors(model), []
    for seed, prefix in ((7, ""), (8, "layers.1.")):
        other = native_tensors(random_model(type(model), model.config, seed))
        weights = {name: tensor for name, tensor in other.items() if name.startswith(prefix)}
        reload(llm, weights)
        with torch.no_grad():
            for name, tensor in weights.items():
                ours[name].copy_(tensor)
        again = generate(llm, [output.prompt_token_ids for output in outputs], max_tokens=4)
        errors.append(error_against_torch(model, again))
    return errors


def routing(llm: Any, model: ta.BaseTransformer, outputs: list) -> list[dict[int, bool]]:
    """Of every rank, for every recorded layer, whether it chose the experts that the torch model chooses."""
    llm.reset_prefix_cache()
    with ta.vllm.record_routing(llm) as recorded:
        again = generate(llm, [o.prompt_token_ids for o in outputs[-4:]], max_tokens=4, prompt_logprobs=False)
    same: dict[int, bool] = {}
    for output in again:
        tokens = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])[:-1]
        with torch.no_grad(), ta.nn.record_routing(model) as record:
            model(tokens)
        for layer, experts in recorded.of(output).items():
            equal = torch.equal(experts.sort(-1).values, record.experts()[layer].sort(-1).values)
            same[layer] = same.get(layer, True) and equal
    return of_every_rank(same)


class EveryRank:
    """An engine that asks the workers of all ranks. Under torchrun, each has a front end that asks its own."""

    def __init__(self, llm: Any):
        self._llm = llm

    def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        return list(chain.from_iterable(of_every_rank(self._llm.collective_rpc(*args, **kwargs))))


def seeded_faults(llm: Any, model: ta.BaseTransformer, outputs: list) -> dict[str, Any]:
    """Without a fault (""), and with each: the first wrong stage, and the claims about weights that fail."""
    prompt, found = [outputs[-1].prompt_token_ids], {}
    for fault in [None, *RANK_FAULTS]:
        with fault.seeded(llm, model) if fault else nullcontext():
            with ta.vllm.record_stages(EveryRank(llm)) as recorded:
                (output,) = generate(llm, prompt, max_tokens=4)
            stage = ta.verify.first_fault(ta.verify.check_stages(model, recorded.of(output), torch.float32))
            rows = ta.vllm.weight_proof(llm, model)
        names = {row.claim: [p.partition(": ")[0] for p in row.problems] for row in rows if row.verdict == "failed"}
        found[fault.name if fault else ""] = [stage and [stage.path, stage.kind], names]
        of_every_rank(None)  # all have read what others recorded
    return found


@dataclass(frozen=True)
class Case:
    """One engine over several ranks, compared with the torch model in one process."""

    name: str
    """Also that of its checkpoint folder."""
    cls: type[ta.BaseTransformer]
    config: ta.TransformerConfig
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 2, 3, 40)
    """Tokens of the prompts."""
    extra: Callable[[Any, ta.BaseTransformer, list], Any] | None = None
    """What else to find out about the engine."""

    def model(self) -> ta.BaseTransformer:
        ta.register_model(self.cls)
        return random_model(self.cls, self.config)


def tiny(name: str, index: int = 0, **changes: Any) -> tuple[type[ta.BaseTransformer], ta.TransformerConfig]:
    cls = ta.get_model(name)
    return cls, list(cls.tiny_configs().values())[index].model_copy(update=changes)


TP2 = {"tensor_parallel_size": 2}
TP4 = {"tensor_parallel_size": 4}
PP2 = {"pipeline_parallel_size": 2}
EP2 = TP2 | {"enable_expert_parallel": True}
TORCH_EXPERTS = {"additional_config": {"titan_experts": "torch"}}

MOE_FAMILIES = ("gpt_oss", "qwen3_moe", "qwen2_moe", "glm4_moe", "mixtral", "olmoe", "llama4_text")
FREE = list(FreeAttention.tiny_configs().values())
MIXTURES = dict(zip(("plain", "shared", "sigmoid", "bias"), Mixture.tiny_configs().values(), strict=True))


def with_heads(config: Any, num_heads: int, num_kv_heads: int) -> Any:
    """A `FreeAttention` config with other numbers of heads in all layers."""
    changed = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return config.model_copy(update={"specs": tuple(spec.model_copy(update=changed) for spec in config.specs)})


SKIP = {"load_format": "titan_skip"}

GROUPS: dict[str, list[Case]] = {
    "tp2": [
        Case("llama", *tiny("llama"), TP2, extra=seeded_faults),
        Case("llama-tied, updated", *tiny("llama", 1), TP2 | SKIP, extra=update),
        Case("llama, one kv head, biases", *tiny("llama", 2), TP2),
        Case("qwen3, one kv head", *tiny("qwen3", 1), TP2),
        Case("gemma3", *tiny("gemma3_text"), TP2),
        Case("olmo2", *tiny("olmo2"), TP2),
        Case("olmo2, one kv head, updated", *tiny("olmo2", 1), TP2 | SKIP, extra=update),
        Case("starcoder2", *tiny("starcoder2"), TP2),
        Case("sinks", FreeAttention, FREE[0], TP2),
        Case("wide values, gated channels", FreeAttention, FREE[3], TP2),
        Case("narrow values, sinks, gated heads, updated", FreeAttention, FREE[4], TP2, extra=update),
        Case("separate projections, one kv head, updated", FreeAttention, with_heads(FREE[4], 6, 1), TP2, extra=update),
        Case("own parts", OwnParts, TINY, TP2),
        *(Case(name, *tiny(name), TP2) for name in MOE_FAMILIES),
        *(Case(f"{name}, whole experts", *tiny(name), EP2) for name in MOE_FAMILIES),
        Case("ungated", Free, list(Free.tiny_configs().values())[1], TP2),
        *(Case(f"{name} experts, fused", Mixture, config, TP2, extra=routing) for name, config in MIXTURES.items()),
        *(Case(f"{name} experts, torch", Mixture, config, TP2 | TORCH_EXPERTS) for name, config in MIXTURES.items()),
        *(Case(f"{name} experts, whole", Mixture, config, EP2, extra=routing) for name, config in MIXTURES.items()),
        Case("whole experts, updated", Mixture, MIXTURES["bias"], EP2 | SKIP, extra=update),
    ],
    "tp4": [  # two kv heads, each on two ranks
        Case("olmo2", *tiny("olmo2"), TP4),
        Case("separate projections, sinks", FreeAttention, with_heads(FREE[4], 4, 2), TP4),
    ],
    "pp2": [
        Case("llama", *tiny("llama"), PP2),
        Case("llama, tied", *tiny("llama", 1), PP2),
        Case("gemma3", *tiny("gemma3_text"), PP2 | SKIP),
        Case("olmo2", *tiny("olmo2"), PP2),
        Case("qwen3_moe", *tiny("qwen3_moe"), PP2),
        Case("gpt_oss", *tiny("gpt_oss"), PP2),
        Case("mixture", Mixture, MIXTURES["shared"], PP2, extra=routing),
    ],
}
"""By what is passed to torchrun: the sizes of a group are the same for all of its engines."""
