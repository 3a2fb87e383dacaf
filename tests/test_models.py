"""Every installed model, on every one of its tiny configs: against transformers, and against itself.

Tolerance of 1e-5, relative: both sides run in fp32 and differ in the order of sums only, which is worth a few 1e-7.
"""

import pytest
import torch
from safetensors.torch import load_file

import titan_adapters as ta
from tests.conftest import EVERY_MODEL, WINDOWED, assert_bitwise_equal, random_model, random_tokens, relative_error
from titan_adapters.checkpoint import convert_checkpoint

TOLERANCE = 1e-5
LENGTH = 100
"""Tokens: beyond every tiny config's window (5) and beyond the original context (32) of those with a scaled rope."""

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


@pytest.mark.parametrize("name", [info.name for info in ta.list_models() if info.source.startswith("installed")])
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
def test_logits_match_transformers(cls, config, tmp_path):
    from transformers import AutoModelForCausalLM

    ours = random_model(cls, config)
    ta.save_checkpoint(ours, tmp_path / "published", "hf")
    # Eager is the plain formula; transformers' other backends need not agree with it to 1e-5.
    options = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
    theirs, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "published", **options)
    assert not any(loaded[kind] for kind in ("unexpected_keys", "missing_keys", "mismatched_keys")), loaded
    theirs.eval()
    tokens = random_tokens(config, 2, LENGTH)
    with torch.no_grad():
        actual, reference = ours(tokens), theirs(tokens).logits
    error = relative_error(actual, reference)
    assert error < TOLERANCE, f"relative {error}, largest difference {(actual - reference).abs().max()}"
    # The comparison can fail: it notices one norm weight of one layer that is off by a thousandth.
    with torch.no_grad():
        ours.layers[-1].ffn_norm.weight[0] *= 1.001
        assert relative_error(ours(tokens), reference) > TOLERANCE


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
@pytest.mark.parametrize("format", ["native", "hf"])
def test_saved_and_loaded_bitwise(cls, config, format, tmp_path):
    model = random_model(cls, config)
    ta.save_checkpoint(model, tmp_path / "saved", format)
    loaded = ta.load_model(tmp_path / "saved")
    assert type(loaded) is cls and loaded.config == config
    assert_bitwise_equal(loaded.state_dict(), model.state_dict())
    tokens = random_tokens(config, 1, LENGTH)
    with torch.no_grad():
        assert torch.equal(loaded(tokens), model(tokens))


@every_model
def test_batched_packed_and_alone_agree(cls, config):
    model = random_model(cls, config)
    tokens = random_tokens(config, 3, 17)
    with torch.no_grad():
        batched = model(tokens)
        packed = model(tokens.flatten(), torch.arange(17).repeat(3))
        alone = torch.stack([model(row) for row in tokens])
    assert relative_error(batched, alone) < TOLERANCE
    assert relative_error(packed, alone.flatten(0, 1)) < TOLERANCE


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
def test_document_ids_alone_restart_positions(cls, config):
    model = random_model(cls, config)
    tokens = random_tokens(config, 20)
    ids = torch.tensor([4] * 6 + [2] * 1 + [7] * 13)
    with torch.no_grad():
        by_ids = model(tokens, document_ids=ids)
        alone = torch.cat([model(document) for document in tokens.split([6, 1, 13])])
    assert relative_error(by_ids, alone) < TOLERANCE


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


@every_model
def test_a_token_changes_no_logits_before_it(cls, config):
    model = random_model(cls, config)
    tokens = random_tokens(config, 1, 24)
    other = tokens.clone()
    other[0, 11] = (other[0, 11] + 1) % config.vocab_size
    with torch.no_grad():
        with ta.nn.record_routing(model) as record:
            before = model(tokens)[0]
        with ta.nn.replay_routing(model, record.experts()):  # an expert's matmul rounds by how many tokens it gets
            after = model(other)[0]
    assert torch.equal(after[:11], before[:11])
    # From there on it is seen by all, or by those inside the narrowest window (the residual stream carries it on).
    assert all(not torch.equal(after[i], before[i]) for i in range(11, 16))


@every_model
@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_tokens(cls, config, count):
    """The shortest sequences take their own paths in kernels; they must still be the start of a longer one."""
    model = random_model(cls, config)
    tokens = random_tokens(config, 10)
    with torch.no_grad():
        whole = model(tokens)[:count]
        assert relative_error(model(tokens[:count]), whole) < TOLERANCE
        assert relative_error(model(tokens[None, :count])[0], whole) < TOLERANCE


@every_model
def test_every_parameter_gets_a_gradient(cls, config):
    model = random_model(cls, config)
    tokens = random_tokens(config, 2, 12)
    logits = model(tokens)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@every_model
def test_meta_model_materialises_with_tables_and_ties(cls, config):
    with torch.device("meta"):
        model = cls(config)
    model.to_empty(device="cpu")
    built = random_model(cls, config)
    model.load_state_dict(built.state_dict())
    assert (model.lm_head.weight is model.tok_embeddings.weight) == config.tied_embeddings
    assert torch.equal(model.layers[-1].attention.rope.cos_sin, built.layers[-1].attention.rope.cos_sin)
    tokens = random_tokens(config, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens), built(tokens))


@every_model
def test_bfloat16_stays_close_to_fp32(cls, config):
    """bf16 keeps 8 bits, 0.4% per rounding; the roundings of three layers of width 192 came to 7% at worst.

    This catches gross faults (a mask or table in the wrong dtype); the dtype of the table is asserted by itself,
    because rounding it would hide below that. Mixtures take the same experts: rounded logits may choose others.
    """
    model = random_model(cls, config)
    tokens = random_tokens(config, LENGTH)
    with torch.no_grad():
        with ta.nn.record_routing(model) as record:
            reference = model(tokens)
        model.to(torch.bfloat16)
        assert model.layers[0].attention.rope.cos_sin.dtype == torch.float32
        with ta.nn.replay_routing(model, record.experts()):
            logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, reference) < 0.12


def test_too_long_a_sequence_is_refused():
    cls = ta.get_model("qwen3")
    config = next(iter(cls.tiny_configs().values()))
    with pytest.raises(ta.TitanError, match=r"129 tokens exceed max_seq_len = 128\.\nFix: shorten"):
        cls(config)(random_tokens(config, 129))
