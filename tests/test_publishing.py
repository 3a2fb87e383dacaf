"""What is published says what the model computes, or is refused: every family, every field of its config changed.

Tolerance of 1e-5, relative: both sides run in fp32 and differ in the order of sums only, which is worth a few 1e-7.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import titan_adapters as ta
from tests.conftest import random_model, random_tokens, relative_error, titan_error_text
from titan_adapters.checkpoint.stock import stock_problems
from titan_adapters.differences import differences
from titan_adapters.errors import ConfigError
from titan_adapters.state_dict import native_tensors

TOLERANCE = 1e-5
FAMILIES = [info.name for info in ta.list_models() if info.source.startswith("installed")]
OTHER_WORD = {"half": "interleaved", "gelu": "gelu_tanh", "gelu_tanh": "gelu", "float32": "bfloat16"}

YARN = ta.YarnScaling(
    factor=4.0, original_max_position=32, beta_fast=4.0, beta_slow=1.0, truncate=True, attention_factor=None,
    mscale=None, mscale_all_dim=None,
)  # fmt: skip


def scalings(rotary_dim: int) -> Iterator[ta.RopeScaling | None]:
    """Every kind; rotary_dim is a multiple of 4."""
    pairs = rotary_dim // 2
    longrope = ta.LongRopeScaling(
        short_factor=tuple(1 + 0.05 * i for i in range(pairs)), long_factor=tuple(1 + 0.9 * i for i in range(pairs)),
        original_max_position=32, attention_factor=1.19,
    )  # fmt: skip
    yield None
    yield ta.LinearScaling(factor=4.0)
    yield ta.DynamicScaling(factor=4.0, original_max_position=128)
    yield ta.DynamicScaling(factor=4.0, original_max_position=32)
    yield ta.Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
    for changes in (
        {},
        {"truncate": False},
        {"attention_factor": 1.3},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"beta_fast": 0.3, "beta_slow": 0.2},
    ):
        yield YARN.model_copy(update=changes)
    yield longrope
    yield longrope.model_copy(update={"original_max_position": 200})
    yield ta.ProportionalScaling(factor=2.0, turning_dim=pairs)


def changed(value: Any) -> Iterator[Any]:
    """`value` with one thing in it changed, in every way that is tried."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield 2 * value
    elif isinstance(value, float):
        yield 1.5 * value
    elif isinstance(value, str):
        yield from [OTHER_WORD[value]] if value in OTHER_WORD else []
    elif isinstance(value, dict):
        for key in value:
            if key == "scaling":
                new = [s.model_dump(mode="json") if s else None for s in scalings(value["rotary_dim"])]
            else:
                new = list(changed(value[key]))
            yield from (value | {key: one} for one in new if one != value[key])
    elif isinstance(value, list):
        first = next(changed(value[0]), None)
        yield from ([first, *value[1:]], [first] * len(value))
    else:
        yield from (7, 0.7, None)


def neighbours(cls: type[ta.BaseTransformer]) -> Iterator[ta.TransformerConfig]:
    """Valid configs that are another one than the family's first tiny config in one field."""
    config = next(iter(cls.tiny_configs().values()))
    data = config.to_json()
    seen = [config]
    for field in changed(data):
        try:
            other = cls.Config.from_json(field)
            other.fingerprint()  # builds every spec, which may refuse the value
        except (ValueError, ConfigError):
            continue
        if other not in seen:
            seen.append(other)
            yield other


def error_against_stock(model: ta.BaseTransformer, published: dict[str, Any]) -> float:
    config = transformers.AutoConfig.for_model(**published)
    # Eager is the plain formula; transformers' other backends need not agree with it to 1e-5.
    theirs = getattr(transformers, published["architectures"][0]).from_pretrained(
        None,
        config=config,
        state_dict=type(model).state_dict_adapter(model.config).to_hf(native_tensors(model)),
        attn_implementation="eager",
        dtype=torch.float32,
    )
    tokens = random_tokens(model.config, 1, model.config.max_seq_len)
    with torch.no_grad():
        return relative_error(model(tokens), theirs.eval()(tokens).logits)


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_changed_field_is_published_or_refused(name):
    """A fact that the format can't hold, or that stock code ignores, must be a refusal."""
    cls = ta.get_model(name)
    wrong, published, refused = [], 0, 0
    for config in neighbours(cls):
        try:
            hf_config = ta.write_hf_config(cls, config)
        except ConfigError as error:
            assert str(error).splitlines()[-1].startswith("Fix: ")
            refused += 1
            continue
        if stock_problems(cls, config, hf_config):  # such as a width that transformers wants to be a multiple
            refused += 1
            continue
        published += 1
        error = error_against_stock(random_model(cls, config).float(), hf_config)
        if error > TOLERANCE:
            first = next(iter(cls.tiny_configs().values()))
            wrong.append((error, differences(first.to_json(), config.to_json())))
    assert not wrong
    assert published >= 10 and refused >= 2  # so many that neither half of the test is empty


@pytest.mark.parametrize("name", ["olmo3", "gemma3_text"])
def test_stock_code_ignores_truncate_of_a_rope_per_layer_type(name):
    """Why it is refused: with truncate=False in its config.json, stock code still computes what True means."""
    cls = ta.get_model(name)
    rounded = next(iter(cls.tiny_configs().values()))
    rounded = rounded.model_copy(update={"rope": rounded.rope.model_copy(update={"scaling": YARN})})
    exact = rounded.model_copy(
        update={"rope": rounded.rope.model_copy(update={"scaling": YARN.model_copy(update={"truncate": False})})}
    )
    with pytest.raises(ConfigError) as caught:
        ta.write_hf_config(cls, exact)
    assert titan_error_text(caught) == (
        "Stock code of formats with a rope per layer type ignores truncate=False of yarn.\n"
        "Fix: save with format='native'."
    )
    published = ta.write_hf_config(cls, rounded)
    assert error_against_stock(random_model(cls, rounded), published) < TOLERANCE
    for settings in (published["rope_scaling"], published["rope_parameters"]["full_attention"]):
        settings["truncate"] = False
    assert cls.from_hf_config(published) == exact
    assert error_against_stock(random_model(cls, exact), published) > 0.1
    assert error_against_stock(random_model(cls, rounded), published) < TOLERANCE
