"""Dense feed-forward layers."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from titan_adapters.moe_spec import FeedForwardSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """`w2(act(w1 x) * w3 x)` if gated, else `w2(act(w1 x))`. An engine packs w1 and w3 into one matmul."""

    def __init__(self, dim: int, spec: FeedForwardSpec):
        super().__init__()
        self.spec = spec
        self.w1 = nn.Linear(dim, spec.hidden_dim, bias=spec.bias)
        self.w2 = nn.Linear(spec.hidden_dim, dim, bias=spec.bias)
        self.w3 = nn.Linear(dim, spec.hidden_dim, bias=spec.bias) if spec.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        hidden = ACTIVATIONS[self.spec.activation](self.w1(x))
        if self.w3 is not None:
            hidden = hidden * self.w3(x)
        return self.w2(hidden)
