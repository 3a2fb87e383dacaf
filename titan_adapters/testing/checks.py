"""The contract suite: what a model must do, tested on its own tiny configs. Each check raises to fail.

A check gets a `Case` and returns a short detail for the report. Its docstring says what it promises, and what to look
for if it fails. All but `gradients` run without autograd.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_adapters.checkpoint import Identity, load_model, open_weights, save_checkpoint, write_identity
from titan_adapters.checkpoint.api import Format, stored_dtypes
from titan_adapters.contract import meta_model
from titan_adapters.differences import differences
from titan_adapters.nn import Rope, record_routing, replay_routing
from titan_adapters.state_dict import native_tensors
from titan_adapters.testing.case import LENGTH, Case, Skip, both, close, cut_seams
from titan_adapters.testing.edges import hard_router_logits, reach

BFLOAT16_TOLERANCE = 0.12
"""bf16 keeps 8 bits, 0.4% per rounding; three layers of width 192 came to 7% at worst."""
TOKEN_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9)
"""The fewest, and one less and more than 2, 4 and 8 ranks."""


def plan_covers(case: Case) -> str:
    """Every module that owns parameters matches one row of `parallel_plan`, and every row matches a module.

    Each problem names its module or row.
    """
    return f"{len(case.cls.parallel_plan(case.config).resolve(case.model))} modules"


def rows_cover(case: Case) -> str:
    """Every parameter is written by exactly one row of `state_dict_adapter`, with the shape it has.

    Each problem names its tensor; shapes only, no values.
    """
    adapter = case.cls.state_dict_adapter(case.config)
    native = {name: t.to("meta") for name, t in native_tensors(case.model).items()}
    adapter.check(adapter.to_hf(native), native)
    return f"{len(native)} tensors"


def rows_invert(case: Case) -> str:
    """Native weights come back bitwise from the published layout, whatever the order of its tensors.

    If this fails, a row's op has another inverse than its forward direction, often a permutation's head count.
    """
    adapter = case.cls.state_dict_adapter(case.config)
    native = native_tensors(case.model)
    published = list(adapter.to_hf(native).items())
    order = torch.randperm(len(published), generator=torch.Generator().manual_seed(2)).tolist()
    back = adapter.to_native(dict(published[i] for i in order))
    wrong = [name for name in native if not torch.equal(back[name], native[name])]
    assert not wrong, f"not bitwise after a round trip: {', '.join(wrong)}"
    return "bitwise, shuffled order"


def config_survives_json(case: Case) -> str:
    """The config comes back equal from JSON, as it travels to an engine's processes."""
    assert case.cls.Config.from_json(case.config.to_json()) == case.config, "config changed on its way through JSON"
    return case.config.fingerprint()[:12]


def config_survives_publishing(case: Case) -> str:
    """`from_hf_config(to_hf_config(config))` is the config.

    If this fails, one direction drops a field, or defaults it.
    """
    published = case.published_config()
    back = case.cls.from_hf_config(published)
    changed = [d.field for d in differences(back.to_json(), case.config.to_json())]
    assert not changed, f"from_hf_config(to_hf_config(config)) is another config: {', '.join(changed)}"
    return f"{len(published)} keys"


def checkpoint_round_trip(case: Case) -> str:
    """Saved in several shards and loaded, natively and as published, weights are bitwise what they were in the config's
    dtype, and a tied head is still tied."""
    stored = stored_dtypes(case.cls, case.config)
    wanted = {name: tensor.to(stored[name]).float() for name, tensor in native_tensors(case.model).items()}
    formats: list[Format] = ["native"]
    with contextlib.suppress(Skip):
        formats += ["hf"] if case.published_config() else []
    shards = []
    for format in formats:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / format
            save_checkpoint(case.model, path, format, max_shard_bytes=50_000, cast=True)
            loaded = load_model(path, dtype=torch.float32)
            shards.append(len({h.file for h in open_weights(path).headers.values()}))
        wrong = [name for name, tensor in native_tensors(loaded).items() if not torch.equal(tensor, wanted[name])]
        assert not wrong, f"not bitwise ({format}): {', '.join(wrong)}"
        if case.config.tied_embeddings:
            assert loaded.lm_head.weight is loaded.tok_embeddings.weight, f"the tied head came back untied ({format})"
    return f"bitwise, {' and '.join(formats)}, {' and '.join(map(str, shards))} shards"


def meta_device_init(case: Case) -> str:
    """Built on the meta device and materialised, the model computes bitwise what a normally built one does.

    If this fails, `__init__` computes a table or buffer that `to_empty` can't restore, or unties the head.
    """
    model = meta_model(case.cls, case.config).to_empty(device="cpu").float()
    if case.config.tied_embeddings:
        assert model.lm_head.weight is model.tok_embeddings.weight, "to_empty untied the head"
    model.load_state_dict(case.model.state_dict())
    tokens = case.tokens(2, LENGTH)
    assert torch.equal(model(tokens), case.model(tokens)), "a buffer was lost on the meta device"
    return "bitwise"


