"""What every check is given, and the comparisons that checks share.

Tolerances are relative 2-norms over all logits in fp32: 1e-5 against another implementation, 1e-5 between two layouts
of the same tokens (other reduction orders).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import ConfigError
from titan_adapters.nn import InnerAttention, record_routing, replay_routing
from titan_adapters.state_dict import native_tensors

TOLERANCE = 1e-5
LENGTH = 40
"""Tokens of the usual sequence; windows and original contexts of tiny configs should be shorter."""


class Skip(Exception):
    """A check that does not apply; its text says why."""


@dataclass
class Case:
    """One model class with one tiny config and random weights."""

    cls: type[BaseTransformer]
    config: TransformerConfig
    model: BaseTransformer

    @classmethod
    def build(cls, model: type[BaseTransformer], config: TransformerConfig) -> "Case":
        """Weights of standard deviation 0.2 around their usual mean, so that no norm or bias is a no-op."""
        torch.manual_seed(0)
        built = model(config).float()
        with torch.no_grad():
            for parameter in built.parameters():
                mean = 1.0 if parameter.dim() == 1 and parameter.mean() == 1 else 0.0
                parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
            for name, tensor in native_tensors(built).items():
                if not isinstance(tensor, nn.Parameter):
                    built.get_buffer(name).normal_(std=0.2)
        return cls(model, config, built)

    def tokens(self, *shape: int) -> Tensor:
        return torch.randint(self.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))

    def published_config(self) -> dict:
        """The stock architecture's `config.json`; Skip if there is none."""
        try:
            return self.cls.to_hf_config(self.config)
        except ConfigError as error:
            raise Skip(error.summary) from error


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """2-norm of the difference over the 2-norm of the reference, in fp64; NaN or a shape mismatch never passes."""
    assert ours.shape == reference.shape, f"shapes differ: {tuple(ours.shape)}, {tuple(reference.shape)}"
    assert torch.isfinite(ours).all() and torch.isfinite(reference).all(), "logits are not finite"
    ours, reference = ours.detach().double(), reference.detach().double()
    assert reference.norm() > 0, "the reference is all zeros"
    return ((ours - reference).norm() / reference.norm()).item()


def close(ours: Tensor, reference: Tensor, what: str, tolerance: float = TOLERANCE) -> str:
    """Fail unless both are equal within the tolerance; returns how close they are."""
    error = relative_error(ours, reference)
    largest = (ours - reference).abs().max().item()
    assert error <= tolerance, f"{what}: relative error {error:.1e} exceeds {tolerance:.0e} (largest {largest:.1e})"
    return f"relative {error:.1e}, largest {largest:.1e}"


def both(model: nn.Module, tokens: Tensor, changed: Tensor, unaffected: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Logits of two inputs that must be bitwise equal for the tokens `unaffected`.

    An expert's matmul rounds by how many tokens it gets, so mixtures take the same experts both times. For unaffected
    tokens they must choose the same ones by themselves, too.
    """
    with record_routing(model) as record:
        before = model(tokens)
    with record_routing(model) as own_choice:
        model(changed)
    for layer, experts in own_choice.experts().items():
        chosen = record.experts()[layer][unaffected].sort().values
        assert torch.equal(chosen, experts[unaffected].sort().values), f"layer {layer} routes a token by other tokens"
    with replay_routing(model, record.experts()):
        return before, model(changed)


class Cut(nn.Module):
    """An attention seam through which tokens see themselves only."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seq: object) -> Tensor:
        return v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2)


def cut_seams(model: BaseTransformer, keep: int | None = None) -> int:
    """Cut the attention seams of all layers but `keep`; returns how many there were."""
    seams = {path: module.layer for path, module in model.named_modules() if isinstance(module, InnerAttention)}
    layers = sorted(seams.values())
    assert layers == list(range(model.config.num_layers)), f"seams are there for layers {layers}"
    for path, layer in seams.items():
        if layer != keep:
            model.set_submodule(path, Cut())
    return len(seams)
