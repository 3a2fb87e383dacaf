"""Rope in published configs: every spelling in, both spellings out.

transformers v5 writes `rope_parameters`, v4 wrote `rope_theta` and `rope_scaling`; files in the wild have either or
both. A key that is neither read nor known to be inert is a problem by name, and so is a contradiction: a rope that is
almost right shows only at long context.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_adapters.errors import ConfigError
from titan_adapters.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Kind:
    """One `rope_type`."""

    scaling: Any
    """Class of our spec."""
    keys: Mapping[str, str]
    """Published key -> field of our spec."""
    absent: Mapping[str, Any]
    """What the published format defines for an absent key, where it defines anything."""


KINDS = {
    "linear": Kind(LinearScaling, {"factor": "factor"}, {}),
    "dynamic": Kind(DynamicScaling, {"factor": "factor"}, {}),
    "llama3": Kind(
        Llama3Scaling,
        {key: key for key in ("factor", "low_freq_factor", "high_freq_factor")} | {ORIGINAL: "original_max_position"},
        {},
    ),
    "yarn": Kind(
        YarnScaling,
        {key: key for key in ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale")}
        | {"mscale_all_dim": "mscale_all_dim", ORIGINAL: "original_max_position"},
        {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
        | dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim")),
    ),
    "longrope": Kind(
        LongRopeScaling,
        {key: key for key in ("short_factor", "long_factor", "attention_factor")} | {ORIGINAL: "original_max_position"},
        {},
    ),
    "proportional": Kind(ProportionalScaling, {"factor": "factor"}, {"factor": 1.0}),
}


@dataclass
class RopeSettings:
    """What a config says about one rope, gathered from its places, and what is wrong with it.

    Args:
        v5: `rope_parameters`, or the part of it that is about these layers.
        v4: `rope_scaling`.
        thetas: Values of the keys outside of the two, by key.
        partials: The same for the rotated fraction of a head.
        partial: The fraction if the config does not say; None if the family always rotates whole heads.
        original: Original context, if that is published outside of the two.
        place: Name of `v5` in messages.
    """

    v5: Mapping[str, Any] | None
    v4: Mapping[str, Any] | None
    thetas: Mapping[str, Any]
    partials: Mapping[str, Any] = field(default_factory=dict)
    partial: float | None = None
    original: int | None = None
    place: str = "rope_parameters"
    problems: list[str] = field(default_factory=list, init=False)

    def read(self, head_dim: int, max_seq_len: int) -> dict[str, Any] | None:
        """Arguments of RopeSpec but the layout; None if `problems` says why there are none."""
        merged = self._merged()
        if merged is None:
            return None
        theta = self._agreed("rope_theta", self.thetas, merged.pop("rope_theta", None))
        if theta is None:
            if not self.problems:
                keys = [*self.thetas, f"{self.place}.rope_theta"]
                self.problems.append(f"rope_theta is missing: neither {' nor '.join(keys)} is there")
            return None
        kind = merged.pop("rope_type", "default")
        rotary_dim, scaling = head_dim, None
        if self.partial is not None:
            given = self._agreed("partial_rotary_factor", self.partials, merged.pop("partial_rotary_factor", None))
            rotary_dim = int(head_dim * (self.partial if given is None else given))
        if kind in KINDS:
            scaling = self._scaling(kind, merged, head_dim, max_seq_len)
        elif kind != "default":
            self.problems.append(f"rope type {kind!r} is not supported")
            return None
        if merged and not self.problems:
            self.problems.append(f"rope settings are not read for type {kind!r}: {', '.join(sorted(merged))}")
        return None if self.problems else {"theta": float(theta), "rotary_dim": rotary_dim, "scaling": scaling}

    def _merged(self) -> dict[str, Any] | None:
        """One dict from both spellings. Theta and rotated fraction may be inside of one and outside of the other."""
        v5, v4 = (canonical(settings) if settings else None for settings in (self.v5, self.v4))
        if v5 is not None and v4 is not None:
            outside = {key: v5[key] for key in ("rope_theta", "partial_rotary_factor") if key in v5 and key not in v4}
            if v5 != v4 | outside:
                self.problems.append(f"{self.place} {self.v5} and rope_scaling {self.v4} contradict each other")
                return None
        return v5 or v4 or {}

    def _agreed(self, name: str, outside: Mapping[str, Any], inside: Any) -> float | None:
        given = {k: v for k, v in {**outside, f"{self.place}.{name}": inside}.items() if v is not None}
        if len({float(value) for value in given.values()}) > 1:
            self.problems.append(f"{name} is contradictory: {', '.join(f'{k} = {v}' for k, v in given.items())}")
            return None
        return next(iter(given.values()), None)

    def _scaling(self, name: str, settings: dict[str, Any], head_dim: int, max_seq_len: int) -> dict[str, Any] | None:
        """Takes what kind `name` reads out of `settings`."""
        kind = KINDS[name]
        if ORIGINAL in kind.keys and self.original not in (None, settings.setdefault(ORIGINAL, self.original)):
            self.problems.append(f"{ORIGINAL} is contradictory: {self.original}, in {self.place} {settings[ORIGINAL]}")
        if name == "longrope":
            factor = settings.pop("factor", None)  # it only decides the multiplier
            if (settings.get(ORIGINAL) or 0) > 1 and "attention_factor" not in settings:
                factor = factor or max_seq_len / settings[ORIGINAL]
                settings["attention_factor"] = longrope_multiplier(factor, settings[ORIGINAL])
        values = {**kind.absent, **{key: settings.pop(key) for key in kind.keys if key in settings}}
        absent = [key for key in kind.keys if key not in kind.absent and values.get(key) is None]
        if absent:
            self.problems.append(f"rope type {name} lacks {', '.join(absent)}")
            return None
        fields = {"type": name} | {kind.keys[key]: value for key, value in values.items()}
        if name == "dynamic":
            fields["original_max_position"] = max_seq_len
        if name == "proportional":
            fields["turning_dim"] = 2 * int(settings.pop("partial_rotary_factor", 1.0) * head_dim // 2)
        return fields


def longrope_multiplier(factor: float, original: int) -> float:
    """arXiv:2402.13753: what cos and sin are multiplied by if the config does not say."""
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


def canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls; `type` is the older spelling of `rope_type`, and `su` of `longrope`."""
    settings = {key: value for key, value in settings.items() if value is not None}
    old = settings.pop("type", None)
    if old is not None and settings.setdefault("rope_type", old) != old:
        settings["type"] = old  # contradictory: left over, and so refused by name
    if settings.get("rope_type") == "su":
        settings["rope_type"] = "longrope"
    return settings


