"""The swap: which vLLM layer each planned module of an author's model becomes, and where its weights went."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import EngineError
from titan_adapters.nn import (
    Attention,
    FeedForward,
    InnerAttention,
    InnerExperts,
    MoE,
    NormRope,
    QKVLinear,
    RMSNorm,
    Rope,
    Router,
)
from titan_adapters.plan import Style, colwise, partwise, replicate, rowwise, vocabwise
from titan_adapters.vllm.cpu_rope import PairRope, exchanges_pairs
from titan_adapters.vllm.layers import (
    EngineAttention,
    EngineFeedForward,
    EngineHead,
    EngineQKVLinear,
    engine_embedding,
    engine_norm,
    num_replicas,
)
from titan_adapters.vllm.moe import (
    OPTION,
    EngineExperts,
    EngineMoE,
    EngineSharedExperts,
    ShardedExperts,
    moved_experts,
    native_routing,
    requested_path,
)
from titan_adapters.vllm.moves import ReplicatedHeads, Shard, Swap, materialise, moved_feed_forward
from titan_adapters.vllm.norm_rope import EngineNormRope, fusible
from titan_adapters.vllm.parallel import plan_problems
from titan_adapters.vllm.stage import Stage, drop_other_stages

logger = init_logger("vllm.titan_adapters")


def swap_modules(
    model: BaseTransformer, stage: Stage, vllm_config: VllmConfig, prefix: str, device: torch.device
) -> Swap:
    """Replace the seams and every planned module of `model` (on the meta device) by the engine's own.

    Only what `stage` computes is left. What the plan replicates and vLLM has no layer for, such as norms, stays the
    author's module and is materialised.

    Raises:
        EngineError: a seam is missing, doubled, subclassed, or contradicts the config, or the plan can't be followed
            on this many ranks.
    """
    styles = model.parallel_plan(model.config).resolve(model)
    _check_seams(model)
    if problems := plan_problems(model, styles, get_tensor_model_parallel_world_size()):
        raise EngineError(
            f"The engine can't follow the parallel plan of {type(model).__name__}.",
            problems,
            fix="plan these modules as titan_adapters.decoder_plan does, or run the model on one rank.",
        )
    drop_other_stages(model, stage)
    swap = Swap(model)
    _swap_full_norms(swap, device)
    kv_heads = {
        f"{path}.{name}": module.spec.num_kv_heads
        for path, module in model.named_modules()
        if isinstance(module, QKVLinear)
        for name in ("wk", "wv")
    }
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
            swap.moved |= moved_feed_forward(path, path)
        elif type(module) is NormRope and fusible(module.spec):
            replacement = EngineNormRope(module.spec)
        elif type(module) is Rope and exchanges_pairs(module.spec):
            replacement = PairRope(module.spec, module.max_seq_len)
        elif type(module) is MoE:
            replacement = _swap_moe(swap, module, path, styles, vllm_config, device)
        elif type(module) is InnerExperts:
            replacement = _swap_experts(swap, module, path, vllm_config, device)
        elif isinstance(module, Router):
            done += (f"{path}.",)  # stays as it is, in its own dtype
        elif path in styles:
            replicas = num_replicas(kv_heads[path]) if path in kv_heads and styles[path] is colwise else 1
            replacement = _planned_layer(module, styles[path], path, replicas, is_head=module is model.lm_head)
            if isinstance(replacement, EngineHead):
                swap.moved[path] = (f"{path}.head", None)
            elif replicas > 1:
                swap.moved[path] = (path, ReplicatedHeads(kv_heads[path], replicas))
        if replacement is not None:
            model.set_submodule(path, replacement)
            done += (f"{path}.",)
    for how, paths in swap.moe_paths.items():
        logger.info("%s: %s", how, ", ".join(paths))
    if model.config.tied_embeddings and stage.is_last:
        _tie_head(model)
        swap.aliases["tok_embeddings.weight"] = "lm_head.head.weight"
    materialise(model, device)
    return swap


def _swap_full_norms(swap: Swap, device: torch.device) -> None:
    """Norms over all heads, where those are on several ranks."""
    if get_tensor_model_parallel_world_size() == 1:
        return
    for path, module in list(swap.model.named_modules()):
        if not isinstance(module, Attention) or module.spec.qk_norm is None or module.spec.qk_norm.scope != "full":
            continue
        spec = module.spec
        for name, num_heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
            norm = module.get_submodule(name)
            if type(norm) is not RMSNorm:
                raise EngineError(
                    f"{path}.{name} is a {type(norm).__name__}, whose statistics the engine can't sum over ranks.",
                    fix="use titan_adapters.nn.RMSNorm, or run the model on one rank.",
                )
            swap.model.set_submodule(f"{path}.{name}", engine_norm(norm, num_heads, spec.head_dim, device))


def _swap_moe(
    swap: Swap, module: MoE, path: str, styles: dict[str, Style], vllm_config: VllmConfig, device: torch.device
) -> nn.Module | None:
    """The mixture over vLLM's fused experts, or None to swap its parts."""
    shared: nn.Module | None = module.shared_experts
    own_parts = type(module.router) is not Router or type(module.experts) is not InnerExperts
    if own_parts or requested_path(vllm_config) == "torch":
        return None
    moved: dict[str, tuple[str, Shard]] = {}
    if shared is not None:
        # A bias would be in the sum over ranks once for each.
        if type(shared) is not FeedForward or shared.spec.bias:
            return None
        if not _packs_gate(shared, styles, f"{path}.shared_experts"):
            return None
        shared = EngineFeedForward(shared, f"{path}.shared_experts", reduce_results=False)
        where = f"{path}.shared" if module.shared_gate is None else f"{path}.shared.feed_forward"
        moved |= moved_feed_forward(f"{path}.shared_experts", where)
        if module.shared_gate is not None:
            shared = EngineSharedExperts(shared, module.shared_gate)
            moved[f"{path}.shared_gate"] = (f"{path}.shared.gate", None)
    if module.spec.router_dtype == "model":  # in fp32, the router multiplies by the weight itself
        gate = module.router.gate
        module.router.gate = _planned_layer(gate, replicate, f"{path}.router.gate", 1, is_head=False)  # type: ignore
    materialise(module.router, device)  # vLLM's router takes the bias itself
    try:
        replacement = EngineMoE(module, path, shared)
    except (ValueError, NotImplementedError):
        return None  # its experts meet the same obstacle, and report it
    swap.moved |= moved
    swap.moved_parameters |= moved_experts(f"{path}.experts", f"{path}.runner", module.spec)
    router = "vLLM's router" if native_routing(module.spec) else "the model's own routing function"
    swap.moe_paths.setdefault(f"vLLM's fused experts with {router}", []).append(path)
    return replacement


