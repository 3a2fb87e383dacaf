"""One model trained alone and in parallel, step by step; not a test."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import titan_adapters as ta
from tests.conftest import random_model
from tests.parallel.models import Gained
from titan_adapters.errors import PlanError
from titan_adapters.parallel import check_replicas

TOKENS = ((2, 1), (2, 2), (2, 3), (2, 13))
"""Rows and tokens of each step; without an "fsdp" axis the ranks share the rows."""


class Case(NamedTuple):
    """A model and how it is split."""

    model: type[ta.BaseTransformer]
    config: ta.TransformerConfig
    axes: dict[str, int]
    optimizer: str = "sgd"
    kernel: str = "loop"
    recompute: bool = False
    """Whether the split model's layers are checkpointed: run again in the backward pass."""
    sequence_parallel: bool = False
    balance: bool = False
    """Whether the loss has a term that makes routers choose all experts alike."""


def errors_of_training(cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    """Of each case, relative errors of the loss, of every gradient and, after the last step, of every parameter."""
    return {name: _errors(case) for name, case in cases.items()}


def _errors(case: Case) -> dict[str, float]:
    alone, split = (random_model(case.model, case.config) for _ in range(2))
    for model in (alone, split):
        with torch.no_grad():  # scores so large that rounding shows make a poor test
            for parameter in model.parameters():
                parameter.mul_(0.5 if parameter.dim() > 1 else 1.0)
        for module in model.modules():
            if isinstance(module, ta.nn.InnerExperts):
                module.kernel = case.kernel
    mesh = init_device_mesh("cpu", tuple(case.axes.values()), mesh_dim_names=tuple(case.axes))
    ta.parallelize(split, mesh, sequence_parallel=case.sequence_parallel)
    if case.recompute:
        split.run_layers = partial(_run_recomputed, split)
    optimizers = [_optimizer(case, model) for model in (alone, split)]
    generator = torch.Generator().manual_seed(7)
    rows = slice(None)
    if "fsdp" in case.axes:
        size, rank = case.axes["fsdp"], mesh.get_local_rank("fsdp")
        rows = slice(rank * 2 // size, (rank + 1) * 2 // size)
    errors: dict[str, float] = {}
    for step, shape in enumerate(TOKENS):
        tokens, labels = torch.randint(case.config.vocab_size, (2, *shape), generator=generator)
        losses = [
            _loss(alone, tokens, labels, case.balance),
            _loss(split, tokens[rows], labels[rows], case.balance),
        ]
        for loss in losses:
            loss.backward()
        ours = losses[1].detach().clone()
        if "fsdp" in case.axes:
            torch.distributed.all_reduce(ours, group=mesh.get_group("fsdp"))
            ours /= case.axes["fsdp"]
        errors[f"step {step} loss"] = _relative(ours, losses[0].detach(), 0.0)
        # One key gets all attention, whatever the scores: gradients of queries and keys are zero but for noise.
        floor = 1.0 if shape[-1] == 1 else 0.1
        errors |= _compare(f"step {step} gradient", alone, split, floor)
        norms = [nn.utils.get_total_norm([p.grad for p in model.parameters()]) for model in (alone, split)]
        errors[f"step {step} norm of gradients"] = _relative(norms[1].full_tensor(), norms[0], 0.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    errors |= _compare("parameter", alone, split, None)
    tied = split.lm_head.weight is split.tok_embeddings.weight
    assert tied == case.config.tied_embeddings
    return errors


def _run_recomputed(model: ta.BaseTransformer, x: Tensor, seq: ta.nn.SequenceInfo) -> Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, seq, use_reentrant=False)
    return x


def replicas_of_gained() -> list[str]:
    """What `check_replicas` says of a module among split features that is planned replicate, and partwise."""
    config = next(iter(Gained.tiny_configs().values()))
    texts = []
    for style in (ta.replicate, ta.partwise):
        model = random_model(Gained, config)
        ta.parallelize(
            model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), Gained.parallel_plan(config, style)
        )
        tokens, labels = torch.randint(config.vocab_size, (2, 2, 13), generator=torch.Generator().manual_seed(7))
        _loss(model, tokens, labels).backward()
        try:
            check_replicas(model)
            texts.append("")
        except PlanError as error:
            texts.append(str(error))
    return texts


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def _loss(model: nn.Module, tokens: Tensor, labels: Tensor, balance: bool = False) -> Tensor:
    with ta.nn.record_routing(model) as record:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    return loss + record.load_balancing_loss() if balance else loss


def _compare(what: str, alone: nn.Module, split: nn.Module, floor: float | None) -> dict[str, float]:
    """Parameters, or with a `floor` gradients, none of which counts as smaller than that share of all of them."""
    theirs, ours = dict(alone.named_parameters()), dict(split.named_parameters())
    assert list(ours) == list(theirs)
    if floor is None:
        pairs = {name: (ours[name], theirs[name]) for name in theirs}
        smallest = 0.0
    else:
        pairs = {name: (ours[name].grad, theirs[name].grad) for name in theirs}
        smallest = floor * nn.utils.get_total_norm([grad for _, grad in pairs.values()]).item()
    found = {}
    for name, (split_tensor, reference) in pairs.items():
        assert isinstance(split_tensor, DTensor), name
        found[f"{what} {name}"] = _relative(split_tensor.detach().full_tensor(), reference.detach(), smallest)
    return found


def _relative(ours: Tensor, reference: Tensor, floor: float) -> float:
    assert ours.shape == reference.shape and ours.isfinite().all()
    return ((ours - reference).norm() / max(reference.norm().item(), floor)).item()