def hf_rope(spec: RopeSpec, max_seq_len: int, head_dim: int | None = None) -> dict[str, Any]:
    """Both spellings of a rope: v5 `rope_parameters`, and v4 `rope_theta` with `rope_scaling`.

    Args:
        head_dim: Given for families that publish the rotated fraction of a head.
    """
    settings = _published(spec.scaling, spec.rotary_dim, max_seq_len)
    partial = {} if head_dim is None else {"partial_rotary_factor": fraction(spec.rotary_dim, head_dim)}
    return {
        "rope_theta": spec.theta,
        "rope_scaling": None if spec.scaling is None else settings,
        "rope_parameters": settings | {"rope_theta": spec.theta} | partial,
        **partial,
    }


def hf_rope_by_type(full: RopeSpec, sliding: RopeSpec, max_seq_len: int, local_key: str | None) -> dict[str, Any]:
    """Both spellings of two ropes, one of the layers that see all and one of those with a window.

    Args:
        local_key: v4's key for the theta of the latter; None if v4 had one theta for all layers.
    """
    if sliding.scaling is not None or (local_key is None and sliding.theta != full.theta):
        raise ConfigError(
            "The rope of the layers with a window can't be said in every version of this format.",
            fix="save with format='native'.",
        )
    if isinstance(full.scaling, YarnScaling) and not full.scaling.truncate:
        # transformers 5 looks for this one key beside the layer types, not among the settings of one, and so misses it.
        raise ConfigError(
            "Stock code of formats with a rope per layer type ignores truncate=False of yarn.",
            fix="save with format='native'.",
        )
    return hf_rope(full, max_seq_len) | ({local_key: sliding.theta} if local_key else {}) | {
        "rope_parameters": {
            "full_attention": hf_rope(full, max_seq_len)["rope_parameters"],
            "sliding_attention": hf_rope(sliding, max_seq_len)["rope_parameters"],
        }
    }  # fmt: skip


def _published(scaling: RopeScaling | None, rotary_dim: int, max_seq_len: int) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    if isinstance(scaling, DynamicScaling) and scaling.original_max_position != max_seq_len:
        raise ConfigError(
            f"Dynamic rope from {scaling.original_max_position} to {max_seq_len} tokens can't be said in this format.",
            fix=f"set max_seq_len to {scaling.original_max_position}, or save with format='native'.",
        )
    fields = {theirs: getattr(scaling, ours) for theirs, ours in KINDS[scaling.type].keys.items()}
    if isinstance(scaling, ProportionalScaling):
        fields["partial_rotary_factor"] = fraction(scaling.turning_dim, rotary_dim)
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    return {"rope_type": scaling.type} | {key: value for key, value in listed.items() if value is not None}


def fraction(part: int, whole: int) -> float:
    """A number f with `int(whole * f) == part`, which part / whole itself can miss by its rounding."""
    quotient = part / whole
    return quotient if int(whole * quotient) == part else math.nextafter(quotient, 1.0)