def _swap_experts(
    swap: Swap, module: InnerExperts, path: str, vllm_config: VllmConfig, device: torch.device
) -> nn.Module | None:
    """The experts alone over vLLM's fused ones, or in torch; None to keep them as they are."""
    wanted = requested_path(vllm_config)
    try:
        if wanted == "torch":
            raise ValueError(f"additional_config[{OPTION!r}] says so")
        replacement = EngineExperts(module, path)
    except (ValueError, NotImplementedError) as reason:
        if wanted == "fused":
            raise EngineError(f"{path} has no fused kernel here: {reason}.", fix=f"set {OPTION} to 'auto'.") from reason
        swap.moe_paths.setdefault(f"the model's own experts in torch ({reason})", []).append(path)
        if get_tensor_model_parallel_world_size() == 1:
            module.use_static_kernel()
            return None
        whole = vllm_config.parallel_config.enable_expert_parallel
        sharded = ShardedExperts(module, device, whole_experts=whole)
        names = [name for name, _ in module.named_parameters()]
        swap.moved_parameters |= {f"{path}.{name}": (f"{path}.local.{name}", None) for name in names}
        return sharded
    swap.moved_parameters |= moved_experts(path, f"{path}.runner", module.spec)
    swap.moe_paths.setdefault("vLLM's fused experts behind the model's own router", []).append(path)
    return replacement


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


def _planned_layer(module: nn.Module, style: Style, path: str, replicas: int, *, is_head: bool) -> nn.Module | None:
    """vLLM's layer for one planned module, whose outputs are on `replicas` ranks each; None to keep the author's."""
    if isinstance(module, nn.Embedding) and style is vocabwise:
        return engine_embedding(module, path)
    if type(module) is not nn.Linear:
        return None
    if is_head and style is vocabwise:
        return EngineHead(module, path)
    # What is partwise is whole on every rank; it differs from replicate only in its gradients.
    kinds = {
        colwise: ColumnParallelLinear,
        rowwise: RowParallelLinear,
        replicate: ReplicatedLinear,
        partwise: ReplicatedLinear,
    }
    if style not in kinds:
        raise EngineError(f"{path}: only lm_head can be {style}.", fix="plan it colwise, rowwise or replicate.")
    size = (module.in_features, module.out_features * replicas)
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
