"""Recorded and replayed routings, and the loss that training makes of them."""

import pytest
import torch
from torch import Tensor

import titan_adapters as ta
from tests.conftest import random_model, random_tokens, titan_error_text
from titan_adapters.nn import record_routing, replay_routing


def mixture() -> ta.BaseTransformer:
    """A dense layer, then two mixtures of two of four experts."""
    cls = ta.get_model("qwen3_moe")
    config = next(iter(cls.tiny_configs().values())).model_copy(
        update={"num_layers": 3, "sparse": (False, True, True), "num_experts": 4, "windows": (None,) * 3}
    )
    return random_model(cls, config)


def test_recorded_routing():
    model = mixture()
    tokens = random_tokens(model.config, 2, 10)
    with record_routing(model) as record:
        model(tokens)
        model(tokens[0, :3])
    assert sorted(record.layers) == [1, 2] and [len(calls) for calls in record.layers.values()] == [2, 2]
    for layer, experts in record.experts().items():
        assert experts.shape == (23, 2) and experts.dtype == torch.int64
        assert torch.equal(experts[:20], record.layers[layer][0].experts)
        by_hand = [sum(row.count(e) for row in experts.tolist()) for e in range(4)]
        assert record.counts(4)[layer].tolist() == by_hand and sum(by_hand) == 46
    model(tokens)
    assert len(record.layers[1]) == 2, "recorded after the block"


def test_replayed_routing_is_bitwise_the_same():
    model = mixture()
    tokens = random_tokens(model.config, 2, 10)
    with record_routing(model) as record:
        logits = model(tokens)
    with replay_routing(model, record.experts()):
        again = model(tokens)
    assert torch.equal(again, logits)
    others = {layer: (experts + 1) % 4 for layer, experts in record.experts().items()}
    with record_routing(model) as replayed, replay_routing(model, others):
        changed = model(tokens)
    assert not torch.allclose(changed, logits, atol=1e-2)
    assert all(torch.equal(replayed.experts()[layer], experts) for layer, experts in others.items())
    # The weights are those of the experts replayed: here the softmax over all, renormalised over these.
    for call in (replayed.layers[1][0], replayed.layers[2][0]):
        probabilities = call.logits.softmax(-1).gather(-1, call.experts)
        torch.testing.assert_close(call.weights, probabilities / probabilities.sum(-1, keepdim=True))
    assert torch.equal(model(tokens), logits), "replayed after the block"


def test_gradients_flow_through_a_replay():
    model = mixture()
    tokens = random_tokens(model.config, 10)
    with record_routing(model) as record:
        model(tokens).square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with replay_routing(model, record.experts()):
        model(tokens).square().sum().backward()
    assert expected["layers.1.moe.router.gate.weight"].any()
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in model.named_parameters())


def test_unfit_replays_are_refused():
    model = mixture()
    good = torch.tensor([[0, 1], [3, 2]])

    def problems(experts: dict[int, Tensor]) -> list[str]:
        with pytest.raises(ta.TitanError, match=r"This routing can't be replayed\.") as caught:
            replay_routing(model, experts).__enter__()
        titan_error_text(caught)
        return caught.value.problems

    assert problems({0: good, 1: good}) == ["layer 0 has no router", "layer 2 is missing"]
    assert problems({1: good[:, :1], 2: good[0]}) == [
        "layer 1: shape (2, 1) is not [tokens, 2]",
        "layer 2: shape (2,) is not [tokens, 2]",
    ]
    assert problems({1: good + 1, 2: good - 1}) == [
        "layer 1: an index is outside of 0 to 3",
        "layer 2: an index is outside of 0 to 3",
    ]
    assert problems({1: good, 2: torch.tensor([[0, 1], [3, 3]])}) == ["layer 2: a token has the same expert twice"]
    for count in (1, 3):
        with replay_routing(model, {1: good, 2: good}), pytest.raises(ta.TitanError) as caught:
            model(random_tokens(model.config, count))
        assert titan_error_text(caught).startswith(
            f"The replayed routing is of 2 tokens, the forward pass has {count}."
        )
    with replay_routing(model, {1: good[:0], 2: good[:0]}):
        assert model(random_tokens(model.config, 0)).shape == (0, model.config.vocab_size)


def test_load_balancing_loss_is_that_of_transformers():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = mixture()
    tokens = random_tokens(model.config, 2, 10)
    with record_routing(model) as record:
        model(tokens)
    ours = record.load_balancing_loss()
    theirs = load_balancing_loss_func(tuple(calls[0].logits for calls in record.layers.values()), 4, top_k=2)
    torch.testing.assert_close(ours, theirs)
    assert 1.9 < ours < 5  # 2 is a perfect balance of two experts per token
    names = [name for name, _ in model.named_parameters() if "router" in name]
    parameters = [model.get_parameter(name) for name in names]
    expected = torch.autograd.grad(theirs, parameters, retain_graph=True)
    for actual, gradient in zip(torch.autograd.grad(ours, parameters), expected, strict=True):
        assert gradient.any()
        torch.testing.assert_close(actual, gradient)


def test_load_balancing_loss_by_hand():
    """One token that goes to experts 0 and 1 of 4 with probabilities 1/2, 1/4, 1/8, 1/8: 4 * (1/2 + 1/4)."""
    record = ta.nn.RoutingRecord()
    with pytest.raises(ta.TitanError, match=r"No routing was recorded\.") as caught:
        record.load_balancing_loss()
    titan_error_text(caught)
    logits = torch.tensor([[4.0, 2.0, 1.0, 1.0]]).log()
    record.layers[0] = [ta.nn.Routing(logits, torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.25]]))]
    assert record.load_balancing_loss().item() == pytest.approx(3.0)
