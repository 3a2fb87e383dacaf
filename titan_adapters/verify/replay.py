"""A plain model run on what an engine's stages got and gave.

Every stage is called with the engine's own input, and its result is replaced by the engine's own. So no error travels:
what differs at a stage comes from that stage, and what differs in its input comes from what the model's code does
between the stages before and this one.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from titan_adapters.contract import BaseTransformer, meta_model
from titan_adapters.nn import Router, Routing, SequenceInfo
from titan_adapters.verify.records import EMBED, HEAD, Kind, StageRecords, has_rows, join, stage_kinds

FP32_ARITHMETIC = 2.0**-20
"""Relative error that is granted to kernels' inner arithmetic, four roundings to fp32: sums in whatever order, and
exponentials that are good to a few units in the last place (measured of vLLM's on the CPU: 4.5e-7 in a softmax)."""

UNSEEN = "the engine's kernel chose the experts itself"

Pairs = Iterable[tuple[Tensor, Tensor]]
"""(engine's, plain model's) tensors with a row per position."""


@dataclass
class Event:
    """A place where the engine and the plain model are compared."""

    path: str
    kind: Kind
    pairs: list[tuple[Tensor, Tensor]]
    positions: Tensor
    problem: str
    """Why they can't be compared by numbers; else empty."""
    wrong: bool
    """Whether the problem is a fault. Otherwise it only keeps from a proof."""


class Exact(TorchFunctionMode):
    """Inside, what modules compute in fp32 whatever they are given is computed in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()

        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


class Replay:
    """One run of the plain model, with one layer's copy in memory at a time.

    Args:
        dtype: What weights are rounded to.
        exact: Compute in fp64, not in `dtype`.
        shaken: Give every stage the engine's input with relative errors of `FP32_ARITHMETIC`, up or down at random.
    """

    def __init__(
        self, model: BaseTransformer, records: StageRecords, dtype: torch.dtype, *, exact: bool, shaken: bool = False
    ):
        self.events: list[Event] = []
        self._model, self._records, self._dtype, self._exact = model, records, dtype, exact
        self._kinds = stage_kinds(model)
        self._device = next(model.parameters()).device
        self._positions = records.positions.to(self._device)
        self._calls: Counter[str] = Counter()
        self._inside: list[str] = []
        """Paths of the stages that are running."""
        self._random = torch.Generator(self._device).manual_seed(0) if shaken else None
        self._unseen = False
        """Whether a choice of experts was not recorded, in the stage that is running."""
        self._known = True
        """Whether what arrives next is what the engine's stages before gave."""

    @torch.no_grad()
    def run(self) -> list[Event]:
        """Comparisons in execution order. Two replays of the same records give the same ones."""
        layers = meta_model(type(self._model), self._model.config).layers
        # The loop over layers is the author's: it runs as it is, over layers that are replayed one at a time.
        outer = self._as_served(copy.deepcopy(self._model, {id(self._model.layers): layers}))
        for path, kind in self._kinds.items():
            if kind == "block":
                outer.get_submodule(path).forward = partial(self._block, path)
            elif not path.startswith("layers."):
                self._patch(outer, path)
        tokens = self._records.tokens.to(self._device)[self._positions]
        x = self._stage(EMBED, "embedding", outer.embed, tokens)
        x = outer.norm(outer.run_layers(x, SequenceInfo(self._positions, None)))
        at_head = self._records.head_positions.to(self._device)
        x, self._positions = x[torch.searchsorted(self._positions, at_head)], at_head
        self._stage(HEAD, "head", outer.compute_logits, x)
        return self.events

    def _block(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if path not in self._records.calls:  # not asked for
            self._known = False
            return args[0]
        block = self._as_served(copy.deepcopy(self._model.get_submodule(path)))
        for stage in self._kinds:
            if stage.startswith(f"{path}."):
                self._patch(block, stage, f"{path}.")
        return self._stage(path, "block", block.forward, *args, **kwargs)

    def _as_served(self, module: Any) -> Any:
        module = module.to(self._dtype)
        return module.double() if self._exact else module

    def _patch(self, root: nn.Module, path: str, prefix: str = "") -> None:
        module = root.get_submodule(path.removeprefix(prefix))
        module.forward = partial(self._stage, path, self._kinds[path], module.forward)

    def _stage(self, path: str, kind: Kind, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `original` on the engine's input, note how input and result compare, and return the engine's result."""
        self._calls[path] += 1
        name = path if self._calls[path] == 1 else f"{path}@{self._calls[path]}"
        call, outer = self._records.calls.get(name), self._inside[-1] if self._inside else None
        within = outer is not None and self._kinds[outer] != "block"  # another stage, of which this is a part
        leaves, spec = tree_flatten((args, kwargs))
        at = [i for i, x in enumerate(leaves) if has_rows(x, len(self._positions))]
        if call is None or len(call.inputs) != len(at):
            if call is not None:
                given = f"the engine gave it {len(call.inputs)} tensors, the model {len(at)}"
                self._event(path, kind, problem=given, wrong=True)
            elif outer is None:
                self._event(path, kind, problem="it was not recorded")
            elif not within:  # else an engine may do both at once
                self._event(path, kind, problem="the engine did not run it", wrong=True)
            return self._run(path, original, *args, **kwargs)
        plain = [leaves[i] for i in at]
        engine = [self._cast(join(shares, x)) for shares, x in zip(call.inputs, plain, strict=True)]
        if self._known:
            where: tuple[str, Kind] = (outer, self._kinds[outer]) if within and outer else (path, "chain")
            self._event(*where, zip(engine, plain, strict=True))
        self._known = True
        for i, x in zip(at, engine, strict=True):
            leaves[i] = self._shaken(x)
        args, kwargs = tree_unflatten(leaves, spec)
        if kind == "router" and len(call.outputs) < len(Routing._fields):
            self._unseen = True
            self._event(path, kind, problem=UNSEEN)
            return self._run(path, original, *args, **kwargs)
        if kind == "router":
            chosen = Routing(*(self._cast(shares[0]) for shares in call.outputs))
            shaken = chosen._replace(logits=self._shaken(chosen.logits))
            compare = partial(_routings, original.__self__, original)  # type: ignore[attr-defined]
            self._event(path, kind, self._run(path, compare, shaken, *args, **kwargs))
            return chosen
        plain, spec = tree_flatten(self._run(path, original, *args, **kwargs))
        engine = [self._cast(join(shares, x)) for shares, x in zip(call.outputs, plain, strict=True)]
        if self._unseen:  # near ties may have gone the other way
            self._unseen = False
            self._event(path, kind, problem=UNSEEN)
        elif kind == "attention" and not self._records.complete:
            missing = len(self._records.tokens) - len(self._positions)
            self._event(path, kind, problem=f"keys and values of {missing} tokens came from the prefix cache")
        else:
            self._event(path, kind, zip(engine, plain, strict=True))
        return tree_unflatten(engine, spec)

    def _run(self, path: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._inside.append(path)
        try:
            if self._exact:
                with Exact():
                    return original(*args, **kwargs)
            return original(*args, **kwargs)
        finally:
            self._inside.pop()

    def _cast(self, x: Tensor) -> Tensor:
        x = x.to(self._device)
        return x.double() if self._exact and x.is_floating_point() else x

    def _shaken(self, x: Tensor) -> Tensor:
        if self._random is None or not x.is_floating_point():
            return x
        up = torch.randint(2, x.shape, generator=self._random, device=x.device)
        return x * (1 + (2 * up - 1) * FP32_ARITHMETIC)

    def _event(self, path: str, kind: Kind, pairs: Pairs = (), *, problem: str = "", wrong: bool = False) -> None:
        self.events.append(Event(path, kind, list(pairs), self._positions, problem, wrong))


def _routings(router: Router, forward: Callable[[Tensor], Routing], engine: Routing, x: Tensor) -> Pairs:
    """How an engine's routing of x compares: logits; the choice, given its logits; and the weights, given its choice.

    Of a choice, the chosen experts' scores are compared. So a choice between equals is no difference.
    """
    logits = router.logits(x)
    setattr(router, "logits", lambda _: engine.logits)  # noqa: B010
    chosen = forward(x)
    router.replayed = engine.experts.long()
    given = forward(x)
    scores = engine.logits.double()
    match router.spec.score:
        case "softmax":
            scores = scores.softmax(-1)
        case "sigmoid":
            scores = scores.sigmoid()
    if router.correction_bias is not None:
        scores = scores + router.correction_bias
    ours, theirs = (scores.gather(-1, routing.experts.long()).sort(-1).values for routing in (chosen, engine))
    # By expert, since an author's own router may list the replayed ones in another order.
    by_expert = [
        torch.zeros_like(logits).scatter(-1, routing.experts.long(), routing.weights.to(logits.dtype))
        for routing in (engine, given)
    ]
    return [(engine.logits, logits), (theirs, ours), (by_expert[0], by_expert[1])]
