"""Legal sizes, by hand."""

import titan_adapters as ta
from titan_adapters.parallel_sizes import LegalSizes, legal_sizes, size_problems

Llama = ta.get_model("llama")
CONFIG = next(iter(Llama.tiny_configs().values()))  # 3 layers, 6 heads, 2 kv heads, hidden_dim 80


class Mixed(Llama.Config):
    """A dense layer, and two mixtures of 8 experts of width 24 with shared experts of width 40."""

    def feed_forward(self, layer: int) -> ta.FeedForwardSpec | ta.MoESpec:
        if layer == 0:
            return super().feed_forward(layer)
        dense = ta.FeedForwardSpec(hidden_dim=40, activation="silu", gated=True, bias=False)
        return ta.MoESpec(
            num_experts=8, top_k=2, hidden_dim=24, score="softmax", renormalize=True, scaling_factor=1.0, groups=None,
            correction_bias=False, weighs="output", router_dtype="model", router_bias=False, activation="silu",
            gated=True, bias=False, shared=ta.SharedExpertsSpec(feed_forward=dense, output_gate=False),
        )  # fmt: skip


def mixed(**changes) -> Mixed:
    return Mixed(**CONFIG.model_dump() | {"num_heads": 8, "num_kv_heads": 8} | changes)


def test_what_is_legal_has_no_problems():
    # Kv heads are shared at 1 and 2, and replicated above.
    assert legal_sizes(CONFIG).tp == [1, 2]  # not 3 or 6: 80 channels
    assert legal_sizes(CONFIG.model_copy(update={"hidden_dim": 96})).tp == [1, 2, 6]  # not 3: 2 kv heads
    assert legal_sizes(CONFIG).pp == [1, 2, 3]
    assert legal_sizes(CONFIG).ep == [1]
    assert legal_sizes(mixed()) == LegalSizes(tp=[1, 2, 4, 8], pp=[1, 2, 3], ep=[1, 2, 4, 8])
    for tp in (1, 2):
        assert size_problems(CONFIG, tp=tp, pp=3) == []


def test_each_problem_names_its_layers_and_the_legal_sizes():
    assert size_problems(CONFIG, tp=4) == [
        "num_heads 6 of layers [0, 1, 2] is not divisible by tensor_parallel_size 4; legal sizes: 1, 2",
    ]
    assert size_problems(CONFIG, tp=3) == [
        "hidden_dim 80 of layers [0, 1, 2] is not divisible by tensor_parallel_size 3; legal sizes: 1, 2",
        "num_kv_heads 2 of layers [0, 1, 2] neither divides nor is divisible by tensor_parallel_size 3; "
        "legal sizes: 1, 2",
    ]
    assert size_problems(CONFIG, pp=4) == [
        "num_layers 3 can't be split into pipeline_parallel_size 4 stages; legal sizes: 1 to 3"
    ]
    assert len(size_problems(CONFIG, tp=0, pp=0)) == 3


def test_whole_experts_need_not_have_divisible_widths():
    config = mixed(num_heads=16, num_kv_heads=4)
    assert size_problems(config, tp=16) == [
        "hidden_dim of experts 24 of layers [1, 2] is not divisible by tensor_parallel_size 16; "
        "legal sizes: 1, 2, 4, 8",
        "hidden_dim of shared experts 40 of layers [1, 2] is not divisible by tensor_parallel_size 16; "
        "legal sizes: 1, 2, 4, 8",
    ]
    assert [p.split(" of layers")[0] for p in size_problems(config, tp=16, ep=16)] == [
        "hidden_dim of shared experts 40",
        "num_experts 8",
    ]
    assert size_problems(config, tp=8, ep=8) == []
    assert size_problems(mixed(), ep=3) == [
        "num_experts 8 of layers [1, 2] is not divisible by 3 expert-parallel ranks; legal sizes: 1, 2, 4, 8"
    ]
    assert size_problems(CONFIG, ep=2) == ["expert parallelism is asked for, but no layer is a mixture of experts"]
