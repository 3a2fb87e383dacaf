"""A spec field that is in use and that nobody looked after in the engine is refused, with the layers concerned.

No engine is started: the tables are read without vllm.
"""

import pytest

import titan_adapters as ta
from tests.conftest import EVERY_MODEL
from tests.vllm.models import FreeAttention
from titan_adapters.vllm.honours import HONOURED, unhonoured, unpageable

Llama = ta.get_model("llama")


@pytest.mark.parametrize(("cls", "config"), EVERY_MODEL)
def test_installed_models_use_nothing_else(cls, config):
    assert unhonoured(config) == []


@pytest.mark.parametrize("spec", HONOURED)
def test_the_table_names_fields_that_exist(spec):
    assert set(HONOURED[spec]) <= set(spec.model_fields)


def test_a_new_field_is_refused_once_it_is_used():
    class LaterSpec(ta.AttentionSpec):
        alibi: bool
        stride: int | None

    class Config(Llama.Config):
        def attention(self, layer):
            old = super().attention(layer)
            new = {"alibi": layer != 1, "stride": 8 if layer == 1 else None}
            return LaterSpec(**{name: getattr(old, name) for name in type(old).model_fields}, **new)

    config = Config.from_json(next(iter(Llama.tiny_configs().values())).to_json())
    assert unhonoured(config) == [
        "LaterSpec.alibi = True of layers [0, 2] is not honoured by vLLM's engine",
        "LaterSpec.stride = 8 of layers [1] is not honoured by vLLM's engine",
    ]


def test_chunks_are_whole_cache_blocks():
    config = FreeAttention.config({"chunk": 64}, {"chunk": 48}, {}, {"chunk": 48})
    assert unpageable(config, 16) == []
    assert unpageable(config, 32) == [
        "chunk 48 of layers [1, 3] is not a multiple of the KV cache's block_size, 32 tokens"
    ]
