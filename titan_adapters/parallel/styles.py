"""The activations' half of each style, as forward hooks around modules that compute on plain local tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_adapters.contract import BaseTransformer
from titan_adapters.nn.attention import Attention, QKVLinear
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.moe import InnerExperts, Routing
from titan_adapters.nn.norm import RMSNorm, RMSNormOverRanks
from titan_adapters.parallel.collectives import Parts, spread, summed
from titan_adapters.parallel.layout import ModelLayout
from titan_adapters.parallel.tokens import TokenSplit
from titan_adapters.plan import colwise, expertwise, rowwise, vocabwise

ONE_INPUT = (QKVLinear, FeedForward)
"""Modules whose input is used by colwise children only, so that its gradient is summed once instead of per child."""

Move = Callable[[Tensor], Tensor]


def split_activations(model: BaseTransformer, layout: ModelLayout, groups: dict[str, ProcessGroup]) -> None:
    """Make every module's forward pass compute this rank's part, with what crosses ranks on the way.

    Args:
        groups: Axis -> the ranks along it, for axes of more than one rank.
    """
    if tp := groups.get("tp"):
        _split_features(model, layout, tp)
    for path, style in layout.styles.items():
        if style is expertwise and groups:
            experts = model.get_submodule(path)
            assert isinstance(experts, InnerExperts)
            _split_experts(experts, groups)


def _split_features(model: BaseTransformer, layout: ModelLayout, tp: ProcessGroup) -> None:
    tokens = None
    if layout.sequence_parallel:
        tokens = TokenSplit(tp)
        tokens.attach(model)
        for path in layout.on_all_tokens:
            _let_see_all_tokens(model, path, tokens)

    def moves(path: str) -> tuple[Move, Move]:
        """What happens to activations where the work is divided, and where it is put together again."""
        if tokens is None or layout.sees_all_tokens(path):
            return (lambda x: spread(x, [tp])), (lambda x: summed(x, [tp]))
        return (lambda x: tokens.own(x).gathered_spread(x)), (lambda x: tokens.all(x).summed_cut(x))

    covered = set()
    for path, module in model.named_modules():
        parts = [f"{path}.{name}" for name, child in module.named_children() if isinstance(child, nn.Linear)]
        if type(module) in ONE_INPUT and colwise in {layout.styles[part] for part in parts}:
            _before(module, moves(path)[0])
            covered.update(parts)
    for path, style in layout.styles.items():
        module = model.get_submodule(path)
        divide, unite = moves(path)
        if style is colwise and path not in covered:
            _before(module, divide)
        elif style is rowwise:
            _after(module, unite)
        elif style is vocabwise and isinstance(module, nn.Embedding):
            rows = _OwnRows(module.num_embeddings, tp)
            module.register_forward_pre_hook(rows.before)
            module.register_forward_hook(rows.after)
            _after(module, unite)
        elif style is vocabwise:
            assert isinstance(module, nn.Linear)
            part = -(-module.out_features // tp.size())
            words = Parts(tp, -1, [len(chunk) for chunk in torch.arange(module.out_features).split(part)])
            _before(module, divide)
            _after(module, words.gathered)
    for path in layout.sharded_attention:
        attention = model.get_submodule(path)
        assert isinstance(attention, Attention)
        _split_heads(attention, tp)


def _before(module: nn.Module, move: Move) -> None:
    module.register_forward_pre_hook(lambda _, args: (move(args[0]), *args[1:]))


def _after(module: nn.Module, move: Move) -> None:
    module.register_forward_hook(lambda _, args, output: move(output))


def _let_see_all_tokens(model: BaseTransformer, path: str, tokens: TokenSplit) -> None:
    module = model.get_submodule(path)
    if module is not model.tok_embeddings:  # which is given all
        _before(module, lambda x: tokens.own(x).gathered(x))
    if module is not model.lm_head:  # whose logits are wanted whole
        _after(module, lambda x: tokens.all(x).cut(x))


class _OwnRows:
    """An embedding that holds some rows: other ranks' tokens give zeros here, so that the sum is whole."""

    def __init__(self, vocab_size: int, tp: ProcessGroup):
        part = -(-vocab_size // tp.size())
        self._start, self._stop = tp.rank() * part, min((tp.rank() + 1) * part, vocab_size)
        self._foreign = torch.empty(0)

    def before(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        (tokens,) = args
        self._foreign = (tokens < self._start) | (tokens >= self._stop)
        return ((tokens - self._start).masked_fill(self._foreign, 0),)

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.masked_fill(self._foreign.unsqueeze(-1), 0)


def _split_heads(attention: Attention, tp: ProcessGroup) -> None:
    spec, size = attention.spec, tp.size()
    kv_heads = max(spec.num_kv_heads // size, 1)
    local = spec.model_copy(update={"num_heads": spec.num_heads // size, "num_kv_heads": kv_heads})
    attention.inner_attention.spec = local
    if spec.qk_norm is not None and spec.qk_norm.scope == "full":

        def total(x: Tensor) -> Tensor:
            return spread(summed(x, [tp]), [tp])

        for name in ("q_norm", "k_norm"):
            norm = attention.get_submodule(name)
            assert isinstance(norm, RMSNorm)
            attention.set_submodule(name, RMSNormOverRanks(norm, norm.weight, size, total))


def _split_experts(experts: InnerExperts, groups: dict[str, ProcessGroup]) -> None:
    """Each rank computes its experts (or its part of each one's width) for all tokens; the results are summed."""
    every = list(groups.values())
    spec, num_local, first = experts.spec, experts.spec.num_experts, 0
    if "ep" in groups:
        num_local = spec.num_experts // groups["ep"].size()
        first = groups["ep"].rank() * num_local
        experts.spec = spec.model_copy(update={"num_experts": num_local})
        experts.partial = True

    def before(module: nn.Module, args: tuple[Tensor, Routing]) -> tuple[Tensor, Routing]:
        x_TD, routing = args
        own = routing._replace(experts=routing.experts - first, weights=spread(routing.weights, every))
        return spread(x_TD, every), own

    experts.register_forward_pre_hook(before)
    experts.register_forward_hook(lambda _, args, output: summed(output, every))
