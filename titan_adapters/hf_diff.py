"""Whether a published config that somebody else serves says the same function as a model of ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_adapters.checkpoint.folder import read_json
from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer
from titan_adapters.differences import Difference, differences
from titan_adapters.errors import CheckpointError
from titan_adapters.hf_config import write_hf_config
from titan_adapters.hf_reader import INERT
from titan_adapters.hf_rope import canonical
from titan_adapters.registry import get_model

# transformers v4's spellings of what `rope_parameters` and `dtype` say, some of them one family's only.
V4_ROPE = (
    "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "rotary_emb_base", "rotary_pct",
)  # fmt: skip
V4 = (*V4_ROPE, "torch_dtype")


@dataclass(frozen=True)
class HFDiff:
    """Result of `diff_hf_config`."""

    differences: list[Difference]
    """By published key, such as `rope_parameters.factor`."""
    num_equal: int
    """Published top-level keys that say the same on both sides."""
    same_family: bool
    """Whether the other config was read as our family's. If not, the two were compared key by key, and a key that one
    of them lacks may still mean the same."""


def diff_hf_config(model: str | type[BaseTransformer], config: TransformerConfig, other: str | Path) -> HFDiff:
    """Compare what `config` says in its published form with `other`.

    A config of the same family is read as the family reads it, and what that says is written again: so neither
    spelling (transformers v4 or v5) nor an absent key with a default of its own makes a difference, and every fact of
    the function is compared. Token ids, dropout and other keys that no forward pass reads are not.

    Args:
        other: A published `config.json`, or a folder that has one.

    Raises:
        CheckpointError: `other` is not there or not JSON.
        ConfigError: our family has no published format, or `other` is of our family and can't be read; all problems
            are named.
    """
    cls = get_model(model)
    ours = write_hf_config(cls, config)
    theirs = _read(Path(other))
    same_family = theirs.get("model_type") == ours["model_type"]
    if same_family:
        theirs = write_hf_config(cls, cls.from_hf_config(theirs))
    a, b = _plain(ours), _plain(theirs)
    found = differences(a, b)
    different_keys = {difference.field.partition(".")[0] for difference in found}
    return HFDiff(found, len({**a, **b}) - len(different_keys), same_family)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(
            f"{path} is not a published config.",
            [f"{file} is not there"],
            fix="give a config.json, or a folder that has one.",
        )
    return read_json(file)


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """v5 spelling only, without keys that no forward pass reads."""
    if data.get("rope_parameters"):
        rope = canonical(data["rope_parameters"])
    else:
        outside = {key: data[key] for key in V4_ROPE if key != "rope_scaling" and data.get(key) is not None}
        rope = {"rope_type": "default"} | canonical(data.get("rope_scaling") or {}) | outside
    plain: dict[str, Any] = {
        key: value
        for key, value in data.items()
        if value is not None and key not in V4 and not key.startswith("_") and (key not in INERT or key == "model_type")
    }
    plain["dtype"] = str(data.get("dtype") or data.get("torch_dtype")).removeprefix("torch.")
    plain["rope_parameters"] = rope
    return plain
