"""What surrounds inner attention: biases per projection, norms before and after rope, and output gates.

Shapes: S tokens  D model dim  N query heads  K kv heads  H head_dim  V v_head_dim.
"""

import pytest
import torch

import titan_adapters as ta
from tests.conftest import random_model, random_tokens, relative_error
from tests.vllm.models import TINY, FreeAttention
from titan_adapters.nn import sequence_info

S, D, N, K, H = 20, 48, 6, 2, 32
RMS = dict(scope="per_head", eps=1e-5, offset=0.0, weight_in_fp32=False)
LEARNT_BEFORE = ta.QKNormSpec(**RMS, weight=True, after_rope=False)
LEARNT_AFTER = ta.QKNormSpec(**RMS, weight=True, after_rope=True)
WEIGHTLESS_AFTER = ta.QKNormSpec(**RMS, weight=False, after_rope=True)


def layer_of(**changes) -> ta.nn.Attention:
    return random_model(FreeAttention, FreeAttention.config(changes)).layers[0].attention


def formula(x_SD, w, *, biases="", v_head_dim=H, qk_norm=None, output_gate=None):
    """In fp64, from the weights by their native names; rope turns complex numbers (2j, 2j + 1), as in Meta's code."""
    sizes = {"q": (N, H), "k": (K, H), "v": (K, v_head_dim)}
    heads = {}
    for p, (count, size) in sizes.items():
        flat = torch.einsum("sd,od->so", x_SD, w[f"qkv_linear.w{p}.weight"])
        heads[p] = (flat + (w[f"qkv_linear.w{p}.bias"] if p in biases else 0)).view(S, count, size)
    turns = torch.exp(1j * torch.outer(torch.arange(S), TINY.rope.theta ** (-torch.arange(0, H, 2).double() / H)))
    for p in "qk":
        steps = [lambda t: torch.view_as_real(torch.complex(t[..., 0::2], t[..., 1::2]) * turns[:, None]).flatten(-2)]
        if qk_norm is not None:
            weight = w[f"{p}_norm.weight"] if qk_norm.weight else 1
            norm = lambda t, weight=weight: t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight  # noqa: E731
            steps.insert(1 if qk_norm.after_rope else 0, norm)
        for step in steps:
            heads[p] = step(heads[p])
    k, v = (heads[p].repeat_interleave(N // K, dim=1) for p in "kv")
    scores = torch.einsum("snh,tnh->nst", heads["q"], k) / H**0.5
    weights = (scores + torch.full((S, S), float("-inf")).triu(1)).softmax(-1)
    out = torch.einsum("nst,tnv->snv", weights, v)
    if output_gate is not None:
        gate = 1 / (1 + (-torch.einsum("sd,gd->sg", x_SD, w["wg.weight"])).exp())
        out = out * gate.view(S, N, -1)
    return torch.einsum("so,do->sd", out.flatten(1), w["wo.weight"]) + (w["wo.bias"] if "o" in biases else 0)


@pytest.mark.parametrize(
    "changes",
    [dict(biases=biases) for biases in ("", "k", "v", "qo", "qkv", "o", "qkvo")]
    + [dict(output_gate="per_head"), dict(output_gate="per_channel")]
    + [dict(qk_norm=norm) for norm in (LEARNT_BEFORE, LEARNT_AFTER, WEIGHTLESS_AFTER)]
    + [
        dict(v_head_dim=24, output_gate="per_channel", biases="qo", qk_norm=WEIGHTLESS_AFTER),
        dict(v_head_dim=40, output_gate="per_head", biases="k", qk_norm=LEARNT_AFTER),
    ],
    ids=str,
)
def test_layer_is_the_formula(changes):
    layer = layer_of(**changes)
    weights = {name: p.detach().double() for name, p in layer.named_parameters()}
    parts = "".join(p for p in "qkv" if f"qkv_linear.w{p}.bias" in weights) + "o" * ("wo.bias" in weights)
    assert parts == changes.get("biases", "")
    x = torch.randn(S, D, generator=torch.Generator().manual_seed(3))
    expected = formula(x.double(), weights, **changes)
    with torch.no_grad():
        # fp32 projections, table and softmax against fp64.
        assert relative_error(layer(x, sequence_info(torch.zeros(S), None, None)), expected) < 1e-5
        batched = layer(x[None], sequence_info(torch.zeros(1, S), None, None))
    assert relative_error(batched[0], expected) < 1e-5


def test_norm_after_rope_is_another_function_only_with_weights():
    """Rotation keeps lengths, so that without a weight the order does not matter."""
    weightless_before = WEIGHTLESS_AFTER.model_copy(update={"after_rope": False})
    x = torch.randn(S, D, generator=torch.Generator().manual_seed(3))
    for after, before, same in [(LEARNT_AFTER, LEARNT_BEFORE, False), (WEIGHTLESS_AFTER, weightless_before, True)]:
        with torch.no_grad():
            one, other = (
                layer_of(qk_norm=norm)(x, sequence_info(torch.zeros(S), None, None)) for norm in (after, before)
            )
        assert (relative_error(one, other) < 1e-5) == same


def test_gates_of_zero_weights_halve_each_head():
    x = torch.randn(S, D, generator=torch.Generator().manual_seed(3))
    seq = sequence_info(torch.zeros(S), None, None)
    for gate, outputs in (("per_head", N), ("per_channel", N * H)):
        gated, plain = layer_of(output_gate=gate), layer_of()
        assert gated.wg.weight.shape == (outputs, D) and gated.wg.bias is None
        plain.load_state_dict(gated.state_dict(), strict=False)
        with torch.no_grad():
            gated.wg.weight.zero_()
            assert relative_error(gated(x, seq), plain(x, seq) / 2) < 1e-6


def test_weightless_norm_has_no_parameters():
    norm = layer_of(qk_norm=WEIGHTLESS_AFTER).q_norm
    assert list(norm.parameters()) == []
    # The mean square of 3 and 4 is 12.5.
    assert norm(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([3 / 12.50001**0.5, 4 / 12.50001**0.5])


@pytest.mark.parametrize("config", [pytest.param(c, id=name) for name, c in FreeAttention.tiny_configs().items()])
def test_gradients_reach_every_parameter(config):
    """Sinks and gates among them."""
    model = random_model(FreeAttention, config)
    tokens = random_tokens(config, 2, 40)
    torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_parameters_of_each_kind():
    """Native names, and so the checkpoint's."""
    wide, narrow = list(FreeAttention.tiny_configs().values())[-2:]
    wide_names = {n for n, _ in random_model(FreeAttention, wide).layers[0].attention.named_parameters()}
    weights = {f"qkv_linear.w{p}.weight" for p in "qkv"} | {"wo.weight", "wg.weight"}
    assert wide_names == weights | {"qkv_linear.wk.bias"}
    narrow_names = {n for n, _ in random_model(FreeAttention, narrow).layers[0].attention.named_parameters()}
    norms = {"q_norm.weight", "k_norm.weight"}
    assert narrow_names == weights | norms | {"qkv_linear.wq.bias", "wo.bias", "inner_attention.sinks"}
