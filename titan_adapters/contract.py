"""The contract between model authors and everything else in this library."""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titan_adapters.config import AttentionSpec, TransformerConfig
from titan_adapters.errors import ConfigError, ContractError
from titan_adapters.nn.attention import SequenceInfo, sequence_info, share_masks
from titan_adapters.nn.norm import make_norm
from titan_adapters.plan import ParallelPlan
from titan_adapters.state_dict import StateDictAdapter

SLOTS = ("tok_embeddings", "layers", "norm", "lm_head")


class BaseTransformer(nn.Module):
    """A decoder-only transformer, defined once for training and for inference.

    A subclass sets `model_type`, `Config` and `Block`, and answers `parallel_plan` and `state_dict_adapter`. `Block` is
    built as `Block(config, layer)` and called as `block(x, seq)`, with x [..., D] and leading dims [B, S] or [T].
    Subclasses may override `embed`, `run_layers` and `compute_logits`; training and engine both call these, so there
    is no second implementation of the forward pass anywhere.

    To read and write published checkpoints, also override `from_hf_config` and `to_hf_config`; for
    `titan_adapters.testing`, `tiny_configs`.
    """

    model_type: ClassVar[str]
    """Name in the registry and in checkpoints; the HF `model_type` where there is one."""
    Config: ClassVar[type[TransformerConfig]]
    Block: ClassVar[type[nn.Module]]
    impossible_geometry: ClassVar[dict[str, str]] = {}
    """Kinds of awkward geometry (`titan_adapters.testing.geometry`) that no config can have, each with the reason."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.flex_specs: tuple[AttentionSpec, ...] = ()
        """Different specs of the layers whose attention has the kernel "flex"; set by `ta.nn.use_kernels`."""
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(self.Block(config, layer) for layer in range(config.num_layers))
        self.norm = make_norm(config.dim, config.norm())
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.init_weights()
        self.tie_weights()

    def init_weights(self) -> None:
        """Embeddings are drawn with the standard deviation that linears have, so that tied heads start sane too."""
        nn.init.normal_(self.tok_embeddings.weight, std=self.config.dim**-0.5)

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's, if the config says so."""
        if self.config.tied_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.tie_weights()  # moving off the meta device makes new Parameters, one per name
        return self

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> [..., D]."""
        return self.tok_embeddings(tokens)

    def run_layers(self, x: Tensor, seq: SequenceInfo, start: int = 0, stop: int | None = None) -> Tensor:
        """Run layers `start` to `stop` (exclusive, global indices) on x [..., D]."""
        for layer in self.layers[start:stop]:
            x = layer(x, seq)
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        """Normalised hidden states [..., D] -> logits [..., V]."""
        return self.lm_head(x)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Logits [..., V] of every token.

        Args:
            tokens: int64 [B, S] batched, or [T] packed.
            positions: int64 of the same shape, 0-based within each document. Default: each row counts from 0.
            document_ids: int64 of the same shape; tokens see only their own document. Default: where the position
                is not its left neighbour's plus one, a new document starts.
        """
        if tokens.shape[-1] > self.config.max_seq_len and positions is None and document_ids is None:
            raise ConfigError(
                f"{tokens.shape[-1]} tokens exceed max_seq_len = {self.config.max_seq_len}.",
                fix="shorten the sequence, or pack several documents and pass their positions.",
            )
        seq = sequence_info(tokens, positions, document_ids)
        if self.flex_specs:
            seq = share_masks(self.flex_specs, seq)
        return self.compute_logits(self.norm(self.run_layers(self.embed(tokens), seq)))

    @classmethod
    def parallel_plan(cls, config: TransformerConfig) -> ParallelPlan:
        """Style of every module that owns parameters."""
        raise NotImplementedError

    @classmethod
    def state_dict_adapter(cls, config: TransformerConfig) -> StateDictAdapter:
        """Rows between the published checkpoint layout and native names."""
        raise NotImplementedError

    @classmethod
    def from_hf_config(cls, hf: dict[str, Any]) -> TransformerConfig:
        """Our config from a published `config.json`."""
        raise ConfigError(f"{cls.__name__} has no published config format.", fix="override from_hf_config.")

    @classmethod
    def to_hf_config(cls, config: TransformerConfig) -> dict[str, Any]:
        """A `config.json` that stock transformers loads as this model; the inverse of `from_hf_config`."""
        raise ConfigError(f"{cls.__name__} can't be exported to a stock architecture.", fix="override to_hf_config.")

    @classmethod
    def tiny_configs(cls) -> dict[str, TransformerConfig]:
        """Small configs with awkward geometry, by name, on which `titan_adapters.testing.check_model` runs."""
        raise NotImplementedError


