"""The contract suite: what a model must do, tested on its own tiny configs. Each check raises to fail.

A check gets a `Case` and returns a short detail for the report. Tolerances are relative 2-norms over all logits in
fp32: 1e-5 against another implementation, 1e-5 between two layouts of the same tokens (other reduction orders).
"""

import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from titan_adapters.checkpoint import Identity, load_model, open_weights, save_checkpoint, write_identity
from titan_adapters.checkpoint.api import stored_dtypes
from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer, meta_model
from titan_adapters.errors import ConfigError
from titan_adapters.nn import InnerAttention, record_routing, replay_routing
from titan_adapters.state_dict import native_tensors

TOLERANCE = 1e-5
LENGTH = 40


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


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """2-norm of the difference over the 2-norm of the reference; NaN or a shape mismatch never passes."""
    assert ours.shape == reference.shape, f"shapes differ: {tuple(ours.shape)}, {tuple(reference.shape)}"
    assert torch.isfinite(ours).all() and torch.isfinite(reference).all(), "logits are not finite"
    return ((ours - reference).norm() / reference.norm()).item()


def _close(ours: Tensor, reference: Tensor, what: str) -> str:
    error = relative_error(ours, reference)
    largest = (ours - reference).abs().max().item()
    assert error <= TOLERANCE, f"{what}: relative error {error:.1e} exceeds {TOLERANCE:.0e} (largest {largest:.1e})"
    return f"relative {error:.1e}, largest {largest:.1e}"


def plan_covers(case: Case) -> str:
    return f"{len(case.cls.parallel_plan(case.config).resolve(case.model))} modules"


def rows_cover(case: Case) -> str:
    adapter = case.cls.state_dict_adapter(case.config)
    native = {name: t.to("meta") for name, t in native_tensors(case.model).items()}
    adapter.check(adapter.to_hf(native), native)
    return f"{len(native)} tensors"


def rows_invert(case: Case) -> str:
    adapter = case.cls.state_dict_adapter(case.config)
    native = native_tensors(case.model)
    published = list(adapter.to_hf(native).items())
    order = torch.randperm(len(published), generator=torch.Generator().manual_seed(2)).tolist()
    back = adapter.to_native(dict(published[i] for i in order))
    wrong = [name for name in native if not torch.equal(back[name], native[name])]
    assert not wrong, f"not bitwise after a round trip: {', '.join(wrong)}"
    return "bitwise, shuffled order"


def config_survives_json(case: Case) -> str:
    assert case.cls.Config.from_json(case.config.to_json()) == case.config, "config changed on its way through JSON"
    return case.config.fingerprint()[:12]


def config_survives_publishing(case: Case) -> str:
    published = _published_config(case)
    assert case.cls.from_hf_config(published) == case.config, "from_hf_config(to_hf_config(config)) is another config"
    return f"{len(published)} keys"


