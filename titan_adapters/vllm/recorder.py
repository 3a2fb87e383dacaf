"""Which experts an engine chose, per request, token and layer, for any mixture and either path."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from titan_adapters.errors import EngineError

if TYPE_CHECKING:
    import vllm

Experts = dict[str, dict[int, dict[int, list[int]]]]
"""Request id -> layer -> position -> experts."""

Found = TypeVar("Found")


def compiled_problems(model_runner: Any, what: str) -> list[str]:
    """Why `what` is out of reach of hooks on the modules of this worker's model."""
    from vllm.config import CompilationMode

    if model_runner.vllm_config.compilation_config.mode == CompilationMode.NONE:
        return []
    return [f"the model is compiled, so that its {what} can't be observed: use enforce_eager=True"]


def rows_by_request(model_runner: Any) -> list[tuple[str, int, int]]:
    """Request id, first row and end, of the tokens of the step that is running."""
    batch = model_runner.input_batch
    starts = model_runner.query_start_loc.cpu[: batch.num_reqs + 1].tolist()
    return list(zip(batch.req_ids, starts, starts[1:], strict=False))


def recorded_of(recorded: Mapping[str, Found], output: "vllm.RequestOutput") -> Found:
    """What was recorded of a request, by the engine's request ids.

    Raises:
        EngineError: nothing was.
    """
    # The engine appends a suffix to the request's id.
    found = [value for name, value in recorded.items() if name.split("-")[0] == output.request_id]
    if len(found) != 1:
        raise EngineError(f"Request {output.request_id} was not recorded.", fix="generate inside of the block.")
    return found[0]


class RoutingRecorder:
    """The worker's side: collects each step's choices and sorts them by request.

    Args:
        model_runner: vLLM's, of this worker.
    """

    def __init__(self, model_runner: Any):
        self._runner = model_runner
        self._model: Any = model_runner.get_model()
        self._step: dict[int, Tensor] = {}
        self._experts: Experts = defaultdict(lambda: defaultdict(dict))
        self._undo: list[Any] = []

    def start(self) -> list[str]:
        """Attach; returns the reasons if that can't be."""
        from titan_adapters.nn import Router
        from titan_adapters.vllm.moe import EngineMoE

        problems = compiled_problems(self._runner, "routers")
        mixtures, stage = set(self._model.backbone.model.config.moe_specs()), self._model.backbone.stage
        wanted = {layer for layer in mixtures if stage.start <= layer < stage.stop}
        if not mixtures:
            problems.append("the model has no mixture of experts")
        found = set()
        for module in self._model.modules():
            if isinstance(module, EngineMoE):
                if module.runner.is_monolithic:
                    problems.append(f"the kernel of layer {module.router.layer} chooses the experts itself")
                attach = module.vllm_router.set_capture_fn
                attach(partial(self._choose, module.router.layer))
                self._undo.append(partial(attach, None))
                found.add(module.router.layer)
        for module in self._model.modules():
            if isinstance(module, Router) and module.layer not in found:
                self._undo.append(module.register_forward_hook(self._routed).remove)
                found.add(module.layer)
        if missing := sorted(wanted - found):
            problems.append(f"the routers of layers {missing} are not titan_adapters.nn.Router")
        self._undo.append(self._model.register_forward_hook(self._finish_step, with_kwargs=True).remove)
        if problems:
            self.stop()
        return problems

    def stop(self) -> Experts:
        for undo in self._undo:
            undo()
        self._undo.clear()
        return {request: {layer: dict(of) for layer, of in layers.items()} for request, layers in self._experts.items()}

    def _routed(self, router: Any, _: Any, routing: Any) -> None:
        self._choose(router.layer, routing.experts)

    def _choose(self, layer: int, experts: Tensor) -> None:
        self._step[layer] = experts

    def _finish_step(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        positions = kwargs["positions"].tolist()
        requests = rows_by_request(self._runner)
        for layer, experts in self._step.items():
            rows = experts.tolist()
            for request, start, end in requests:
                self._experts[request][layer].update(zip(positions[start:end], rows[start:end], strict=True))
        self._step.clear()


class RecordedRouting:
    """What an engine's routers chose while it was recorded."""

    def __init__(self) -> None:
        self._experts: Experts = {}

    def of(self, output: "vllm.RequestOutput") -> dict[int, Tensor]:
        """Layer -> experts, int64 [T, K], of a request: its prompt and all generated tokens but the last.

        That is what `titan_adapters.nn.replay_routing` takes, for a forward pass over these T tokens.

        Raises:
            EngineError: the request was not recorded, or not all of it.
        """
        wanted = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) - 1
        layers = recorded_of(self._experts, output)
        missing = sorted({p for positions in layers.values() for p in range(wanted) if p not in positions})
        if missing:
            raise EngineError(
                f"The routing of {len(missing)} tokens of request {output.request_id} is missing, from position "
                f"{missing[0]} on: they came from the prefix cache.",
                fix="start the engine with enable_prefix_caching=False, or call llm.reset_prefix_cache() first.",
            )
        return {layer: torch.tensor([of[p] for p in range(wanted)]) for layer, of in sorted(layers.items())}


@contextmanager
def record_routing(llm: "vllm.LLM") -> Iterator[RecordedRouting]:
    """Record the experts that `llm` chooses for what is generated inside the block, for engines without compilation.

    Under CUDA graphs use vLLM's own `enable_return_routed_experts=True`, which works for the same models.

    Raises:
        EngineError: the engine is compiled, is not ours, or has no routers to observe.
    """
    problems = sorted({problem for found in llm.collective_rpc("titan_start_recording") for problem in found})
    if problems:
        from titan_adapters.vllm.moe import OPTION

        raise EngineError(
            "This engine's routing can't be recorded.",
            problems,
            fix="start an eager engine of a model with mixtures; under CUDA graphs, enable_return_routed_experts=True; "
            f"where a kernel chooses the experts, additional_config={{{OPTION!r}: 'torch'}}.",
        )
    recorded = RecordedRouting()
    try:
        yield recorded
    finally:
        for experts in llm.collective_rpc("titan_stop_recording"):  # each stage has its layers, its ranks have the same
            for request, layers in experts.items():
                recorded._experts.setdefault(request, {}).update(layers)
