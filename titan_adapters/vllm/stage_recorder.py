"""The worker's side of recording stages: hooks on the modules that the plain model has too."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from titan_adapters.contract import meta_model
from titan_adapters.verify.records import EMBED, HEAD, has_rows, layer_of, stage_kinds
from titan_adapters.vllm.recorder import compiled_problems, rows_by_request

Steps = list[dict[str, tuple[int, list[int]]]]
"""Of each step: request id -> its first row, and the positions of its rows."""


class StageRecorder:
    """Keeps, on the CPU, what every stage got and gave in each step.

    Tensors are named "STEP/PATH/in/INDEX" and "STEP/PATH/out/INDEX". A second call in a step has PATH@2.

    Args:
        model_runner: vLLM's, of this worker.
        layers: Global indices of the layers to record; None for all.
    """

    def __init__(self, model_runner: Any, layers: Sequence[int] | None):
        self._runner = model_runner
        self._wrapper: Any = model_runner.get_model()
        self._model = self._wrapper.backbone.model
        self._layers = layers
        self._tensors: dict[str, Tensor] = {}
        self._steps: Steps = []
        self._calls: Counter[str] = Counter()
        self._num_tokens = 0
        """Rows of the step that is running."""
        self._undo: list[Callable[[], Any]] = []

    def start(self) -> list[str]:
        """Attach; returns the reasons if that can't be."""
        from titan_adapters.vllm.moe import EngineMoE

        if problems := compiled_problems(self._runner, "stages"):
            return problems
        modules = {path: module for path, module in self._model.named_modules() if self._is_wanted(path)}
        for path in stage_kinds(meta_model(type(self._model), self._model.config)):
            module = modules.get(path)
            if module is None:
                continue
            self._undo += [
                module.register_forward_pre_hook(partial(self._got, path), with_kwargs=True).remove,
                module.register_forward_hook(partial(self._gave, path)).remove,
            ]
            if isinstance(module, EngineMoE):
                self._wrap(module.router, "logits", partial(self._method, f"{path}.router"))
                self._wrap(module.vllm_router, "select_experts", partial(self._select, f"{path}.router"))
        self._wrap(self._model, "embed", partial(self._method, EMBED))
        self._wrap(self._model, "compute_logits", self._head)
        self._undo += [
            self._wrapper.register_forward_pre_hook(self._begin_step, with_kwargs=True).remove,
            self._wrapper.register_forward_hook(self._finish_step, with_kwargs=True).remove,
        ]
        return []

    def stop(self, folder: str) -> tuple[str, Steps]:
        """Detach; returns the file in `folder` that all tensors were written to, and the steps."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        file = Path(folder) / f"{torch.distributed.get_rank()}.safetensors"
        save_file(self._tensors, file)
        self._tensors.clear()
        return str(file), self._steps

    def _is_wanted(self, path: str) -> bool:
        layer = layer_of(path)
        return self._layers is None or layer is None or layer in self._layers

    def _wrap(self, owner: Any, method: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, method)
        was_set = method in vars(owner)
        setattr(owner, method, partial(wrapper, original))
        self._undo.append(partial(setattr, owner, method, original) if was_set else partial(delattr, owner, method))

    def _begin_step(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._num_tokens = len(kwargs["positions"])
        self._calls.clear()

    def _finish_step(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        positions = kwargs["positions"].tolist()
        self._steps.append({name: (start, positions[start:end]) for name, start, end in rows_by_request(self._runner)})

    def _keep(self, path: str, what: str, tree: Any, num_rows: int, first: int = 0) -> None:
        """Copies, because kernels may write into what they were given."""
        name = path if self._calls[path] == 1 else f"{path}@{self._calls[path]}"
        rows = [x for x in tree_leaves(tree) if has_rows(x, num_rows)]
        for index, x in enumerate(rows, first):
            self._tensors[f"{len(self._steps)}/{name}/{what}/{index}"] = x.detach().to("cpu", copy=True).contiguous()

    def _got(self, path: str, module: nn.Module | None, args: tuple, kwargs: dict[str, Any]) -> None:
        self._calls[path] += 1
        self._keep(path, "in", (args, kwargs), self._num_tokens)

    def _gave(self, path: str, module: nn.Module, args: tuple, output: Any) -> None:
        self._keep(path, "out", output, self._num_tokens)

    def _method(self, path: str, original: Callable[[Tensor], Any], x: Tensor) -> Any:
        self._got(path, None, (x,), {})
        result = original(x)
        self._keep(path, "out", result, self._num_tokens)
        return result

    def _select(self, path: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """vLLM's choice from our router's logits."""
        chosen = original(*args, **kwargs)
        weights, experts = chosen[:2]
        self._keep(path, "out", (experts, weights), self._num_tokens, first=1)
        return chosen

    def _head(self, original: Callable[[Tensor], Tensor | None], x: Tensor) -> Tensor | None:
        """Called after the step's forward pass, maybe several times, for some of its rows."""
        self._calls[HEAD] += 1
        self._keep(HEAD, "in", x, len(x))
        logits = original(x)
        self._keep(HEAD, "out", logits, len(x))
        return logits
