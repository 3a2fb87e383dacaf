"""The engine's side of the seams.

Shapes: T tokens of a step  D model dim  N, K query and kv heads (rank-local)  H head_dim.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    DEFAULT_VOCAB_PADDING_SIZE,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import set_weight_attrs

from titan_adapters.config import AttentionSpec
from titan_adapters.errors import EngineError
from titan_adapters.nn import FeedForward, QKVLinear, RMSNorm, SequenceInfo
from titan_adapters.nn.norm import RMSNormOverRanks
from titan_adapters.vllm.compat import sinks_dtype


def num_replicas(num_heads: int) -> int:
    """On how many tensor-parallel ranks each of `num_heads` kv heads is: several if there are fewer than ranks."""
    return max(1, get_tensor_model_parallel_world_size() // num_heads)


def local_parameter(
    shape: tuple[int, ...], dim: int, index: int, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """A parameter, NaN until loaded, whose loader takes slice `index` of the whole tensor along `dim`."""

    def load(param: Tensor, loaded_weight: Tensor) -> None:  # a reload passes these by name
        size = param.shape[dim]
        param.data.copy_(loaded_weight.narrow(dim, index * size, size))

    parameter = nn.Parameter(torch.full(shape, float("nan"), dtype=dtype, device=device), requires_grad=False)
    set_weight_attrs(parameter, {"weight_loader": load})
    return parameter


class EngineAttention(nn.Module):
    """`InnerAttention` over vLLM's paged KV cache. `seq` is unused: the engine knows which tokens belong together."""

    def __init__(self, spec: AttentionSpec, layer: int, vllm_config: VllmConfig, prefix: str, device: torch.device):
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        self.v_head_dim = spec.v_head_dim
        self.head_size = max(spec.head_dim, spec.v_head_dim)
        self.num_heads = spec.num_heads // tp
        self.num_kv_heads = spec.num_kv_heads * num_replicas(spec.num_kv_heads) // tp
        options: dict[str, Any] = {
            "num_heads": self.num_heads,
            "head_size": self.head_size,
            "scale": spec.scale,
            "num_kv_heads": self.num_kv_heads,
            "cache_config": vllm_config.cache_config,
            # vLLM finds the KV cache by the one integer in this name, the global layer index.
            "prefix": f"{prefix}layers.{layer}.attn",
        }
        self.sinks = None
        if spec.sinks:
            rank = get_tensor_model_parallel_rank()
            options["sinks"] = self.sinks = local_parameter((self.num_heads,), 0, rank, sinks_dtype(), device)
        self.attn: Attention
        if spec.chunk is not None:
            self.attn = ChunkedLocalAttention(attention_chunk_size=spec.chunk, **options)
        else:
            options["logits_soft_cap"] = spec.softcap
            options["per_layer_sliding_window"] = spec.window  # also counts the current token
            self.attn = Attention(**options)

    def forward(self, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, seq: SequenceInfo) -> Tensor:
        given, wanted = (q_TNH.shape[1], k_TKH.shape[1], v_TKV.shape[1]), (self.num_heads, *2 * [self.num_kv_heads])
        if given != wanted:
            raise EngineError(
                f"{self.attn.layer_name} got {given} query, key and value heads on this rank, {wanted} are its own.",
                fix="project with titan_adapters.nn.QKVLinear, planned colwise: it gives each rank its heads.",
            )
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


def engine_norm(norm: RMSNorm, num_heads: int, head_dim: int, device: torch.device) -> RMSNormOverRanks:
    """`norm`, which is over the `head_dim` channels of all `num_heads` heads, where each rank has its own heads."""
    tp, replicas = get_tensor_model_parallel_world_size(), num_replicas(num_heads)
    weight = None
    if norm.weight is not None:
        index = get_tensor_model_parallel_rank() // replicas
        weight = local_parameter((num_heads * replicas * head_dim // tp,), 0, index, norm.weight.dtype, device)
    return RMSNormOverRanks(norm, weight, tp, tensor_model_parallel_all_reduce)


class EngineFeedForward(nn.Module):
    """Gated `FeedForward` with w1 and w3 as one matmul."""

    def __init__(self, module: FeedForward, prefix: str, *, reduce_results: bool = True):
        super().__init__()
        spec, dim = module.spec, module.w1.in_features
        self.w13 = MergedColumnParallelLinear(
            dim, [spec.hidden_dim] * 2, bias=spec.bias, prefix=f"{prefix}.w13", return_bias=False
        )
        options: dict[str, Any] = {"bias": spec.bias, "return_bias": False, "reduce_results": reduce_results}
        self.w2 = RowParallelLinear(spec.hidden_dim, dim, prefix=f"{prefix}.w2", **options)
        approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
        self.act = SiluAndMul() if spec.activation == "silu" else GeluAndMul(approximate=approximate)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.w2(self.act(self.w13(x_TD)))


def vocab_padding() -> int:
    """What vocabularies are padded to a multiple of: vLLM's number, and every rank the same share."""
    return math.lcm(DEFAULT_VOCAB_PADDING_SIZE, get_tensor_model_parallel_world_size())


def engine_embedding(module: nn.Embedding, prefix: str) -> VocabParallelEmbedding:
    size = (module.num_embeddings, module.embedding_dim)
    return VocabParallelEmbedding(*size, padding_size=vocab_padding(), prefix=prefix)


class EngineHead(nn.Module):
    """A head through vLLM's logits path: gathered over ranks, padded vocabulary rows cut off."""

    def __init__(self, module: nn.Linear, prefix: str):
        super().__init__()
        self.head = ParallelLMHead(
            module.out_features,
            module.in_features,
            bias=module.bias is not None,
            padding_size=vocab_padding(),
            prefix=f"{prefix}.head",
        )
        self.logits = LogitsProcessor(module.out_features)

    def forward(self, x_TD: Tensor) -> Tensor | None:
        return self.logits(self.head, x_TD, self.head.bias)
