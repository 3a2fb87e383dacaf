"""A plan is an exact cover: every departure from that is listed at once."""

import pytest
from torch import nn

import titan_adapters as ta
from tests.conftest import EVERY_MODEL, titan_error_text
from titan_adapters.contract import meta_model


class Small(nn.Module):
    """Parameter owners: embed, blocks.0.up, blocks.0.norm, blocks.1.up, blocks.1.norm, and the module itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "act": nn.SiLU()}) for _ in range(2)
        )


ROWS = {"embed": ta.vocabwise, "blocks.*.up": ta.colwise, "blocks.*.norm": ta.replicate}


def problems(rows: dict, model: nn.Module | None = None) -> list[str]:
    with pytest.raises(ta.TitanError) as caught:
        ta.ParallelPlan(rows).resolve(model or Small())
    text = titan_error_text(caught)
    assert "is not an exact cover" in text and "say ta.replicate aloud" in text
    return caught.value.problems


def test_exact_cover_by_hand():
    assert ta.ParallelPlan(ROWS).resolve(Small()) == {
        "embed": ta.vocabwise,
        "blocks.0.up": ta.colwise,
        "blocks.0.norm": ta.replicate,
        "blocks.1.up": ta.colwise,
        "blocks.1.norm": ta.replicate,
    }


def test_uncovered_doubly_covered_unused_and_wrong_type_at_once():
    rows = {"embed": ta.colwise, "blocks.*.up": ta.colwise, "blocks.0.*": ta.rowwise, "gone": ta.replicate}
    assert problems(rows) == [
        "embed is a Embedding; colwise applies to Linear",
        "blocks.0.up is covered by 2 rows: 'blocks.*.up', 'blocks.0.*'",
        "blocks.0.norm is a LayerNorm; rowwise applies to Linear",
        "blocks.1.norm (LayerNorm) owns parameters, but no row covers it",
        "row 'gone' matches no module",
    ]


def test_wildcards_do_not_cross_dots():
    assert "row 'blocks.*' matches no module" in problems({"embed": ta.vocabwise, "blocks.*": ta.replicate})
    assert "row '*.up' matches no module" in problems(ROWS | {"*.up": ta.colwise})


def test_wildcards_respect_case_and_sets():
    rows = {"embed": ta.vocabwise, "blocks.[01].up": ta.colwise, "blocks.?.norm": ta.replicate}
    assert len(ta.ParallelPlan(rows).resolve(Small())) == 5
    assert "row 'Embed' matches no module" in problems(ROWS | {"Embed": ta.vocabwise})


def test_a_parameter_of_the_model_itself_is_not_overlooked():
    model = Small()
    model.temperature = nn.Parameter(model.embed.weight.new_ones(1))
    (problem,) = problems(ROWS, model)
    assert problem.endswith("(Small) owns parameters, but no row covers it")


def test_a_module_without_parameters_needs_no_row_and_takes_none():
    assert problems(ROWS | {"blocks.*.act": ta.replicate}) == ["row 'blocks.*.act' matches no module"]


def test_vocabwise_serves_embeddings_and_heads_only():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4), "norm": nn.LayerNorm(2)})
    styles = ta.ParallelPlan({"embed": ta.vocabwise, "head": ta.vocabwise, "norm": ta.replicate}).resolve(model)
    assert styles["head"] is ta.vocabwise
    rows = {"embed": ta.vocabwise, "head": ta.vocabwise, "norm": ta.vocabwise}
    assert problems(rows, model) == ["norm is a LayerNorm; vocabwise applies to Embedding or Linear"]


@pytest.mark.parametrize(("cls", "config"), EVERY_MODEL)
def test_installed_models_are_covered_as_megatron_would(cls, config):
    """Column-parallel into the heads and the hidden channels, row-parallel out of them (arXiv:1909.08053); experts
    are split, and what chooses them is everywhere."""
    styles = cls.parallel_plan(config).resolve(meta_model(cls, config))
    replicated = {name for name, style in styles.items() if style is ta.replicate}
    small = {"norm"}
    for layer in range(config.num_layers):
        here, attention, feed_forward = f"layers.{layer}", config.attention(layer), config.feed_forward(layer)
        small |= {name for name in styles if name.startswith(f"{here}.") and name.endswith("_norm")}
        dense = f"{here}.feed_forward"
        if layer in config.moe_specs():
            assert styles[f"{here}.moe.experts"] is ta.expertwise
            small.add(f"{here}.moe.router.gate")
            dense = f"{here}.moe.shared_experts"
            small |= {f"{here}.moe.shared_gate"} & set(styles)
        if layer in config.dense_specs() or feed_forward.shared is not None:
            assert styles[f"{dense}.w1"] is styles.get(f"{dense}.w3", ta.colwise) is ta.colwise  # w3 if gated
            assert styles[f"{dense}.w2"] is ta.rowwise
        for name in ("qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv"):
            assert styles[f"{here}.attention.{name}"] is ta.colwise
        assert styles[f"{here}.attention.wo"] is ta.rowwise
        weights = attention.qk_norm is not None and attention.qk_norm.weight
        assert (f"{here}.attention.q_norm" in styles) == weights
        if weights and attention.qk_norm.scope == "full":  # each head has weights of its own
            of_heads = {f"{here}.attention.{p}_norm" for p in "qk"}
            assert {styles[name] for name in of_heads} == {ta.headwise}
            small -= of_heads
        assert (styles.get(f"{here}.attention.inner_attention") is ta.headwise) == attention.sinks
        assert f"{here}.ffn_norm" in small
    assert styles["tok_embeddings"] is styles["lm_head"] is ta.vocabwise
    assert replicated == small
