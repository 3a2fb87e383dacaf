"""Which slice of a tensor each of four ranks takes, by hand; no processes."""

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from titan_adapters.vllm import layers
from titan_adapters.vllm.moves import ReplicatedHeads


@pytest.fixture
def rank_of_four(monkeypatch):
    """`rank_of_four(rank)`: what follows runs as that rank."""

    def become(rank: int) -> None:
        monkeypatch.setattr(layers, "get_tensor_model_parallel_rank", lambda: rank)

    monkeypatch.setattr(layers, "get_tensor_model_parallel_world_size", lambda: 4)
    return become


def test_replicated_heads_are_next_to_each_other():
    rows = torch.tensor([[1], [1], [2], [2]])  # two heads of two channels
    assert ReplicatedHeads(num_heads=2, replicas=2).repeat(rows).flatten().tolist() == [1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(("num_heads", "replicas"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_number_of_replicas(rank_of_four, num_heads, replicas):
    assert layers.num_replicas(num_heads) == replicas


@pytest.mark.parametrize(
    ("num_heads", "slices"),
    [
        (1, [[0, 1, 2]] * 4),
        (2, [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]),
        (4, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
    ],
)
def test_norm_weights_follow_their_heads(rank_of_four, num_heads, slices):
    for rank in range(4):
        rank_of_four(rank)
        whole = ta.nn.RMSNorm(num_heads * 3, eps=1e-5)
        norm = layers.engine_norm(whole, num_heads, 3, torch.device("cpu"))
        norm.weight.weight_loader(norm.weight, torch.arange(num_heads * 3.0))
        assert norm.weight.tolist() == slices[rank]


def test_statistics_count_replicated_heads_once(rank_of_four, monkeypatch):
    """Two heads, (3, 4) and (0, 12): the mean of the squares is (9 + 16 + 0 + 144) / 4."""
    heads = torch.tensor([[3.0, 4.0], [0.0, 12.0]])
    of_ranks = [heads[0], heads[0], heads[1], heads[1]]
    total = sum(head.pow(2).mean() for head in of_ranks)
    monkeypatch.setattr(layers, "tensor_model_parallel_all_reduce", lambda _: total.view(1, 1))
    rank_of_four(0)
    norm = layers.engine_norm(ta.nn.RMSNorm(4, eps=1e-5, weight=False), 2, 2, torch.device("cpu"))
    assert norm.weight is None
    assert norm.mean_square(heads[:1]).item() == 169 / 4
