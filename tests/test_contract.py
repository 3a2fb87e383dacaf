"""The contract: whatever a class lacks or gets wrong is listed, all of it, before any module is built."""

import pytest
import titan_models.llama
from torch import nn

import titan_adapters as ta
from tests.conftest import titan_error_text
from titan_adapters.contract import check_contract, contract_problems, meta_model

Llama = titan_models.llama.Llama


def test_installed_models_meet_it():
    for info in ta.list_models():
        assert contract_problems(ta.get_model(info.name)) == []


def test_everything_missing_is_listed_at_once():
    class Empty(ta.BaseTransformer):
        pass

    with pytest.raises(ta.TitanError) as caught:
        check_contract(Empty)
    text = titan_error_text(caught)
    assert "Empty does not meet the BaseTransformer contract." in text and "CONTRIBUTING.md" in text
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "model_type",
        "Config",
        "Block",
        "parallel_plan",
        "state_dict_adapter",
    ]


def test_everything_wrong_is_listed_at_once():
    class LooseConfig(ta.TransformerConfig, frozen=False, extra="allow"):
        pass

    class WrongBlock(nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, x, seq, cache):
            return x

    class Wrong(ta.BaseTransformer):
        model_type = ""
        Config = LooseConfig
        Block = WrongBlock

        def parallel_plan(self, config):
            return None

        @staticmethod
        def to_hf_config(config):
            return {}

        def run_layers(self, x):
            return x

        def compute_logits(self, x, temperature):
            return x

    # In this order: an instance method in place of a classmethod still counts as overridden.
    starts = [
        "model_type: set it to the model's name",
        "Config.attention: missing",
        "Config.feed_forward: missing",
        "Config.norm: missing",
        "Config.model_config: must stay frozen=True, extra='forbid'",
        "Block.__init__(self, config): is called as Block.__init__(self, config, layer)",
        "Block.forward(self, x, seq, cache): is called as Block.forward(self, x, seq)",
        "state_dict_adapter: missing; override this classmethod",
        "parallel_plan: must be a classmethod",
        "to_hf_config: must be a classmethod",
        "model.run_layers(self, x): is called as model.run_layers(self, x, seq, start, stop)",
        "model.compute_logits(self, x, temperature): is called as model.compute_logits(self, x)",
    ]
    problems = contract_problems(Wrong)
    assert len(problems) == len(starts), problems
    for problem, start in zip(problems, starts):
        assert problem.startswith(start), (problem, start)


@pytest.mark.parametrize("method", ["embed", "run_layers", "compute_logits", "forward", "__init__"])
def test_keyword_catch_alls_are_refused(method):
    def catch_all(self, *args, **kwargs):
        return None

    catch_all.__name__ = method
    cls = type("CatchAll", (Llama,), {method: catch_all})
    assert contract_problems(cls) == [
        f"model.{method}: **kwargs would swallow misspelt arguments; name every parameter"
    ]


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_keyword_catch_alls_in_a_block_are_refused(method):
    def catch_all(self, x, seq, **kwargs):
        return None

    catch_all.__name__ = method
    cls = type("CatchAll", (Llama,), {"Block": type("Block", (ta.nn.PreNormBlock,), {method: catch_all})})
    assert contract_problems(cls) == [
        f"Block.{method}: **kwargs would swallow misspelt arguments; name every parameter"
    ]


def test_optional_parameters_of_ones_own_are_fine():
    class Fine(Llama):
        def __init__(self, config, extra=None):
            super().__init__(config)

        def compute_logits(self, x, temperature=1.0):
            return super().compute_logits(x) / temperature

    assert contract_problems(Fine) == []


@pytest.mark.parametrize("thing", [int, nn.Linear, "llama", None, Llama.Config])
def test_what_is_no_model_at_all(thing):
    (problem,) = contract_problems(thing)
    assert problem.endswith("is not a subclass of titan_adapters.BaseTransformer")


def test_models_without_a_published_format_say_so():
    class Unpublished(ta.BaseTransformer):
        pass

    for call in (lambda: Unpublished.from_hf_config({}), lambda: Unpublished.to_hf_config(None)):
        with pytest.raises(ta.TitanError, match="Unpublished") as caught:
            call()
        assert "override" in titan_error_text(caught)


def test_meta_model_has_shapes_and_no_memory():
    config = Llama.tiny_configs()["tied, llama3 rope"]
    model = meta_model(Llama, config)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model.lm_head.weight is model.tok_embeddings.weight
    assert model.layers[0].attention.qkv_linear.wk.weight.shape == (2 * 32, 48)
