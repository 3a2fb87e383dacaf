"""The engine's side of the seams, and the swap: which vLLM layer each planned module becomes.

Shapes: T tokens of a step  D model dim  N, K query and kv heads (rank-local)  H head_dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from titan_adapters.config import AttentionSpec
from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import EngineError
from titan_adapters.nn import FeedForward, InnerAttention, QKVLinear, SequenceInfo
from titan_adapters.plan import Style, colwise, replicate, rowwise, vocabwise
from titan_adapters.vllm.compat import sinks_dtype
from titan_adapters.vllm.honours import unsplittable


class EngineAttention(nn.Module):
    """`InnerAttention` over vLLM's paged KV cache. `seq` is unused: the engine knows which tokens belong together."""

    def __init__(self, spec: AttentionSpec, layer: int, vllm_config: VllmConfig, prefix: str, device: torch.device):
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        self.v_head_dim = spec.v_head_dim
        self.head_size = max(spec.head_dim, spec.v_head_dim)
        options: dict[str, Any] = {
            "num_heads": spec.num_heads // tp,
            "head_size": self.head_size,
            "scale": spec.scale,
            "num_kv_heads": max(1, spec.num_kv_heads // tp),
            "cache_config": vllm_config.cache_config,
            # vLLM finds the KV cache by the one integer in this name, the global layer index.
            "prefix": f"{prefix}layers.{layer}.attn",
        }
        self.sinks = None
        if spec.sinks:
            sinks = torch.full((spec.num_heads // tp,), float("nan"), device=device, dtype=sinks_dtype())
            options["sinks"] = self.sinks = nn.Parameter(sinks, requires_grad=False)
        self.attn: Attention
        if spec.chunk is not None:
            self.attn = ChunkedLocalAttention(attention_chunk_size=spec.chunk, **options)
        else:
            options["logits_soft_cap"] = spec.softcap
            options["per_layer_sliding_window"] = spec.window  # also counts the current token
            self.attn = Attention(**options)

    def forward(self, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, seq: SequenceInfo) -> Tensor:
        out = self.attn(*(self._filled(x).flatten(-2) for x in (q_TNH, k_TKH, v_TKV)))
        return out.unflatten(-1, (-1, self.head_size))[..., : self.v_head_dim]

    def _filled(self, x: Tensor) -> Tensor:
        """Zeros change neither q·k nor the other channels of the output, and vLLM has one size for q, k and v."""
        missing = self.head_size - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x


class EngineQKVLinear(nn.Module):
    """`QKVLinear` as one matmul."""

    def __init__(self, module: QKVLinear, prefix: str):
        super().__init__()
        spec = module.spec
        self.head_dim = spec.head_dim
        self.packed = QKVParallelLinear(
            module.wq.in_features,
            spec.head_dim,
            spec.num_heads,
            spec.num_kv_heads,
            bias=bool(spec.biases.removesuffix("o")),
            prefix=f"{prefix}.packed",
            return_bias=False,
        )
        self.sizes = [self.packed.num_heads * spec.head_dim] + 2 * [self.packed.num_kv_heads * spec.head_dim]

    def forward(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(-1, (-1, self.head_dim)) for t in self.packed(x_TD).split(self.sizes, dim=-1))


class EngineFeedForward(nn.Module):
    """Gated `FeedForward` with w1 and w3 as one matmul."""

    def __init__(self, module: FeedForward, prefix: str):
        super().__init__()
        spec, dim = module.spec, module.w1.in_features
        self.w13 = MergedColumnParallelLinear(
            dim, [spec.hidden_dim] * 2, bias=spec.bias, prefix=f"{prefix}.w13", return_bias=False
        )
        self.w2 = RowParallelLinear(spec.hidden_dim, dim, bias=spec.bias, prefix=f"{prefix}.w2", return_bias=False)
        approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
        self.act = SiluAndMul() if spec.activation == "silu" else GeluAndMul(approximate=approximate)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.w2(self.act(self.w13(x_TD)))


class EngineHead(nn.Module):
    """A head through vLLM's logits path: gathered over ranks, padded vocabulary rows cut off."""

    def __init__(self, module: nn.Linear, prefix: str):
        super().__init__()
        self.head = ParallelLMHead(
            module.out_features, module.in_features, bias=module.bias is not None, prefix=f"{prefix}.head"
        )
        self.logits = LogitsProcessor(module.out_features)

    def forward(self, x_TD: Tensor) -> Tensor | None:
        return self.logits(self.head, x_TD, self.head.bias)


@dataclass
class Swap:
    """An author's model whose planned modules have become vLLM's, and where its native weights went."""

    model: BaseTransformer
    moved: dict[str, tuple[str, str | int | None]] = field(default_factory=dict)
    """Native module path -> (engine module path, shard of a packed parameter or None)."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Engine parameter name -> another name under which the same parameter serves."""

    def replace(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, module)

    def target(self, native: str) -> tuple[str, str | int | None]:
        """Engine parameter name, relative to the model, and packed shard, of a native parameter name."""
        module, _, kind = native.rpartition(".")
        path, shard = self.moved.get(module, (module, None))
        return (f"{path}.{kind}" if path else kind), shard

    def by_module(self, natives: Iterable[str]) -> dict[str, list[str]]:
        """`natives` by the path of the engine module that they went into."""
        found: dict[str, list[str]] = {}
        for native in natives:
            found.setdefault(self.target(native)[0].rpartition(".")[0], []).append(native)
        return found


def swap_modules(model: BaseTransformer, vllm_config: VllmConfig, prefix: str, device: torch.device) -> Swap:
    """Replace the seams and every planned module of `model` (on the meta device) by the engine's own.

    What the plan replicates and vLLM has no layer for, such as norms, stays the author's module and is materialised.

    Raises:
        EngineError: a seam is missing, doubled, subclassed, or contradicts the config.
    """
    styles = model.parallel_plan(model.config).resolve(model)
    _check_seams(model)
    if problems := unsplittable(model.config, get_tensor_model_parallel_world_size()):
        raise EngineError("The heads of this model can't be split over ranks.", problems, fix="run it on one rank.")
    swap = Swap(model)
    done: tuple[str, ...] = ()
    for path, module in list(model.named_modules()):
        if path.startswith(done) and done:
            continue
        replacement: nn.Module | None = None
        if type(module) is InnerAttention:
            replacement = EngineAttention(module.spec, module.layer, vllm_config, prefix, device)
        elif type(module) is QKVLinear and _packs_qkv(module, styles, path):
            replacement = EngineQKVLinear(module, path)
            swap.moved |= {f"{path}.w{p}": (f"{path}.packed", p) for p in "qkv"}
        elif type(module) is FeedForward and _packs_gate(module, styles, path):
            replacement = EngineFeedForward(module, path)
            swap.moved |= {f"{path}.w1": (f"{path}.w13", 0), f"{path}.w3": (f"{path}.w13", 1)}
        elif path in styles:
            replacement = _planned_layer(module, styles[path], path, is_head=module is model.lm_head)
            if isinstance(replacement, EngineHead):
                swap.moved[path] = (f"{path}.head", None)
        if replacement is not None:
            swap.replace(path, replacement)
            done += (f"{path}.",)
    if model.config.tied_embeddings:
        _tie_head(model)
        swap.aliases["tok_embeddings.weight"] = "lm_head.head.weight"
    _materialise(model, device)
    return swap


def _tie_head(model: BaseTransformer) -> None:
    head, embedding = model.lm_head, model.tok_embeddings
    if not isinstance(head, EngineHead) or not isinstance(embedding, VocabParallelEmbedding):
        raise EngineError("lm_head is tied, but not vocabwise.", fix="plan tok_embeddings and lm_head vocabwise.")
    head.head = head.head.tie_weights(embedding)


def _all(styles: dict[str, Style], path: str, wanted: dict[str, Style]) -> bool:
    return all(styles.get(f"{path}.{name}") is style for name, style in wanted.items())


def _packs_qkv(module: QKVLinear, styles: dict[str, Style], path: str) -> bool:
    spec = module.spec
    alike = spec.biases.removesuffix("o") in ("", "qkv") and spec.v_head_dim == spec.head_dim
    return alike and _all(styles, path, {"wq": colwise, "wk": colwise, "wv": colwise})


def _packs_gate(module: FeedForward, styles: dict[str, Style], path: str) -> bool:
    return module.w3 is not None and _all(styles, path, {"w1": colwise, "w3": colwise, "w2": rowwise})


def _planned_layer(module: nn.Module, style: Style, path: str, *, is_head: bool) -> nn.Module | None:
    """vLLM's layer for one planned module; None to keep the author's."""
    if isinstance(module, nn.Embedding) and style is vocabwise:
        return VocabParallelEmbedding(module.num_embeddings, module.embedding_dim, prefix=path)
    if type(module) is not nn.Linear:
        return None
    if is_head and style is vocabwise:
        return EngineHead(module, path)
    kinds = {colwise: ColumnParallelLinear, rowwise: RowParallelLinear, replicate: ReplicatedLinear}
    if style not in kinds:
        raise EngineError(f"{path}: only lm_head can be {style}.", fix="plan it colwise, rowwise or replicate.")
    size = (module.in_features, module.out_features)
    return kinds[style](*size, bias=module.bias is not None, prefix=path, return_bias=False)


def _check_seams(model: BaseTransformer) -> None:
    config = model.config
    problems: list[str] = []
    layers: list[int] = []
    for path, module in model.named_modules():
        if isinstance(module, InnerAttention):
            if type(module) is not InnerAttention:
                problems.append(f"{path} is a subclass of InnerAttention, whose forward the engine would not run")
            layers.append(module.layer)
            if not 0 <= module.layer < config.num_layers or module.spec != config.attention(module.layer):
                problems.append(f"{path}: its spec is not config.attention({module.layer})")
    if sorted(layers) != list(range(config.num_layers)):
        problems.append(f"InnerAttention modules are there for layers {sorted(layers)}, one per layer is needed")
    if problems:
        raise EngineError(
            f"The attention seams of {type(model).__name__} don't fit its config.",
            problems,
            fix="pass q, k and v of every layer through one titan_adapters.nn.InnerAttention(config.attention(i), i).",
        )


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory, NaN until loaded, and let buffers rebuild themselves on `device`."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.full_like(parameter, float("nan"), device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        buffers = dict(module.named_buffers(recurse=False))
        if any(buffer.is_meta for buffer in buffers.values()):
            module._apply(lambda t: torch.full_like(t, float("nan"), device=device) if t.is_meta else t, recurse=False)
            lost = [
                name
                for name, buffer in module.named_buffers(recurse=False)
                if name in module._non_persistent_buffers_set and buffer.is_floating_point() and buffer.isnan().all()
            ]
            if lost:
                raise EngineError(
                    f"{path}: non-persistent buffers {lost} are computed in __init__, which runs on the meta device.",
                    fix="recompute them in _apply, as titan_adapters.nn.Rope does, or make them persistent.",
                )
