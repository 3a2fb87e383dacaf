"""The contract suite finds what it is there to find: each check, with the fault that it is for."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import titan_adapters as ta
from titan_adapters import registry
from titan_adapters.plan import ParallelPlan
from titan_adapters.state_dict.ops import Op
from titan_adapters.testing.geometry import geometry
from titan_adapters.testing.suite import CheckResult, Suite

pytestmark = pytest.mark.usefixtures("no_registrations_left")

Llama, Mistral, Olmoe, Qwen3 = (ta.get_model(name) for name in ("llama", "mistral", "olmoe", "qwen3"))
NUMBERS = itertools.count()


def faulty(base: type[ta.BaseTransformer], **members: Any) -> type[ta.BaseTransformer]:
    return type("Faulty", (base,), {"model_type": f"faulty-{next(NUMBERS)}", **members})


def results(cls: type[ta.BaseTransformer], check: str) -> list[CheckResult]:
    return [item.run() for item in Suite(cls).items() if item.check == check]


def plan_without_wo(cls, config):
    rows = Llama.parallel_plan(config).rows
    return ParallelPlan({pattern: style for pattern, style in rows.items() if not pattern.endswith("wo")})


def rows_without_norm(cls, config):
    rows = [row for row in ta.decoder_rows(config) if getattr(row, "native", None) != "norm.weight"]
    return ta.StateDictAdapter(*rows, layer=range(config.num_layers))


class OneWay(Op):
    def to_native(self, tensor):
        return tensor

    def to_hf(self, tensor):
        return tensor.flip(0)


def rows_one_way(cls, config):
    rows = [row for row in ta.decoder_rows(config) if getattr(row, "native", None) != "norm.weight"]
    norm = ta.Rename("model.norm.weight", "norm.weight", OneWay())
    return ta.StateDictAdapter(*rows, norm, layer=range(config.num_layers))


def layers_with(change):
    """`run_layers` whose result x [..., T, D] is passed through `change`."""
    return {"run_layers": lambda self, x, seq, start=0, stop=None: change(Llama.run_layers(self, x, seq, start, stop))}


def embed_with(change):
    return {"embed": lambda self, tokens: change(self, tokens, Llama.embed(self, tokens))}


def rows_with_op(name, op):
    """Llama's rows, with other ops for the layers' tensor `name`; `op` gets the config."""

    def rows(cls, config):
        native = f"layers.{{layer}}.attention.qkv_linear.{name}.weight"
        made = [
            ta.Rename(row.hf, row.native, *op(config)) if getattr(row, "native", None) == native else row
            for row in ta.decoder_rows(config)
        ]
        return ta.StateDictAdapter(*made, layer=range(config.num_layers))

    return {"state_dict_adapter": classmethod(rows)}


class WiderWindow(ta.nn.PreNormBlock):
    """Its seam shows one token more than the config says."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        spec = config.attention(layer)
        if spec.window:
            other = spec.model_copy(update={"window": spec.window + 1})
            self.attention.inner_attention = ta.nn.InnerAttention(other, layer)


class OtherScale(ta.nn.PreNormBlock):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        spec = config.attention(layer)
        other = spec.model_copy(update={"scale": spec.scale * 1.001})
        self.attention.inner_attention = ta.nn.InnerAttention(other, layer)


class Renormalising(ta.nn.PreNormBlock):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        spec = config.feed_forward(layer).model_copy(update={"renormalize": True})
        self.moe.router = type(self.moe.router)(config.dim, spec, layer)


def lost_buffer(self, config):
    Llama.__init__(self, config)
    self.register_buffer("factor", torch.tensor(2.0), persistent=False)


def published_with_bias(cls, config):
    return Llama.to_hf_config(config) | {"mlp_bias": True}


def read_without_scaling(cls, hf):
    config = Llama.from_hf_config(hf)
    return config.model_copy(update={"rope": config.rope.model_copy(update={"scaling": None})})


def published_without_windows(cls, config):
    return Mistral.to_hf_config(config) | {"sliding_window": None}


