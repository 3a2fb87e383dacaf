"""Layers that differ in heads, head sizes, windows and widths: the engine computes what the torch model computes."""

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, random_tokens
from tests.vllm.conftest import chunks_of, error_against_torch, generate, recorded_steps
from tests.vllm.models import TINY, Mixed
from titan_adapters.checkpoint import Identity, write_identity
from titan_adapters.vllm.reread import reread_problems

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]

TOLERANCE = 1e-5
EVEN = Mixed.Config(
    **TINY.model_dump() | {"num_layers": 4, "max_seq_len": 320},
    layers=((6, 2, 32, 5, 80), (4, 4, 64, 9, 96), (6, 2, 32, None, 80), (8, 1, 64, None, 112)),
)
# Cache pages of 96, 256, 64 and 320 numbers per token and layer: 96 and 256 do not divide the largest.
ODD = EVEN.model_copy(
    update={"layers": ((6, 3, 32, 5, 80), (4, 4, 64, 9, 96), (6, 2, 32, None, 80), (10, 5, 64, None, 112))}
)


@pytest.mark.parametrize(("config", "cached"), [(EVEN, 256), (ODD, 160)], ids=["even pages", "odd pages"])
def test_engine(start, tmp_path, config, cached):
    model = random_model(Mixed, config)
    ta.register_model(Mixed)
    ta.save_checkpoint(model, tmp_path / "native")
    llm = start(checkpoint=tmp_path / "native", max_model_len=320)
    prompts = [random_tokens(config, length, seed=length).tolist() for length in (300, 40, 3)]
    outputs = generate(llm, prompts)
    assert error_against_torch(model, outputs) < TOLERANCE
    with chunks_of(llm, 7), recorded_steps(llm) as steps:
        assert error_against_torch(model, generate(llm, prompts)) < TOLERANCE
    assert max(sum(step.num_scheduled_tokens.values()) for step in steps) == 7
    llm.reset_prefix_cache()
    again = [generate(llm, prompts[:1], prompt_logprobs=False)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in again] == [0, cached]  # whole blocks, of which the largest decides
    assert error_against_torch(model, again) < TOLERANCE
    # Each layer's numbers count: with any one of the windows one token wider, torch gives something else.
    for layer in (0, 1):
        wider = list(config.layers)
        wider[layer] = (*wider[layer][:3], wider[layer][3] + 1, wider[layer][4])
        other = Mixed(config.model_copy(update={"layers": tuple(wider)})).eval()
        other.load_state_dict(model.state_dict())
        assert error_against_torch(other, outputs) > TOLERANCE


def test_numbers_that_vllm_resolves(tmp_path):
    ta.register_model(Mixed)
    for config in (EVEN, ODD, EVEN.model_copy(update={"num_layers": 2, "layers": EVEN.layers[:2]})):
        identity = Identity(Mixed, config, "native")
        write_identity(tmp_path, identity)
        assert reread_problems(tmp_path, identity) == ([], 11)
