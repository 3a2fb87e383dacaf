"""The fast kernels of plain torch compute what the definitions do, as one graph.

torch has no gradients of flex_attention on a CPU, but nothing except a check keeps its unfused form from having them;
`flex_trains_here` lifts that. The fused form is tested on GPUs, at the end.
"""

import pytest
import torch
from torch.nn.attention import flex_attention

import titan_adapters as ta
from tests.conftest import random_model, relative_error, titan_error_text
from tests.nn.test_attention import formula, inner_attention, qkv
from titan_adapters.nn import InnerAttention, InnerExperts, sequence_info
from titan_adapters.nn.flex import Reach, block_mask

FAMILIES = ("llama", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_moe")
"""Interleaved rope, softcaps, windows, sinks and biased experts, chunks, experts."""
DOCUMENTS = torch.tensor([[*range(13), *range(7)], [*range(4), *range(16)]])
"""Positions of two rows with two documents each."""


@pytest.fixture
def flex_trains_here(monkeypatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


def built(family: str) -> ta.BaseTransformer:
    cls = ta.get_model(family)
    return random_model(cls, next(iter(cls.tiny_configs().values())))


def tokens_for(model: ta.BaseTransformer, positions: torch.Tensor) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, positions.shape, generator=torch.Generator().manual_seed(1))


def errors_against(reference: ta.BaseTransformer, model: ta.BaseTransformer, run, positions: torch.Tensor):
    """Relative errors of the logits and of every gradient. `run` is `model`, compiled or not."""
    tokens = tokens_for(reference, positions)
    device = next(model.parameters()).device
    expected, actual = reference(tokens, positions), run(tokens.to(device), positions.to(device))
    for logits in (expected, actual):
        logits.square().mean().backward()
    errors = {"logits": relative_error(actual.cpu(), expected)}
    for (name, theirs), ours in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert theirs.grad is not None and ours.grad is not None, name
        errors[name] = relative_error(ours.grad.cpu(), theirs.grad)
    return errors


@pytest.mark.parametrize(
    "changes",
    [
        dict(window=4),
        dict(chunk=4, window=3),
        dict(softcap=1.5),
        dict(sinks=True),
        dict(sinks=True, softcap=1.5, window=3, chunk=5),
        dict(v_head_dim=12, sinks=True),
        dict(v_head_dim=4),
    ],
    ids=str,
)
@torch.no_grad()
def test_flex_is_the_formula(changes):
    q, k, v = qkv(v_head_dim=changes.get("v_head_dim", 8))
    inner = inner_attention(**changes)
    inner.kernel = "flex"
    out = inner(q, k, v, sequence_info(torch.zeros(11), None, None))
    assert relative_error(out, formula(q, k, v, **changes)) < 1e-6


@torch.no_grad()
def test_flex_keeps_documents_apart():
    """The second document alone, and as the end of a packed sequence."""
    inner = inner_attention(window=4)
    inner.kernel = "flex"
    q, k, v = qkv()
    packed = inner(q, k, v, sequence_info(torch.zeros(11), torch.tensor([*range(5), *range(6)]), None))
    assert relative_error(packed[5:], formula(q[5:], k[5:], v[5:], window=4)) < 1e-6


def test_rows_of_a_batch_skip_blocks_of_their_own():
    """Blocks are of 128 tokens: the second row's first block is hidden from its second, the first row's is not.

    A GPU's kernel looks at no other blocks. The unfused form looks at all, so its results would not show a wrong one.
    """
    positions = torch.stack([torch.arange(200), torch.cat([torch.arange(128), torch.arange(72)])])
    documents = sequence_info(positions, positions, None)
    mask = block_mask(Reach(None, None), *documents[:2])
    assert mask.to_dense()[:, 0].tolist() == [[[1, 0], [1, 1]], [[1, 0], [0, 1]]]
    mask = block_mask(Reach(None, 128), positions[0], None)
    assert mask.to_dense()[0, 0].tolist() == [[1, 0], [0, 1]]
    mask = block_mask(Reach(1, None), positions[0], None)
    assert mask.to_dense()[0, 0].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "llama4_text"])
