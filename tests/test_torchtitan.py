"""torchtitan's own debug models: dense ones' state dicts load as they are, mixtures' by a table; all compute the same.

Tolerance: both run in fp32 and sum in different orders (fused qkv, complex rope, flex attention), which is worth a few
1e-7; 1e-5 leaves room for that, and the seeded faults below are all beyond 1e-3.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import titan_models.gpt_oss
import titan_models.llama
import titan_models.qwen3
import titan_models.qwen3_moe
import torch
from safetensors.torch import load_file

import titan_adapters as ta
from tests.conftest import assert_bitwise_equal, relative_error, titan_error_text

TOLERANCE = 1e-5

# Copied by hand from torchtitan 0.3.0, models/llama3, qwen3 and gpt_oss/__init__.py (`_debugmodel`), and from the
# defaults of models/common/rope.py (llama scaling 8, 1, 4, 8192) and nn_modules.py (eps 1e-5). Ours are only
# max_seq_len, the number of rows of a table, and the number of layers of mixtures, which are cut to two.
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
QWEN3_MOE = titan_models.qwen3_moe.Qwen3MoeConfig(
    dim=256, num_layers=2, vocab_size=2048, max_seq_len=64, norm_eps=1e-6, tied_embeddings=False, dtype="float32",
    num_heads=16, num_kv_heads=8, head_dim=128, hidden_dim=1, expert_dim=768, num_experts=64, top_k=8, renormalize=True,
    sparse=(True, True), attention_bias=False, windows=(None, None),
    rope=ta.RopeSpec(theta=1e6, rotary_dim=128, layout="half", scaling=None),
)  # fmt: skip
GPT_OSS = titan_models.gpt_oss.GptOssConfig(
    dim=256, num_layers=2, vocab_size=2048, max_seq_len=64, norm_eps=1e-5, tied_embeddings=False, dtype="float32",
    num_heads=64, num_kv_heads=8, head_dim=64, attention_bias=True, windows=(128, None), num_experts=8, top_k=4,
    hidden_dim=2880, swiglu=ta.ClampedSwiGLU(alpha=1.702, limit=7.0),
    rope=ta.RopeSpec(
        theta=150000.0, rotary_dim=64, layout="half",
        scaling=ta.YarnScaling(
            factor=32.0, original_max_position=4096, beta_fast=32.0, beta_slow=1.0, truncate=False,
            attention_factor=None, mscale=None, mscale_all_dim=None,
        ),
    ),
)  # fmt: skip
DENSE = ("llama3", "qwen3")
FAMILIES = {
    "llama3": (titan_models.llama.Llama, LLAMA3),
    "qwen3": (titan_models.qwen3.Qwen3, QWEN3),
    "qwen3_moe": (titan_models.qwen3_moe.Qwen3Moe, QWEN3_MOE),
    "gpt_oss": (titan_models.gpt_oss.GptOss, GPT_OSS),
}


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


def loaded(family: str, state: dict[str, torch.Tensor]) -> ta.BaseTransformer:
    cls, config = FAMILIES[family]
    model = cls(config)
    if family not in DENSE:
        state = ta.torchtitan_adapter(model).to_native(state)
    model.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_torchtitan_weights_load_and_logits_agree(references, family):
    tokens, positions, theirs, state = split(references[family])
    ours = loaded(family, state)(tokens, positions)
    error = relative_error(ours, theirs)
    assert error < TOLERANCE, f"relative {error}, largest difference {(ours - theirs).abs().max()}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_writes_what_torchtitan_holds(references, family):
    """Names, dtypes and bits; of dense models a plain identity, but for the alias of a tied head."""
    cls, config = FAMILIES[family]
    *_, state = split(references[family])
    adapter = ta.torchtitan_adapter(cls(config))
    back = adapter.to_hf(adapter.to_native(state))
    if config.tied_embeddings:
        back["lm_head.weight"] = back["tok_embeddings.weight"]
    assert_bitwise_equal(back, state)


@pytest.mark.parametrize("family", FAMILIES)
def test_permuted_query_rows_are_noticed(references, family):
    """The comparison above can fail: q rows in the other rope layout."""
    _, config = FAMILIES[family]
    tokens, positions, theirs, state = split(references[family])
    heads, head_dim = config.num_heads, config.head_dim
    for name in [name for name in state if name.endswith("wq.weight")]:
        rows = state[name].view(heads, 2, head_dim // 2, -1)
        state[name] = rows.transpose(1, 2).reshape(state[name].shape)
    with torch.no_grad():
        assert relative_error(loaded(family, state)(tokens, positions), theirs) > 1e-3


INNER = "layers.1.moe.routed_experts.inner_experts"


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3_moe", lambda s: s.update({f"{INNER}.w1_EFD": s[f"{INNER}.w3_EFD"]})),
        ("qwen3_moe", lambda s: s.update({f"{INNER}.w2_EDF": s[f"{INNER}.w2_EDF"].flip(0)})),
        ("gpt_oss", lambda s: s.update({f"{INNER}.mlp1_weight_EGD": s[f"{INNER}.mlp1_weight_EGD"].flip(1)})),
        ("gpt_oss", lambda s: s.update({f"{INNER}.mlp2_bias_ED": s[f"{INNER}.mlp2_bias_ED"].flip(0)})),
        ("gpt_oss", lambda s: s.update({"layers.1.attention.sinks": s["layers.1.attention.sinks"] + 1})),
    ],
)
@torch.no_grad()
def test_swapped_tensors_of_mixtures_are_noticed(references, family, change):
    tokens, positions, theirs, state = split(references[family])
    change(state)
    assert relative_error(loaded(family, state)(tokens, positions), theirs) > 1e-3


class BiasedConfig(titan_models.qwen3_moe.Qwen3MoeConfig):
    def feed_forward(self, layer):
        return super().feed_forward(layer).model_copy(update={"correction_bias": True})


class Biased(titan_models.qwen3_moe.Qwen3Moe):
    Config = BiasedConfig


@torch.no_grad()
def test_load_balancing_bias(references):
    """A model with a correction bias takes it, and agrees; one without refuses it, rather than choose other experts."""
    reference = references["qwen3_moe"]
    tokens, positions, unbiased, state = split(reference)
    biases = {name.removeprefix("biased."): t for name, t in reference.items() if name.startswith("biased.")}
    theirs = reference["biased_logits"]
    assert len(biases) == 2 and relative_error(theirs, unbiased) > 1e-3
    model = Biased(BiasedConfig.from_json(QWEN3_MOE.to_json()))
    model.load_state_dict(ta.torchtitan_adapter(model).to_native(state | biases))
    assert relative_error(model(tokens, positions), theirs) < TOLERANCE
    with pytest.raises(
        ta.TitanError, match=r"layers\.0\.moe\.expert_bias_E takes part in torchtitan's choice"
    ) as caught:
        loaded("qwen3_moe", state | biases)
    titan_error_text(caught)


def test_a_mixture_without_a_load_balancing_bias(references):
    *_, state = split(references["gpt_oss"])
    with torch.device("meta"):
        model = titan_models.gpt_oss.GptOss(GPT_OSS)
    adapter = ta.torchtitan_adapter(model, expert_bias=False)
    with pytest.raises(ta.TitanError, match=r"unexpected tensor layers\.0\.moe\.expert_bias_E \(8,\)"):
        adapter.to_native(state)
    without = {name: tensor for name, tensor in state.items() if not name.endswith("expert_bias_E")}
    assert_bitwise_equal(adapter.to_hf(adapter.to_native(without)), without)
    with pytest.raises(ta.TitanError, match=r"missing tensor layers\.0\.moe\.expert_bias_E"):
        ta.torchtitan_adapter(model).to_native(without)


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
