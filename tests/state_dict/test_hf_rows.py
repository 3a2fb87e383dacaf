"""Row lists that families share: fused gate and up projections, and padded vocabularies."""

import pytest
import torch

import titan_adapters as ta
from tests.conftest import assert_bitwise_equal, random_model, titan_error_text
from tests.state_dict.conftest import both_ways, numbers
from titan_adapters.state_dict import native_tensors

Llama = ta.get_model("llama")
CONFIG = next(iter(Llama.tiny_configs().values()))
GATE, UP = [[1, 2], [3, 4]], [[5, 6], [7, 8]]  # hidden_dim == dim == 2
PUBLISHED = {
    ("gate_up", False): ([[1, 2], [3, 4], [5, 6], [7, 8]], [10, 11, 20, 21]),
    ("up_gate", False): ([[5, 6], [7, 8], [1, 2], [3, 4]], [20, 21, 10, 11]),
    ("gate_up", True): ([[1, 2], [5, 6], [3, 4], [7, 8]], [10, 20, 11, 21]),
    ("up_gate", True): ([[5, 6], [1, 2], [7, 8], [3, 4]], [20, 10, 21, 11]),
}
"""gate_up_proj's weight and bias, by order and interleaving."""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("order", "interleaved"), PUBLISHED)
def test_gate_up_rows(order, interleaved, bias):
    config = CONFIG.model_copy(update={"dim": 2, "hidden_dim": 2, "mlp_bias": bias})
    weight, bias_values = PUBLISHED[order, interleaved]
    published = {"m.3.gate_up_proj.weight": weight, "m.3.down_proj.weight": [[0, 9], [8, 7]]}
    native = {"l.3.w1.weight": GATE, "l.3.w3.weight": UP, "l.3.w2.weight": [[0, 9], [8, 7]]}
    if bias:
        published |= {"m.3.gate_up_proj.bias": bias_values, "m.3.down_proj.bias": [30, 31]}
        native |= {"l.3.w1.bias": [10, 11], "l.3.w3.bias": [20, 21], "l.3.w2.bias": [30, 31]}
    rows = ta.gate_up_rows(config, "m.{layer}", "l.{layer}", order=order, interleaved=interleaved)
    both_ways(rows, published, native, layer=[3])


def test_gate_up_rows_refuse_what_does_not_fit():
    config = CONFIG.model_copy(update={"hidden_dim": 2})
    for interleaved in (False, True):
        adapter = ta.StateDictAdapter(*ta.gate_up_rows(config, "m", "l", interleaved=interleaved))
        with pytest.raises(ta.TitanError, match=r"shape \(6, 3\)\.\nFix: dim 0 must be 4\.") as caught:
            adapter.to_native({"m.gate_up_proj.weight": numbers(6, 3)}, partial=True)
        assert "m.gate_up_proj.weight" in titan_error_text(caught)
        with pytest.raises(ta.TitanError, match=r"missing tensor l\.w3\.weight") as caught:
            adapter.to_hf({"l.w1.weight": numbers(2, 3)}, partial=True)
        titan_error_text(caught)
    with pytest.raises(ta.TitanError, match="can't be cut in the order 'w1_w3' into") as caught:
        ta.gate_up_rows(config, "m", "l", order="w1_w3")
    assert "m.gate_up_proj.weight" in titan_error_text(caught)


@pytest.mark.parametrize("tied", [False, True])
def test_padded_vocabulary_of_a_decoder(tied):
    """Published embedding and head have 136 rows of which 131 are tokens; the noise below them is cut off."""
    config = CONFIG.model_copy(update={"tied_embeddings": tied})
    native = native_tensors(random_model(Llama, config))
    layers = range(config.num_layers)
    plain = ta.StateDictAdapter(*ta.decoder_rows(config), layer=layers)
    padded = ta.StateDictAdapter(*ta.decoder_rows(config, padded_vocab_size=136), layer=layers)
    published = plain.to_hf(native)
    vocabulary = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    noisy, zeros = dict(published), dict(published)
    for name in vocabulary:
        assert published[name].shape == (131, 48)
        noisy[name] = torch.cat([published[name], torch.full((5, 48), 7.0)])
        zeros[name] = torch.cat([published[name], torch.zeros(5, 48)])
    padded.check(noisy, native)
    assert_bitwise_equal(padded.to_native(noisy), native)
    assert_bitwise_equal(padded.to_hf(native), zeros)
    with pytest.raises(ta.TitanError) as caught:
        padded.check(published, native)
    text = titan_error_text(caught)
    for name in vocabulary:
        assert f"{name}: VocabPadding(vocab_size=131, padded_vocab_size=136): the published tensor has 131 rows" in text


def test_a_tied_head_is_compared_with_its_padding():
    config = CONFIG.model_copy(update={"tied_embeddings": True, "vocab_size": 2})
    adapter = ta.StateDictAdapter(*ta.decoder_rows(config, padded_vocab_size=3), layer=range(config.num_layers))
    both = {name: numbers(3, 2) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    assert adapter.to_native(both, partial=True)["tok_embeddings.weight"].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (None, {"weight": False}, True),
        ({"weight": False}, {"weight": False, "scope": "full"}, True),
        ({"eps": 1e-6}, {"eps": 1e-5, "after_rope": True}, True),
        (None, {}, False),
        ({}, {"weight": False}, False),
        ({}, {"scope": "full"}, False),
    ],
)
def test_layers_may_differ_in_a_qk_norm_that_makes_no_other_parameters(first, second, alike):
    plain = dict(scope="per_head", eps=1e-6, offset=0.0, weight_in_fp32=False, weight=True, after_rope=False)

    class Mixed(type(CONFIG)):
        def attention(self, layer):
            changes = second if layer else first
            norm = None if changes is None else ta.QKNormSpec(**plain | changes)
            return super().attention(layer).model_copy(update={"qk_norm": norm})

    config = Mixed.from_json(CONFIG.to_json())
    if alike:
        adapter = ta.StateDictAdapter(*ta.decoder_rows(config), layer=range(config.num_layers))
        native = native_tensors(random_model(Llama, config))
        adapter.check(adapter.to_hf(native), native)
        return
    with pytest.raises(ta.TitanError, match="Layers 0 and 1 differ in qk_norm") as caught:
        ta.decoder_rows(config)
    titan_error_text(caught)
