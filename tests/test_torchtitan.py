"""torchtitan's own llama3 and qwen3 debug models: their state dicts load as they are, and compute the same.

Tolerance: both run in fp32 and sum in different orders (fused qkv, complex rope, flex attention), which is worth a few
1e-7; 1e-5 leaves room for that, and the seeded faults below are all beyond 1e-3.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import titan_models.llama
import titan_models.qwen3
import torch
from safetensors.torch import load_file

import titan_adapters as ta
from tests.conftest import relative_error

TOLERANCE = 1e-5

# Copied by hand from torchtitan 0.3.0, models/llama3/__init__.py and models/qwen3/__init__.py (`_debugmodel`), and from
# the defaults of models/common/rope.py (llama scaling 8, 1, 4, 8192) and nn_modules.py (eps 1e-5). Only max_seq_len
# is ours: it is the number of rows of a table.
LLAMA3 = titan_models.llama.LlamaConfig(
    dim=256, num_layers=6, vocab_size=2048, max_seq_len=64, norm_eps=1e-5, tied_embeddings=False, dtype="float32",
    num_heads=16, num_kv_heads=16, head_dim=16, hidden_dim=768, attention_bias=False, mlp_bias=False,
    rope=ta.RopeSpec(
        theta=500000.0, rotary_dim=16, layout="interleaved",
        scaling=ta.Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
        ),
    ),
)  # fmt: skip
QWEN3 = titan_models.qwen3.Qwen3Config(
    dim=256, num_layers=8, vocab_size=2048, max_seq_len=64, norm_eps=1e-6, tied_embeddings=True, dtype="float32",
    num_heads=16, num_kv_heads=8, head_dim=128, hidden_dim=3072, attention_bias=False, windows=(None,) * 8,
    rope=ta.RopeSpec(theta=1e6, rotary_dim=128, layout="half", scaling=None),
)  # fmt: skip
FAMILIES = {"llama3": (titan_models.llama.Llama, LLAMA3), "qwen3": (titan_models.qwen3.Qwen3, QWEN3)}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """What torchtitan computed, by family; importing it and triton's stand-in stays out of this process."""
    pytest.importorskip("torchtitan")
    folder = tmp_path_factory.mktemp("torchtitan")
    script = Path(__file__).with_name("torchtitan_reference.py")
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = {}
    for family in FAMILIES:
        file = folder / f"{family}.safetensors"
        loaded[family] = load_file(file)
        file.unlink()
    return loaded


def split(reference: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    state = {name.removeprefix("state."): t for name, t in reference.items() if name.startswith("state.")}
    return reference["tokens"], reference["positions"], reference["logits"], state


@pytest.mark.parametrize("family", FAMILIES)
def test_torchtitan_weights_load_as_they_are_and_logits_agree(references, family):
    cls, config = FAMILIES[family]
    tokens, positions, theirs, state = split(references[family])
    model = cls(config)
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        ours = model(tokens, positions)
    error = relative_error(ours, theirs)
    assert error < TOLERANCE, f"relative {error}, largest difference {(ours - theirs).abs().max()}"


@pytest.mark.parametrize("family", FAMILIES)
def test_permuted_query_rows_are_noticed(references, family):
    """The comparison above can fail: q rows in the other rope layout."""
    cls, config = FAMILIES[family]
    tokens, positions, theirs, state = split(references[family])
    heads, head_dim = config.num_heads, config.head_dim
    for name in [name for name in state if name.endswith("wq.weight")]:
        rows = state[name].view(heads, 2, head_dim // 2, -1)
        state[name] = rows.transpose(1, 2).reshape(state[name].shape)
    model = cls(config)
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        assert relative_error(model(tokens, positions), theirs) > 1e-3


def test_missing_rope_scaling_is_noticed(references):
    tokens, positions, theirs, state = split(references["llama3"])
    model = titan_models.llama.Llama(
        LLAMA3.model_copy(update={"rope": LLAMA3.rope.model_copy(update={"scaling": None})})
    )
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        assert relative_error(model(tokens, positions), theirs) > 1e-3


def test_documents_that_see_each_other_are_noticed(references):
    """Row 1 of the reference holds two documents; the second must not be compared in a way that hides leakage."""
    tokens, positions, theirs, state = split(references["llama3"])
    model = titan_models.llama.Llama(LLAMA3)
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        one_document = model(tokens, positions, torch.zeros_like(positions))
    assert relative_error(one_document[0], theirs[0]) < TOLERANCE
    assert relative_error(one_document[1, 40:], theirs[1, 40:]) > 1e-3
