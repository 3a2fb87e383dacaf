"""How an engine splits a model over ranks, and what is refused before any of them takes memory."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import EngineError
from titan_adapters.nn import Attention, FeedForward, InnerExperts, QKVLinear, Router
from titan_adapters.parallel_sizes import size_problems
from titan_adapters.plan import Style, colwise, expertwise, replicate, rowwise, split_styles, vocabwise

if TYPE_CHECKING:
    from vllm.config import VllmConfig

THREADS = "VLLM_CPU_OMP_THREADS_BIND"
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Parallel:
    """The sizes that an engine was asked for."""

    tp: int
    pp: int
    dp: int
    expert: bool
    """Whether whole experts are distributed over all tensor- and data-parallel ranks."""
    context: int
    """Ranks over which a request's tokens are split, in prefill or decode."""
    sequence: bool
    """Whether tokens are split over tensor-parallel ranks between the layers' halves."""

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> "Parallel":
        """From keyword arguments of vLLM's engine."""
        compilation = arguments.get("compilation_config")
        passes = compilation.get("pass_config", {}) if isinstance(compilation, dict) else {}
        return cls(
            tp=arguments.get("tensor_parallel_size", 1),
            pp=arguments.get("pipeline_parallel_size", 1),
            dp=arguments.get("data_parallel_size", 1),
            expert=arguments.get("enable_expert_parallel", False),
            context=arguments.get("prefill_context_parallel_size", 1)
            * arguments.get("decode_context_parallel_size", 1),
            sequence=isinstance(passes, dict) and bool(passes.get("enable_sp")),
        )

    @classmethod
    def from_vllm(cls, vllm_config: "VllmConfig") -> "Parallel":
        parallel = vllm_config.parallel_config
        return cls(
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            dp=parallel.data_parallel_size,
            expert=parallel.enable_expert_parallel,
            context=parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size,
            # Where vLLM has such a pass, it turns it on by itself too, and then finds none of its own norms to rewrite.
            sequence=False,
        )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


def parallel_problems(cls: type[BaseTransformer], config: TransformerConfig, parallel: Parallel) -> list[str]:
    """Why `cls` can't be split like this, one line each; empty if it can."""
    problems = size_problems(config, parallel.tp, parallel.pp, parallel.tp * parallel.dp if parallel.expert else 1)
    if parallel.context > 1:
        problems.append(
            f"context parallelism over {parallel.context} ranks: the partial attention of ranks that hold other tokens "
            "of a request would have to be merged, which vLLM does for its own models' layers only"
        )
    if parallel.sequence:
        problems.append(
            "sequence parallelism (pass_config.enable_sp): vLLM's rewriting of all-reduces knows its own norms, "
            "not the model's"
        )
    if parallel.dp > 1 and config.moe_specs():
        problems.append(
            f"data_parallel_size {parallel.dp} with mixtures of experts: vLLM then exchanges tokens between replicas "
            "in each mixture, which is not tested here; start independent engines instead"
        )
    if parallel.pp > 1:
        problems += [
            f"pipeline_parallel_size {parallel.pp}: {cls.__name__} overrides {name}, so that more than x may have to "
            "pass from one stage to the next"
            for name in ("run_layers", "forward")
            if getattr(cls, name) is not getattr(BaseTransformer, name)
        ]
    return problems


def check_parallel(cls: type[BaseTransformer], config: TransformerConfig, parallel: Parallel) -> None:
    """Refuse what can't be split as asked, with every reason and the sizes that are legal."""
    if problems := parallel_problems(cls, config, parallel):
        raise EngineError(f"This {cls.model_type} can't be split like that.", problems, fix="choose other sizes.")


def plan_problems(model: BaseTransformer, styles: dict[str, Style], tp: int) -> list[str]:
    """Rows of a plan that `tp` ranks can't follow, because modules that belong together are planned apart."""
    if tp == 1:
        return []
    problems: list[str] = []

    def expect(path: str, wanted: Style, why: str) -> None:
        if path in styles and styles[path] is not wanted:
            problems.append(f"{path} is planned {styles[path]}, {wanted} is needed: {why}")

    heads: set[str] = set()
    for path, module in model.named_modules():
        wanted, why = split_styles(path, module), "each rank's attention has its own heads"
        if isinstance(module, FeedForward):
            why = "the hidden channels are split in all three or in none"
            if {styles.get(part) for part in wanted} == {replicate}:
                continue
        elif isinstance(module, QKVLinear):
            heads |= wanted.keys()  # which are split by head, or replicated
        elif isinstance(module, InnerExperts):
            expect(path, expertwise, "a rank holds a part of every expert, or whole ones")
        elif isinstance(module, Router):
            expect(f"{path}.gate", replicate, "every rank routes every token")
        elif isinstance(module, nn.Linear) and module is not model.lm_head and path not in heads:
            split = {colwise: module.out_features, rowwise: module.in_features}.get(styles[path], 0)
            if split % tp:
                problems.append(f"{path} is planned {styles[path]}, but {split} is not divisible by {tp}")
        elif isinstance(module, Attention) and module.spec.qk_norm is not None:
            for name in ("q_norm", "k_norm") if module.spec.qk_norm.scope == "per_head" else ():
                expect(f"{path}.{name}", replicate, "one weight serves all heads")
        for part, style in wanted.items():
            expect(part, style, why)
    if styles["lm_head"] not in (vocabwise, replicate):
        problems.append(f"lm_head is planned {styles['lm_head']}; logits are needed whole: vocabwise or replicate")
    return problems


_set_by_us: str | None = None
"""What `share_cores` last set, to tell it from a user's own setting."""


def share_cores(parallel: Parallel) -> None:
    """On a CPU with fewer NUMA nodes than ranks, give each rank its share of the cores, where vLLM refuses to start.

    Sets `VLLM_CPU_OMP_THREADS_BIND` for the processes that this one will start, unless a user has set it.
    """
    global _set_by_us
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get(THREADS) != _set_by_us:
        return
    if _set_by_us is not None:  # meant for an earlier engine
        del os.environ[THREADS]
        _set_by_us = None
    cores = sorted({_first_sibling(core) for core in os.sched_getaffinity(0)})
    nodes = [n for n in NODES.glob("node[0-9]*") if any((n / f"cpu{core}").exists() for core in cores)]
    if parallel.world_size == 1 or len(nodes) >= parallel.world_size:
        return
    from vllm.logger import init_logger

    each = len(cores) // parallel.world_size
    shares = [cores[rank * each : (rank + 1) * each] for rank in range(parallel.world_size)]
    _set_by_us = "|".join(",".join(map(str, share)) for share in shares) if each else "nobind"
    os.environ[THREADS] = _set_by_us
    init_logger("vllm.titan_adapters").info("Ranks share the cores: %s=%s", THREADS, _set_by_us)


def _first_sibling(core: int) -> int:
    """One of the hardware threads of a physical core stands for all, as in vLLM's own binding."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return int(re.split("[,-]", siblings.read_text())[0]) if siblings.exists() else core