def checkpoint_round_trip(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        save_checkpoint(case.model, path, max_shard_bytes=50_000, cast=True)
        loaded = load_model(path, dtype=torch.float32)
        stored = stored_dtypes(case.cls, case.config)
        wrong = [
            name
            for name, tensor in native_tensors(loaded).items()
            if not torch.equal(tensor, native_tensors(case.model)[name].to(stored[name]).float())
        ]
        assert not wrong, f"not bitwise: {', '.join(wrong)}"
        if case.config.tied_embeddings:
            assert loaded.lm_head.weight is loaded.tok_embeddings.weight, "the tied head came back untied"
        return f"bitwise, {len({h.file for h in open_weights(path).headers.values()})} shards"


def meta_device_init(case: Case) -> str:
    """Built on meta and materialised, the model computes what a normally built one does."""
    model = meta_model(case.cls, case.config).to_empty(device="cpu").float()
    if case.config.tied_embeddings:
        assert model.lm_head.weight is model.tok_embeddings.weight, "to_empty untied the head"
    model.load_state_dict(case.model.state_dict())
    tokens = case.tokens(2, LENGTH)
    assert torch.equal(model(tokens), case.model(tokens)), "a buffer was lost on the meta device"
    return "bitwise"


def causality(case: Case) -> str:
    tokens = case.tokens(1, LENGTH)
    changed = tokens.clone()
    changed[0, LENGTH // 2] = (changed[0, LENGTH // 2] + 1) % case.config.vocab_size
    half = LENGTH // 2
    before, after = _both(case.model, tokens, changed, slice(half))
    assert torch.equal(before[0, :half], after[0, :half]), "a token is seen by earlier ones"
    assert not torch.equal(before[0, half], after[0, half]), "a token does not influence its own logits"
    return f"token {half} of {LENGTH}"


def attention_only_through_seam(case: Case) -> str:
    """With the seam cut, no token may influence another: an engine could not serve a second path."""

    class Cut(nn.Module):
        def forward(self, q, k, v, seq):
            return v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2)

    cut = Case.build(case.cls, case.config).model
    found = {path: module for path, module in cut.named_modules() if isinstance(module, InnerAttention)}
    seams, layers = list(found), sorted(module.layer for module in found.values())
    assert layers == list(range(case.config.num_layers)), f"seams are there for layers {layers}"
    for path in seams:
        cut.set_submodule(path, Cut())
    tokens = case.tokens(LENGTH)
    changed = tokens.clone()
    changed[0] = (changed[0] + 1) % case.config.vocab_size
    before, after = _both(cut, tokens, changed, slice(1, None))
    assert torch.equal(before[1:], after[1:]), "tokens meet outside titan_adapters.nn.InnerAttention"
    return f"{len(seams)} seams"


def _both(model: nn.Module, tokens: Tensor, changed: Tensor, unaffected: slice) -> tuple[Tensor, Tensor]:
    """Logits of two inputs that must be bitwise equal for `unaffected` tokens.

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


def packing(case: Case) -> str:
    """Documents packed in one row give what each gives alone, with explicit positions or explicit ids."""
    lengths = (LENGTH // 2, 1, LENGTH - LENGTH // 2)
    documents = [case.tokens(length) for length in lengths]
    alone = torch.cat([case.model(document) for document in documents])
    packed = torch.cat(documents)
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
    _close(case.model(packed, positions), alone, "positions given")
    _close(case.model(packed, None, ids), alone, "document ids given")
    return _close(case.model(packed[None], positions[None])[0], alone, "batched")


def few_tokens(case: Case) -> str:
    tokens = case.tokens(LENGTH)
    whole = case.model(tokens)
    for count in (1, 2, 3):
        _close(case.model(tokens[:count]), whole[:count], f"{count} tokens")
    return "1, 2, 3"


def gradients(case: Case) -> str:
    model = Case.build(case.cls, case.config).model
    nn.functional.cross_entropy(
        model(case.tokens(2, LENGTH)).flatten(0, 1), case.tokens(2, LENGTH).flatten()
    ).backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    assert not dead, f"no finite gradient reaches {', '.join(dead)}"
    return f"{len(list(model.parameters()))} parameters"


def logits_equal_transformers(case: Case) -> str:
    """Against the stock implementation of the published format, when transformers has one."""
    published = _published_config(case)
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    assert published["architectures"], "to_hf_config names no architecture"
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(case.model, Path(folder) / "hf", "hf", cast=True)
        # Eager is the plain formula. By default transformers may take SDPA, which drops a softcap without a word.
        options = {"attn_implementation": "eager", "dtype": torch.float32}
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", **options)
        ours = load_model(Path(folder) / "hf", dtype=torch.float32)
    tokens = case.tokens(2, min(case.config.max_seq_len, 2 * LENGTH))
    with torch.no_grad():
        return _close(ours(tokens), theirs(tokens).logits, "against transformers")


def emitted_config_rereads(case: Case) -> str:
    """What vLLM's own resolver makes of the emitted config, number by number."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vllm is not installed")
    from titan_adapters.vllm.reread import reread_problems

    with tempfile.TemporaryDirectory() as folder:
        identity = Identity(case.cls, case.config, "native")
        write_identity(Path(folder), identity)
        problems, compared = reread_problems(Path(folder), identity)
    assert not problems, "; ".join(problems)
    return f"{compared} numbers"


def _published_config(case: Case) -> dict:
    try:
        return case.cls.to_hf_config(case.config)
    except ConfigError as error:
        raise Skip(error.summary) from error


CHECKS: tuple[Callable[[Case], str], ...] = (
    plan_covers,
    rows_cover,
    rows_invert,
    config_survives_json,
    config_survives_publishing,
    checkpoint_round_trip,
    meta_device_init,
    causality,
    attention_only_through_seam,
    packing,
    few_tokens,
    gradients,
    logits_equal_transformers,
    emitted_config_rereads,
)
