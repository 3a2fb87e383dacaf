"""Every installed model, on every one of its tiny configs: the contract suite, and what it leaves out.

Tolerance of 1e-5, relative: both sides run in fp32 and differ in the order of sums only, which is worth a few 1e-7.
"""

import pytest
import torch
from safetensors.torch import load_file

import titan_adapters as ta
from tests.conftest import (
    EVERY_MODEL,
    INSTALLED,
    WINDOWED,
    assert_bitwise_equal,
    random_model,
    random_tokens,
    relative_error,
)
from titan_adapters.checkpoint import convert_checkpoint

TOLERANCE = 1e-5
LENGTH = 100
"""Tokens: beyond every tiny config's window (5) and beyond the original context (32) of those with a scaled rope."""

test_contract_suite = ta.testing.pytest_check(*INSTALLED)
every_model = pytest.mark.parametrize(("cls", "config"), EVERY_MODEL)


def transformers_model(hf_config: dict) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**hf_config)
    # Eager is the plain formula; transformers' other backends need not agree with it to 1e-5.
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def randomize(model: torch.nn.Module) -> None:
    """As `random_model`: what transformers draws has zero biases and norms of exactly one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if name.endswith("norm.weight"):
                parameter.add_(1.1)


def folder_tensors(folder) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("name", INSTALLED)
def test_one_config_of_each_family_ends_beyond_its_window_and_its_original_context(name):
    """40 tokens are the fewest that anything is compared on: here, in the contract suite, and in the engine."""
    cls = ta.get_model(name)
    windowed = name in WINDOWED
    lengths = []
    for config in cls.tiny_configs().values():
        specs = config.attention_specs()
        windows = [spec.window for spec in specs if spec.window]
        scalings = [spec.rope.scaling for spec in specs if spec.rope and spec.rope.scaling]
        originals = [s.original_max_position for s in scalings if not isinstance(s, ta.LinearScaling)]
        if originals and (windows or not windowed):
            lengths.append(max(windows + originals))
    assert lengths and min(lengths) < 40


@every_model
def test_transformers_folder_survives_native_and_back(cls, config, tmp_path):
    from transformers import AutoModelForCausalLM

    reference = transformers_model(cls.to_hf_config(config))
    randomize(reference)
    reference.save_pretrained(tmp_path / "theirs")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "native", "native")
    convert_checkpoint(tmp_path / "native", tmp_path / "back", "hf")
    assert_bitwise_equal(folder_tensors(tmp_path / "back"), folder_tensors(tmp_path / "theirs"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    tokens = random_tokens(config, 1, LENGTH)
    with torch.no_grad():
        expected = reference(tokens).logits
        assert torch.equal(back(tokens).logits, expected)
        for folder in ("theirs", "native"):
            assert relative_error(ta.load_model(tmp_path / folder)(tokens), expected) < TOLERANCE


@every_model
def test_packed_documents_do_not_see_each_other(cls, config):
    model = random_model(cls, config)
    lengths = [9, 1, 2, 14]
    tokens = random_tokens(config, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        with ta.nn.record_routing(model) as record:
            packed = model(tokens, positions)
        alone = torch.cat([model(document) for document in tokens.split(lengths)])
        other = tokens.clone()
        other[:9] = (other[:9] + 1) % config.vocab_size
        with ta.nn.replay_routing(model, record.experts()):  # an expert's matmul rounds by how many tokens it gets
            changed = model(other, positions)
    assert relative_error(packed, alone) < TOLERANCE
    assert torch.equal(changed[9:], packed[9:])
    assert not torch.equal(changed[:9], packed[:9])


@every_model
def test_document_ids_separate_what_positions_alone_would_join(cls, config):
    """The second document starts at position 6, as if it went on from the first: only its id says otherwise."""
    model = random_model(cls, config)
    tokens, positions = random_tokens(config, 12), torch.arange(12)
    ids = torch.tensor([0] * 6 + [1] * 6)
    with torch.no_grad():
        joined, separate = model(tokens, positions), model(tokens, positions, ids)
        alone = model(tokens[6:])  # rotary positions are relative, so the offset of 6 changes rounding only
    assert relative_error(separate[:6], joined[:6]) < TOLERANCE
    assert relative_error(separate[6:], joined[6:]) > 1e-2
    assert relative_error(separate[6:], alone) < TOLERANCE


def test_too_long_a_sequence_is_refused():
    cls = ta.get_model("qwen3")
    config = next(iter(cls.tiny_configs().values()))
    with pytest.raises(ta.TitanError, match=r"129 tokens exceed max_seq_len = 128\.\nFix: shorten"):
        cls(config)(random_tokens(config, 129))