def test_model_with_fast_kernels_as_one_graph(family, flex_trains_here):
    """fp32 sums in another order: a few 1e-7 in the logits. Gradients are sums of terms that cancel."""
    reference, model = built(family), built(family)
    ta.nn.use_kernels(model)
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    errors = errors_against(reference, model, run, DOCUMENTS)
    assert errors.pop("logits") < 1e-5
    assert max(errors.values()) < 1e-4, errors


def test_layers_compiled_one_by_one_share_masks(flex_trains_here):
    """As with FSDP: the masks come into each layer's graph from outside, and layers that are alike share a graph."""
    reference, model = built("gemma3_text"), built("gemma3_text")
    ta.nn.use_kernels(model)
    torch.compiler.reset()
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    errors = errors_against(reference, model, model, DOCUMENTS)
    assert max(errors.values()) < 1e-4, errors


@torch.no_grad()
def test_each_mask_is_built_once(monkeypatch):
    """Three layers with windows of 5, 5 and none: two masks with documents; one without, where no window is a triangle
    that flash attention takes; none if nothing falls out of the window."""
    model = built("gemma3_text")
    reference = model(tokens_for(model, DOCUMENTS))
    ta.nn.use_kernels(model)
    calls = []

    def counted(*args):
        calls.append(args)
        return flex_attention.create_block_mask(*args)

    monkeypatch.setattr("titan_adapters.nn.flex.create_block_mask", counted)
    for positions, length, expected in ((DOCUMENTS, 20, 2), (None, 20, 1), (None, 5, 0)):
        calls.clear()
        model(tokens_for(model, DOCUMENTS)[:, :length], positions)
        assert len(calls) == expected
    # Without what the model hands on, a layer still sees what it should.
    model.flex_specs = ()
    calls.clear()
    assert relative_error(model(tokens_for(model, DOCUMENTS)), reference) < 1e-5
    assert len(calls) == 2


def test_kernels_are_chosen_for_all_layers_and_taken_back():
    model = built("gpt_oss")
    ta.nn.use_kernels(model)
    chosen = [m.kernel for m in model.modules() if isinstance(m, InnerAttention | InnerExperts)]
    assert chosen == ["flex", "grouped"] * model.config.num_layers
    ta.nn.use_kernels(model, attention="reference", experts="loop")
    chosen = [m.kernel for m in model.modules() if isinstance(m, InnerAttention | InnerExperts)]
    assert chosen == ["reference", "loop"] * model.config.num_layers and model.flex_specs == ()


def test_kernels_that_do_not_exist_or_do_not_fit_are_refused():
    model = built("qwen3_moe").bfloat16()
    model.layers[1].moe.experts.w1.data = torch.zeros(4, 12, 40, dtype=torch.bfloat16)
    with pytest.raises(ta.TitanError) as caught:
        ta.nn.use_kernels(model, attention="flash")  # type: ignore[arg-type]
    text = titan_error_text(caught)
    assert "attention='flash' is none of reference, flex" in text
    assert "layers.1.moe.experts: width 12 or dim 40 of torch.bfloat16 is no multiple of 16 bytes" in text
    assert {m.kernel for m in model.modules() if isinstance(m, InnerAttention)} == {"reference"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none")
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fast_kernels_on_a_gpu(family, compiled):
    """Triton's kernels in fp32 against the definitions on the CPU, over several blocks of 128 tokens, one cut short."""
    positions = torch.stack([torch.cat(list(map(torch.arange, sizes))) for sizes in ([120, 90, 90], [37, 128, 128, 7])])
    reference, model = built(family), built(family).cuda()
    ta.nn.use_kernels(model)
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True) if compiled else model
    errors = errors_against(reference, model, run, positions)
    assert errors.pop("logits") < 1e-5
    assert max(errors.values()) < 1e-3, errors