def causality(case: Case) -> str:
    """Changing a token changes its own logits, and bitwise nothing before it."""
    tokens = case.tokens(1, LENGTH)
    changed = tokens.clone()
    changed[0, LENGTH // 2] = (changed[0, LENGTH // 2] + 1) % case.config.vocab_size
    half = LENGTH // 2
    before, after = both(case.model, tokens, changed, slice(half))
    assert torch.equal(before[0, :half], after[0, :half]), "a token is seen by earlier ones"
    assert not torch.equal(before[0, half], after[0, half]), "a token does not influence its own logits"
    return f"token {half} of {LENGTH}"


def attention_only_through_seam(case: Case) -> str:
    """With `ta.nn.InnerAttention` cut in every layer, no token influences another.

    If this fails, the model has a second path between tokens, which an engine's paged cache could not serve.
    """
    cut = Case.build(case.cls, case.config).model
    seams = cut_seams(cut)
    tokens = case.tokens(LENGTH)
    changed = tokens.clone()
    changed[0] = (changed[0] + 1) % case.config.vocab_size
    before, after = both(cut, tokens, changed, slice(1, None))
    assert torch.equal(before[1:], after[1:]), "tokens meet outside titan_adapters.nn.InnerAttention"
    return f"{seams} seams"


def packing(case: Case) -> str:
    """Documents packed in one row give what each gives alone, with explicit positions or explicit ids.

    If this fails, the model makes positions or masks from the length of its input.
    """
    lengths = (LENGTH // 2, 1, LENGTH - LENGTH // 2)
    documents = [case.tokens(length) for length in lengths]
    alone = torch.cat([case.model(document) for document in documents])
    packed = torch.cat(documents)
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
    close(case.model(packed, positions), alone, "positions given")
    close(case.model(packed, None, ids), alone, "document ids given")
    return close(case.model(packed[None], positions[None])[0], alone, "batched")


def token_counts(case: Case) -> str:
    """1, 2 and 3 tokens, and those around 4 and 8 parallel ranks, give the start of what a longer sequence gives.

    If this fails, a path for short inputs, or a reshape that guesses, computes something else.
    """
    tokens = case.tokens(LENGTH)
    whole = case.model(tokens)
    for count in TOKEN_COUNTS:
        close(case.model(tokens[:count]), whole[:count], f"{count} tokens")
        close(case.model(tokens[None, :count])[0], whole[:count], f"{count} tokens, batched")
    return ", ".join(map(str, TOKEN_COUNTS))


def gradients(case: Case) -> str:
    """A finite gradient other than zero reaches every parameter.

    If this fails, a parameter is never used, or a detach or an in-place write hides it.
    """
    model = Case.build(case.cls, case.config).model
    with torch.enable_grad():
        logits = model(case.tokens(2, LENGTH))
        nn.functional.cross_entropy(logits.flatten(0, 1), case.tokens(2, LENGTH).flatten()).backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    assert not dead, f"no finite gradient reaches {', '.join(dead)}"
    return f"{len(list(model.parameters()))} parameters"


def bfloat16(case: Case) -> str:
    """In bf16, logits stay within its roundings of those in fp32. Mixtures take the same experts both times.

    If this fails, a mask, a table or a norm is computed in bf16 that has to stay in fp32.
    """
    model, tokens = Case.build(case.cls, case.config).model, case.tokens(2 * LENGTH)
    with record_routing(model) as record:
        reference = model(tokens)
    model.to(torch.bfloat16)
    tables = [name for name, module in model.named_modules() if isinstance(module, Rope)]
    rounded = [name for name in tables if model.get_submodule(name).cos_sin.dtype != torch.float32]
    assert not rounded, f"rope tables are no longer fp32: {', '.join(rounded)}"
    with replay_routing(model, record.experts()):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16, f"logits of a bf16 model are {logits.dtype}"
    return close(logits.float(), reference, "bf16 against fp32", BFLOAT16_TOLERANCE)


def logits_equal_transformers(case: Case) -> str:
    """Logits equal those of the stock implementation of the published format, if transformers has one.

    This is what finds a wrong scale, norm, activation or rope. A model without a stock implementation needs a reference
    of its own, in a test beside this one.
    """
    published = case.published_config()
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    assert published["architectures"], "to_hf_config names no architecture"
    if published["model_type"] not in CONFIG_MAPPING:
        raise Skip(f"transformers has no {published['model_type']}")
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(case.model, Path(folder) / "hf", "hf", cast=True)
        # Eager is the plain formula. By default transformers may take SDPA, which drops a softcap without a word.
        options = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
        found: Any = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", **options)
        ours = load_model(Path(folder) / "hf", dtype=torch.float32)
    theirs, loaded = found
    unloaded = {kind: loaded[kind] for kind in ("unexpected_keys", "missing_keys", "mismatched_keys") if loaded[kind]}
    assert not unloaded, f"transformers loads other tensors: {unloaded}"
    tokens = case.tokens(2, min(case.config.max_seq_len, 2 * LENGTH))
    return close(ours(tokens), theirs.eval()(tokens).logits, "against transformers")


def emitted_config_rereads(case: Case) -> str:
    """What vLLM's own resolver makes of the emitted config is what the specs say, number by number."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vllm is not installed")
    from titan_adapters.vllm.reread import reread_problems

    with tempfile.TemporaryDirectory() as folder:
        identity = Identity(case.cls, case.config, "native")
        write_identity(Path(folder), identity)
        problems, compared = reread_problems(Path(folder), identity)
    assert not problems, "; ".join(problems)
    return f"{compared} numbers"


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
    reach,
    packing,
    token_counts,
    hard_router_logits,
    gradients,
    bfloat16,
    logits_equal_transformers,
    emitted_config_rereads,
)