def slots_elsewhere(config: TransformerConfig, *, is_first: bool, is_last: bool) -> list[str]:
    """Slots that a pipeline stage does not have, beside layers. A tied head needs the embedding on the last stage too.

    What an author added beside the four slots is on every stage.
    """
    has_embedding = is_first or (is_last and config.tied_embeddings)
    return ([] if has_embedding else ["tok_embeddings"]) + ([] if is_last else ["norm", "lm_head"])


REQUIRED = ("parallel_plan", "state_dict_adapter")
CALLED_BY_ENGINE = ("embed", "run_layers", "compute_logits", "forward")


def contract_problems(cls: type) -> list[str]:
    """What keeps `cls` from being a model, one line each; empty if nothing does. Builds no module."""
    if not (isinstance(cls, type) and issubclass(cls, BaseTransformer)):
        return [f"{cls!r} is not a subclass of titan_adapters.BaseTransformer"]
    problems = []
    if not isinstance(getattr(cls, "model_type", None), str) or not cls.model_type:
        problems.append("model_type: set it to the model's name, a non-empty string")
    problems += _config_problems(getattr(cls, "Config", None))
    if not (isinstance(getattr(cls, "Block", None), type) and issubclass(cls.Block, nn.Module)):
        problems.append("Block: set it to the nn.Module class of one layer, built as Block(config, layer)")
    else:
        problems += _call_problems("Block", cls.Block.__init__, ("self", "config", "layer"))
        problems += _call_problems("Block", cls.Block.forward, ("self", "x", "seq"))
    for name in REQUIRED:
        if inspect.getattr_static(cls, name) is inspect.getattr_static(BaseTransformer, name):
            problems.append(f"{name}: missing; override this classmethod")
    for name in ("parallel_plan", "state_dict_adapter", "from_hf_config", "to_hf_config", "tiny_configs"):
        if not isinstance(inspect.getattr_static(cls, name), classmethod):
            problems.append(f"{name}: must be a classmethod")
    problems += _call_problems("model", cls.__init__, ("self", "config"))
    for name in CALLED_BY_ENGINE:
        ours = getattr(BaseTransformer, name)
        theirs = getattr(cls, name)
        if theirs is not ours:
            wanted = tuple(inspect.signature(ours).parameters)
            problems += _call_problems("model", theirs, wanted)
    return problems


def _config_problems(config: Any) -> list[str]:
    if not (isinstance(config, type) and issubclass(config, TransformerConfig)):
        return ["Config: set it to a subclass of titan_adapters.TransformerConfig"]
    problems = []
    for name, what in (("attention", "layer `layer`"), ("feed_forward", "layer `layer`"), ("norm", "the norms")):
        if getattr(config, name) is getattr(TransformerConfig, name):
            problems.append(f"Config.{name}: missing; return the spec of {what}")
    if not config.model_config.get("frozen") or config.model_config.get("extra") != "forbid":
        problems.append("Config.model_config: must stay frozen=True, extra='forbid'")
    return problems


def _call_problems(owner: str, function: Any, wanted: tuple[str, ...]) -> list[str]:
    """Whether `function` can be called with `wanted` positionally, and asks for nothing more."""
    parameters = list(inspect.signature(function).parameters.values())
    label = f"{owner}.{function.__name__}"
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return [f"{label}: **kwargs would swallow misspelt arguments; name every parameter"]
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(wanted) or len(required) > len(wanted):
        given = ", ".join(str(p) for p in parameters)
        return [f"{label}({given}): is called as {label}({', '.join(wanted)})"]
    return []


def check_contract(cls: type) -> None:
    """Raise ContractError that lists everything missing or wrong in `cls`."""
    problems = contract_problems(cls)
    if problems:
        raise ContractError(
            f"{getattr(cls, '__qualname__', cls)} does not meet the BaseTransformer contract.",
            problems,
            fix='see "Add a model" in CONTRIBUTING.md; `titan-adapters check MODEL` then tests its behaviour.',
        )


def meta_model(cls: type[BaseTransformer], config: TransformerConfig) -> BaseTransformer:
    """The model on the meta device: shapes and names without memory."""
    with torch.device("meta"):
        return cls(config)
