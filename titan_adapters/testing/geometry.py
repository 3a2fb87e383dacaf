"""Whether a model's tiny configs are awkward enough: with round numbers, many mistakes compute the right thing."""

from collections.abc import Callable, Sequence

from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer
from titan_adapters.testing.case import LENGTH

Present = Callable[[TransformerConfig], bool]

WANTED: dict[str, Present] = {
    "head_dim other than dim / heads": lambda c: any(s.num_heads * s.head_dim != c.dim for s in c.attention_specs()),
    "one kv head": lambda c: any(s.num_kv_heads == 1 < s.num_heads for s in c.attention_specs()),
    "odd vocabulary": lambda c: c.vocab_size % 2 == 1,
    "tied head": lambda c: c.tied_embeddings,
    "untied head": lambda c: not c.tied_embeddings,
    "several layers": lambda c: c.num_layers > 1,
    "a square matrix": lambda c: bool(_squares(c)),
}
"""What some tiny config of every model must have."""

WANTED_IF_USED: dict[str, tuple[Present, Present]] = {
    "square experts, or of half the width": (
        lambda c: bool(c.moe_specs()),
        lambda c: any(c.dim in (s.hidden_dim, 2 * s.hidden_dim) for s in c.moe_specs().values()),
    ),
    f"a window shorter than {LENGTH} tokens": (
        lambda c: bool(_windows(c)),
        lambda c: any(window < LENGTH for window in _windows(c)),
    ),
    f"a scaled rope whose original context is shorter than {LENGTH} tokens": (
        lambda c: bool(_original_contexts(c)),
        lambda c: any(length < LENGTH for length in _original_contexts(c)),
    ),
}
"""What some tiny config must have if any has the part concerned: (has the part, is awkward)."""

OPTIONAL: dict[str, Present] = {
    "windows": lambda c: bool(_windows(c)),
    "scaled rope": lambda c: any(s.rope and s.rope.scaling for s in c.attention_specs()),
    "partial rotary": lambda c: any(s.rope and s.rope.rotary_dim < s.head_dim for s in c.attention_specs()),
    "biases": lambda c: any(s.biases for s in c.attention_specs()),
    "sinks": lambda c: any(s.sinks for s in c.attention_specs()),
    "mixture of experts": lambda c: bool(c.moe_specs()),
}
"""What only some architectures have. The report says which of these no config has, so that none is forgotten."""


def geometry(cls: type[BaseTransformer], configs: Sequence[TransformerConfig]) -> str:
    """Some tiny config has each awkward geometry, or `impossible_geometry` says why no config of this architecture can.

    If this fails, change numbers of a tiny config: square matrices hide a transposition, head_dim = dim / heads hides
    a head_dim that was computed, a long window is never left.
    """
    wanted = WANTED | {
        name: awkward for name, (used, awkward) in WANTED_IF_USED.items() if any(used(config) for config in configs)
    }
    present = {name for name, has in wanted.items() if any(has(config) for config in configs)}
    missing = wanted.keys() - present
    problems = [f"no tiny config has: {name}" for name in wanted if name in missing - cls.impossible_geometry.keys()]
    problems += [
        f"impossible_geometry names {name!r}, which " + ("a tiny config has" if name in present else "is not asked for")
        for name in cls.impossible_geometry
        if name not in missing
    ]
    assert not problems, "; ".join(problems)
    unused = [name for name, has in OPTIONAL.items() if not any(has(config) for config in configs)]
    return f"{len(present)} kinds; not in use: {', '.join(unused) or 'none'}"


def _windows(config: TransformerConfig) -> list[int]:
    return [spec.window for spec in config.attention_specs() if spec.window is not None]


def _original_contexts(config: TransformerConfig) -> list[int]:
    scalings = [spec.rope.scaling.model_dump() for spec in config.attention_specs() if spec.rope and spec.rope.scaling]
    return [scaling["original_max_position"] for scaling in scalings if "original_max_position" in scaling]


def _squares(config: TransformerConfig) -> list[int]:
    widths = [spec.num_heads * spec.v_head_dim for spec in config.attention_specs()]
    widths += [spec.hidden_dim for spec in config.dense_specs().values()]
    widths += [spec.hidden_dim for spec in config.moe_specs().values()]
    return [width for width in widths if width == config.dim]
