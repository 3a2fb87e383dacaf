"""Which kernels the time of a decode step, and of a prefill, goes to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from titan_adapters.bench.workload import DECODE_PROMPT, Workload
from titan_adapters.errors import ConfigError

STEPS = 32
"""Decode steps that are profiled, and whose mean is told."""
KINDS = {  # the first whose part occurs in a kernel's name
    "norms, activations, additions": ("triton_poi_", "triton_red_", "triton_per_", "cpp_fused"),  # Inductor's
    "kv cache write": ("reshape_and_cache",),
    "attention": ("flash", "attention", "attn"),
    "experts and their routing": ("moe", "topk", "swiglu"),
    "communication": ("nccl", "cross_device_reduce", "all_reduce", "allreduce"),
    "qk norm and rope": ("norm_rope", "rotary"),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas", "splitk", "mm", "linear"),
    "sampling": ("gumbel", "sample", "argmax", "softmax"),
    "copies": ("memcpy", "memset", "copy"),
}
OTHER = "other"
LAUNCHES = {
    "graphs": ("cudaGraphLaunch",),
    "kernels": ("cudaLaunchKernel", "cuLaunchKernel"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}
"""What the host does, by the beginnings of the names of CUDA's functions."""

Times = Mapping[str, Sequence[float]]
"""By name of a kernel or of a function of CUDA: how often, and microseconds on the device (on a CPU: there)."""
ProfileEngine = Callable[[list[int], list[int], str], Times]
"""For requests of these prompt and output lengths, sent at once; the last is the seed of the prompts."""


def check_profiling(workload: Workload) -> None:
    """Before anything is measured.

    Raises:
        ConfigError: the profiled steps don't fit, or there is nothing to profile.
    """
    needed = DECODE_PROMPT + 1 + STEPS
    if "decode" in workload.points and needed > workload.max_model_len:
        raise ConfigError(f"A profile needs max_model_len {needed}, not {workload.max_model_len}.", fix="enlarge it.")
    if not {"decode", "prefill"} & set(workload.points):
        raise ConfigError("Only decode and prefill are profiled, and neither is measured.", fix="add one, or leave it.")


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def profiles(engine: ProfileEngine, workload: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    """(title, profile) of a decode step at each batch, and of the prefill, of those points that the workload has.

    A profile has microseconds by kind of kernel ("kinds"), calls by kind of launch ("launches"), and of the kernels
    that take at least a thousandth of the time, the slowest first, calls and microseconds ("kernels").
    """
    if "decode" in workload.points:
        for batch in workload.batches:
            prompts = [DECODE_PROMPT] * batch
            few, many = (engine(prompts, [tokens] * batch, f"profile {batch}") for tokens in (1, 1 + STEPS))
            yield f"decode {batch}, a step", per_step(few, many, STEPS)
    if "prefill" in workload.points:
        prompts = [workload.prefill_length] * workload.prefill_requests
        yield "prefill", per_step({}, engine(prompts, [1] * len(prompts), "profile prefill"), 1)


def per_step(few: Times, many: Times, steps: int) -> dict[str, Any]:
    """Of one step among those that `many` has more than `few`: what the prompts cost is taken off."""
    mean = {
        name: [(value - start) / steps for value, start in zip(values, few.get(name, (0, 0)), strict=True)]
        for name, values in many.items()
    }
    kernels = {name: values for name, values in mean.items() if many[name][1] > 0}
    by_kind = dict.fromkeys([*KINDS, OTHER], 0.0)
    for name, (_, microseconds) in kernels.items():
        by_kind[kind_of(name)] += microseconds
    launches = {
        kind: sum(calls for name, (calls, _) in mean.items() if name.startswith(beginnings))
        for kind, beginnings in LAUNCHES.items()
    }
    least = sum(by_kind.values()) / 1000
    slowest = sorted(((name, values) for name, values in kernels.items() if values[1] >= least), key=lambda k: -k[1][1])
    return {"kinds": by_kind, "launches": launches, "kernels": {name[:160]: values for name, values in slowest}}


def profile_table(title: str, found: Mapping[str, Mapping[str, Any]]) -> Table:
    """One title's profiles by implementation, with ours less each other one."""
    others = [name for name in found if name != "ours"] if "ours" in found else []
    headings = ["microseconds", *found, *(f"ours - {name}" for name in others)]
    grid = Table(*(Column(text, justify="right" if i else "left") for i, text in enumerate(headings)), title=title)
    rows = {kind: {name: profile["kinds"][kind] for name, profile in found.items()} for kind in [*KINDS, OTHER]}
    rows["all"] = {name: sum(profile["kinds"].values()) for name, profile in found.items()}
    for kind, times in rows.items():
        if any(times.values()):
            differences = (f"{times['ours'] - times[other]:+.1f}" for other in others)
            grid.add_row(kind, *(f"{time:.1f}" for time in times.values()), *differences)
    for kind in LAUNCHES:
        grid.add_row(f"launches: {kind}", *(f"{profile['launches'][kind]:.1f}" for profile in found.values()))
    return grid
