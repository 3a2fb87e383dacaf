"""An export whose tensors are not exactly those of the stock architecture is refused before anything is written."""

import logging
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import titan_adapters as ta
from tests.conftest import random_model, titan_error_text
from titan_adapters.checkpoint import convert_checkpoint
from titan_adapters.checkpoint.stock import stock_problems

Llama = ta.get_model("llama")
TINY = next(iter(Llama.tiny_configs().values()))
TIED = TINY.model_copy(update={"tied_embeddings": True})


class QueryBias(Llama):
    """Biased q, k and v, and q norms, without a word about them in its published config."""

    model_type = "query-bias"

    class Config(Llama.Config):
        def attention(self, layer):
            norm = ta.QKNormSpec(
                scope="per_head", eps=1e-5, offset=0.0, weight_in_fp32=False, weight=True, after_rope=True
            )
            half = super().attention(layer).rope.model_copy(update={"layout": "half"})
            changed = {"biases": "q", "qk_norm": norm if layer == 0 else None, "rope": half}
            return super().attention(layer).model_copy(update=changed)

    @classmethod
    def state_dict_adapter(cls, config):
        llama = ta.decoder_rows(TINY.model_copy(update={"rope": config.attention(0).rope}))
        bias = ta.Rename("model.layers.{layer}.q.bias", "layers.{layer}.attention.qkv_linear.wq.bias")
        norms = [ta.Rename(f"model.layers.0.{p}_norm", f"layers.0.attention.{p}_norm.weight") for p in "qk"]
        return ta.StateDictAdapter(*llama, bias, *norms, layer=range(config.num_layers))

    @classmethod
    def from_hf_config(cls, hf):
        return cls.Config.from_json(Llama.from_hf_config(hf).to_json())

    @classmethod
    def to_hf_config(cls, config):
        return super().to_hf_config(config) | {"model_type": "llama"}


def test_tensors_without_a_place_are_refused_before_any_is_read(tmp_path, no_registrations_left):
    config = QueryBias.Config.from_json(TINY.to_json())
    model = random_model(QueryBias, config)
    with pytest.raises(ta.TitanError) as caught:
        ta.save_checkpoint(model, tmp_path / "hf", "hf")
    assert titan_error_text(caught).startswith("The stock architecture's tensors are not those of this query-bias.")
    assert caught.value.problems == [
        "it has no model.layers.0.q.bias (192,)",
        "it has no model.layers.0.q_norm (32,)",
        "it has no model.layers.0.k_norm (32,)",
        "it has no model.layers.1.q.bias (192,)",
        "it has no model.layers.2.q.bias (192,)",
    ]
    ta.register_model(QueryBias)
    ta.save_checkpoint(model, tmp_path / "native")
    with pytest.raises(ta.TitanError, match="The stock architecture's tensors"):
        convert_checkpoint(tmp_path / "native", tmp_path / "hf", "hf")
    assert [folder.name for folder in tmp_path.iterdir()] == ["native"]


@pytest.mark.parametrize(
    ("config", "published", "problem"),
    [
        (TINY, {"tie_word_embeddings": True}, "it ties lm_head.weight to model.embed_tokens.weight"),
        (TIED, {"tie_word_embeddings": False}, "it needs lm_head.weight (131, 48), which this model does not have"),
        (TINY, {"architectures": ["Gemma"]}, "architectures is ['Gemma'], transformers builds LlamaForCausalLM"),
        (TINY, {"num_attention_heads": 5}, "transformers can't build it: Class validation error"),
    ],
)  # fmt: skip
def test_one_difference_is_one_problem(config, published, problem):
    found = stock_problems(Llama, config, ta.write_hf_config(Llama, config) | published)
    assert [line[: len(problem)] for line in found] == [problem]


def test_all_differences_are_listed():
    changes = {"attention_bias": True, "num_hidden_layers": 1, "intermediate_size": 81}
    found = stock_problems(Llama, TINY, ta.write_hf_config(Llama, TINY) | changes)
    assert len(found) == 2 * 9 + 4 + 3  # two layers of nine tensors, four biases, three shapes
    assert "it has no model.layers.2.mlp.up_proj.weight (80, 48)" in found
    assert "it needs model.layers.0.self_attn.q_proj.bias (192,), which this model does not have" in found
    assert "its model.layers.0.mlp.down_proj.weight has shape (48, 81), ours (48, 80)" in found


def test_names_that_stock_code_changes_on_load_are_compared_as_files_have_them():
    """In memory transformers 5 calls gpt_neox's head lm_head, in files embed_out; nothing of that is a difference."""
    cls = ta.get_model("gpt_neox")
    for config in cls.tiny_configs().values():
        published = ta.write_hf_config(cls, config)
        assert stock_problems(cls, config, published) == []
        assert stock_problems(cls, config, published | {"attention_bias": not published["attention_bias"]})


def test_what_can_not_be_compared_is_logged(caplog, monkeypatch):
    published = ta.write_hf_config(Llama, TINY)
    with caplog.at_level(logging.WARNING):
        assert stock_problems(Llama, TINY, published | {"model_type": "unheard-of"}) == []
        monkeypatch.setitem(sys.modules, "transformers", None)
        assert stock_problems(Llama, TINY, published) == []
    unchecked = "The exported tensors were not compared with the stock architecture: "
    assert [record.getMessage() for record in caplog.records if record.name.startswith("titan")] == [
        unchecked + "the installed transformers has no unheard-of.",
        unchecked + "transformers is not installed.",
    ]


@pytest.mark.parametrize("format", ["native", "hf"])
def test_a_head_that_is_not_what_the_config_says_is_not_saved(format, tmp_path):
    apart, one = random_model(Llama, TIED), random_model(Llama, TINY)
    apart.lm_head.weight = torch.nn.Parameter(apart.tok_embeddings.weight.detach() + 1)
    one.lm_head.weight = one.tok_embeddings.weight
    for model, problem in [
        (apart, "lm_head.weight differs from tok_embeddings.weight, but the config says that they are tied"),
        (one, "lm_head.weight is tok_embeddings.weight, but the config says that they are not tied"),
    ]:
        with pytest.raises(ta.TitanError) as caught:
            ta.save_checkpoint(model, tmp_path / "saved", format)
        titan_error_text(caught)
        assert caught.value.problems == [problem]
        assert list(tmp_path.iterdir()) == []
