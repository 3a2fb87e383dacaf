"""Facts about feed-forward layers, dense and mixtures of experts. Imports neither torch nor vllm."""

from typing import Literal, Self

from pydantic import Field, model_validator

from titan_adapters.spec import Spec

Activation = Literal["silu", "gelu", "gelu_tanh"]


class FeedForwardSpec(Spec):
    """A dense feed-forward layer: `w2(act(w1 x) * w3 x)` if gated, else `w2(act(w1 x))`."""

    hidden_dim: int = Field(gt=0)
    activation: Activation
    gated: bool
    bias: bool


class ClampedSwiGLU(Spec):
    """gpt-oss's gate: `(u + 1) * g * sigmoid(alpha * g)`, with g = w1 x at most `limit`, u = w3 x within +-`limit`."""

    alpha: float = Field(gt=0)
    limit: float = Field(gt=0)


class ExpertGroupsSpec(Spec):
    """Routing limited to the best groups of adjacent experts (DeepSeek-V2, arXiv:2405.04434)."""

    num_groups: int = Field(gt=0)
    top_groups: int = Field(gt=0)
    """How many groups a token's experts may come from."""
    score: Literal["max", "top2_sum"]
    """A group's score: that of its best expert (DeepSeek-V2), or the sum of its two best (DeepSeek-V3)."""


class SharedExpertsSpec(Spec):
    """A feed-forward layer that every token passes through, added to what its chosen experts give."""

    feed_forward: FeedForwardSpec
    """All shared experts as one layer: its width is the sum of theirs."""
    output_gate: bool
    """Whether the result is multiplied by `sigmoid(gate x)`, one number per token (Qwen 2 MoE)."""


class MoESpec(Spec):
    """Everything that decides what a mixture of experts computes.

    Scores come from the router's logits in fp32. The `top_k` experts with the best scores are chosen (plus the
    correction bias, within the best groups); their weights are their scores (without the bias), renormalised if
    stated, times `scaling_factor`, and stay in fp32.
    """

    num_experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    hidden_dim: int = Field(gt=0)
    """Width of one expert."""
    score: Literal["softmax", "sigmoid", "softmax_of_top_k"]
    """softmax: over all experts. softmax_of_top_k: experts are chosen by logit, and the softmax is over those only."""
    renormalize: bool
    """Whether weights are divided by their sum over the chosen experts (`norm_topk_prob`)."""
    scaling_factor: float = Field(gt=0)
    groups: ExpertGroupsSpec | None
    correction_bias: bool
    """Whether a bias takes part in the choice, but not in the weights (arXiv:2408.15664). Always fp32: its steps are
    small against those of bf16."""
    weighs: Literal["input", "output"]
    """What the weight multiplies: the token before its expert (Llama 4), or the expert's result."""
    router_dtype: Literal["float32", "model"]
    """What the logits are computed in. The scores are fp32 either way."""
    router_bias: bool
    """Whether the router's projection has a bias (gpt-oss)."""
    activation: Activation | ClampedSwiGLU
    gated: bool
    """Whether experts are `w2(act(w1 x) * w3 x)`, or `w2(act(w1 x))`."""
    bias: bool
    """Whether experts' projections have biases."""
    shared: SharedExpertsSpec | None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.top_k > self.num_experts:
            problems.append(f"top_k ({self.top_k}) exceeds num_experts ({self.num_experts})")
        if self.score == "softmax_of_top_k" and self.renormalize:
            problems.append("renormalize has no effect with softmax_of_top_k, whose weights sum to 1; say False")
        if isinstance(self.activation, ClampedSwiGLU) and not self.gated:
            problems.append("ClampedSwiGLU needs gated experts")
        if (groups := self.groups) is not None:
            size, rest = divmod(self.num_experts, groups.num_groups)
            if rest:
                problems.append(f"num_groups ({groups.num_groups}) must divide num_experts ({self.num_experts})")
            if groups.top_groups > groups.num_groups:
                problems.append(f"top_groups ({groups.top_groups}) exceeds num_groups ({groups.num_groups})")
            if self.top_k > groups.top_groups * size:
                problems.append(f"{groups.top_groups} groups of {size} experts can't give top_k = {self.top_k}")
            if groups.score == "top2_sum" and size < 2:
                problems.append("top2_sum needs at least two experts per group")
        if problems:
            raise ValueError("; ".join(problems))
        return self