FAULTS = {
    "a linear is not planned": (
        "plan_covers", Llama, {"parallel_plan": classmethod(plan_without_wo)}, "attention.wo (Linear) owns parameters"
    ),
    "a tensor has no row": (
        "rows_cover", Llama, {"state_dict_adapter": classmethod(rows_without_norm)}, "norm.weight"
    ),
    "a row's op is not inverted": (
        "rows_invert", Llama, {"state_dict_adapter": classmethod(rows_one_way)}, "after a round trip: norm.weight"
    ),
    "a field is published wrongly": (
        "config_survives_publishing", Llama, {"to_hf_config": classmethod(published_with_bias)}, "config: mlp_bias"
    ),
    "a buffer is lost on the meta device": (
        "meta_device_init", Llama,
        {"__init__": lost_buffer} | embed_with(lambda self, tokens, x: x * self.factor), "a buffer was lost",
    ),
    "tokens see later ones": (
        "causality", Llama, layers_with(lambda x: x + x.mean(-2, keepdim=True)), "a token is seen by earlier ones"
    ),
    "tokens meet outside of attention": (
        "attention_only_through_seam", Llama, layers_with(lambda x: x + x.cumsum(-2)), "tokens meet outside"
    ),
    "a window shows one token more": (
        "reach", Qwen3, {"Block": WiderWindow},
        "window 5, chunk None: the token at position 10 should be seen at 5 positions, 10 to 14, is seen at "
        "6 positions, 10 to 15",
    ),
    "positions are counted by the model": (
        "packing", Llama,
        embed_with(lambda self, tokens, x: x + torch.arange(tokens.shape[-1]).unsqueeze(-1) / 10), "positions given"
    ),
    "short inputs take another path": (
        "token_counts", Llama, layers_with(lambda x: x if x.shape[-2] > 4 else x.roll(1, -1)), "1 tokens: relative"
    ),
    "weights are renormalised though the spec says not": (
        "hard_router_logits", Olmoe, {"Block": Renormalising}, "layer 0, tied logits: weights are 0.5 ... 0.5, not"
    ),
    "an embedding is detached": (
        "gradients", Llama, embed_with(lambda self, tokens, x: x.detach()), "no finite gradient reaches tok_embeddings"
    ),
    "logits are in another dtype": (
        "bfloat16", Llama, {"compute_logits": lambda self, x: Llama.compute_logits(self, x).float()},
        "logits of a bf16 model are torch.float32",
    ),
    "rope's scaling is not read": (
        "config_survives_publishing", Llama, {"from_hf_config": classmethod(read_without_scaling)},
        "another config: rope.scaling",
    ),
    "a window is not published": (
        "config_survives_publishing", Mistral, {"to_hf_config": classmethod(published_without_windows)},
        "another config: windows",
    ),
    "rows of keys are permuted with the queries' number of heads": (
        "rows_cover", Llama, rows_with_op("wk", lambda config: [ta.Permute(config.num_heads, config.head_dim, 32)]),
        "its first dim must be heads * head_dim",
    ),
    "rows of queries are in the published rope layout": (
        "logits_equal_transformers", Llama, rows_with_op("wq", lambda config: []) | {"model_type": "llama"},
        "against transformers:",
    ),
    "the softmax's scale is a thousandth off": (
        "logits_equal_transformers", Llama, {"Block": OtherScale, "model_type": "llama"}, "against transformers:"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault, monkeypatch):
    check, base, members, text = FAULTS[fault]
    assert {result.outcome for result in results(base, check)} <= {"passed", "skipped"}
    monkeypatch.setattr(registry, "_REGISTERED", {})  # a faulty llama must bear that name to be compared with the stock
    found = [result for result in results(faulty(base, **members), check) if result.outcome == "failed"]
    assert found and text in found[0].detail, found


def test_every_check_of_the_suite_has_a_fault_or_tests_of_its_own():
    elsewhere = {"contract", "geometry", "config_survives_json", "checkpoint_round_trip", "emitted_config_rereads"}
    checks = {item.check for item in Suite("llama").items()}
    assert checks == {check for check, *_ in FAULTS.values()} | elsewhere


def test_geometry_says_what_is_missing():
    awkward = next(iter(Llama.tiny_configs().values()))
    tame = awkward.model_copy(update={"dim": 96, "num_heads": 3, "num_kv_heads": 3, "vocab_size": 128, "num_layers": 1})
    with pytest.raises(AssertionError) as caught:
        geometry(Llama, [tame])
    missing = ("head_dim other than dim / heads", "one kv head", "odd vocabulary", "tied head", "several layers")
    assert str(caught.value) == "; ".join(f"no tiny config has: {name}" for name in missing)
    windowed = next(iter(Qwen3.tiny_configs().values())).model_copy(update={"windows": (None, 64)})
    with pytest.raises(AssertionError, match="no tiny config has: a window shorter than 40 tokens"):
        geometry(Qwen3, [windowed])
    stated = faulty(Llama, impossible_geometry={"one kv head": "a tiny config has it", "three heads": "never asked"})
    with pytest.raises(AssertionError) as caught:
        geometry(stated, list(Llama.tiny_configs().values()))
    assert str(caught.value) == (
        "impossible_geometry names 'one kv head', which a tiny config has; "
        "impossible_geometry names 'three heads', which is not asked for"
    )


def test_a_model_that_raises_is_a_failed_check_with_its_traceback():
    def broken(self, tokens, x):
        raise RuntimeError("on purpose")

    (result, *_) = results(faulty(Llama, **embed_with(broken)), "causality")
    assert result.outcome == "failed" and "RuntimeError: on purpose" in result.detail and "in broken" in result.detail
    missing = faulty(Llama, tiny_configs=classmethod(lambda cls: {}))
    assert [r.check for r in ta.testing.check_model(missing) if r.outcome == "failed"] == ["tiny_configs"]
    incomplete = type("Incomplete", (ta.BaseTransformer,), {"model_type": "incomplete", "Block": nn.Module})
    assert {(r.check, r.outcome) for r in ta.testing.check_model(incomplete)} == {("contract", "failed")}


def test_one_line_in_another_repository(pytester):
    """One item per check and tiny config, with the check's promise beside what was found."""
    pytester.makepyfile(
        other_models="""
        import titan_adapters as ta

        class Leaking(ta.get_model("llama")):
            model_type = "leaking"
            def run_layers(self, x, seq, start=0, stop=None):
                x = super().run_layers(x, seq, start, stop)
                return x + x.mean(-2, keepdim=True)
        """,
        test_other_models="""
        import titan_adapters as ta

        test_leaking = ta.testing.pytest_check("other_models:Leaking")
        """,
    )
    pytester.syspathinsert()
    outcome = pytester.runpytest_inprocess("-v", "-k", "causality or rows or router or geometry")
    outcome.assert_outcomes(passed=7, failed=3, skipped=3)
    outcome.stdout.fnmatch_lines(
        [
            "test_other_models.py::test_leaking[[]geometry] PASSED*",
            "test_other_models.py::test_leaking[[]rows_cover - tied, llama3 rope] PASSED*",
            "test_other_models.py::test_leaking[[]causality - tied, llama3 rope] FAILED*",
            "*causality on tiny config 'tied, llama3 rope': a token is seen by earlier ones",
            "Changing a token changes its own logits, and bitwise nothing before it.",
        ]
    )
    assert "suite.py" not in outcome.stdout.str()  # no traceback of ours above what the author needs


def test_a_mistyped_model_is_an_error_that_says_what_to_do(pytester):
    pytester.makepyfile("import titan_adapters as ta\ntest_it = ta.testing.pytest_check('no_such:Model')")
    outcome = pytester.runpytest_inprocess()
    outcome.assert_outcomes(errors=1)
    outcome.stdout.fnmatch_lines(["*Can't import 'no_such:Model'*", "*Fix: give it as 'pkg.module:Class'*"])
