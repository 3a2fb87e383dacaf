"""The benchmark without engines: what is asked, in which order, and what is made of the answers."""

import importlib.util
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import titan_adapters as ta
from titan_adapters.bench import growth, plot, profile, report, run
from titan_adapters.bench.engine import EngineFailed
from titan_adapters.bench.shapes import SHAPES, random_checkpoint, scaled
from titan_adapters.bench.workload import POINTS, Workload
from titan_adapters.cli import app
from titan_adapters.errors import ConfigError

WORKLOAD = Workload(
    points=POINTS, batches=(1, 4), decode_tokens=8, prefill_requests=2, prefill_length=10, mixed_requests=5,
    long_requests=2, long_lengths=(50, 100), long_tokens=5, max_model_len=64,
)  # fmt: skip


def test_ratios_and_noise_by_hand():
    samples = {
        "native": {"decode 1 tok/s": [100.0, 98.0, 102.0], "start s": [2.0], "only here tok/s": [1.0]},
        "ours": {"decode 1 tok/s": [95.0, 96.5, 90.0], "start s": [2.5]},
    }
    found = report.ratios(samples)["native"]
    assert found == {
        "decode 1 tok/s": report.Ratio(0.95, 0.04, short=True),
        "start s": report.Ratio(0.8, None, short=None),  # one run has no noise, and so no verdict
    }
    assert report.ratio([96.0], [100.0, 98.0, 102.0], higher=True).short is False  # within the noise
    assert report.ratio([1.0], [2.0, 2.0], higher=False) == report.Ratio(2.0, 0.0, short=False)


def test_growth_by_hand():
    per_layer = {n: {"ours": {"prefill tok/s": 1 / (3 * n), "start s": 9.0}} for n in (2, 4, 8)}
    curve = growth.curves("layers", per_layer)["prefill tok/s"]["ours"]
    assert curve["sizes"] == (2, 4, 8) and curve["seconds per token"] == pytest.approx((6, 12, 24))
    assert (curve["exponent"], curve["slope"], curve["intercept"]) == pytest.approx((1, 3, 0), abs=1e-9)
    one_run = {0: {"native": {"decode 1 tok/s": 10.0, "decode 4 tok/s": 20.0, "mixed tok/s": 5.0}}}
    curves = growth.curves("batch", one_run)
    assert list(curves) == ["decode N tok/s"]
    assert curves["decode N tok/s"]["native"]["exponent"] == pytest.approx(-0.5)  # half the time at four times the size


def test_what_is_asked():
    asked = []

    def seconds(prompts, outputs):
        asked.append((prompts, outputs))
        return 0.5 if set(outputs) == {1} else 2.0

    rates = {}
    for measure in WORKLOAD.measurements().values():
        rates |= measure(seconds)
    mixed_prompts, mixed_outputs = asked[3]
    assert asked[:3] == [([10, 10], [1, 1]), ([16], [8]), ([16] * 4, [8] * 4)]
    assert asked[4:] == [([50, 50], [1, 1]), ([50, 50], [5, 5])]  # prompts of 100 don't fit
    assert len(set(mixed_prompts)) > 2 and max(mixed_prompts) <= 56 and max(mixed_outputs) <= 8
    assert rates == {
        "prefill tok/s": 40,
        "decode 1 tok/s": 4,
        "decode 4 tok/s": 16,
        "mixed tok/s": (sum(mixed_prompts) + sum(mixed_outputs)) / 2,
        "prefill of 50 tok/s": 200,
        "decode after 50 tok/s": pytest.approx(2 * 4 / 1.5),
    }
    asked.clear()
    WORKLOAD.measurements()["mixed"](seconds)
    assert asked == [(mixed_prompts, mixed_outputs)]


def test_requests_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"fit max_model_len 64\.\n  - decode needs 80\n  - mixed needs 65\nFix:"):
        Workload(**(vars(WORKLOAD) | {"decode_tokens": 64}))


READY = {"start s": 1.0, "machine": {"gpu": "none"}, "class": "Fake", "graphs": "compiled"}


class FakeEngine:
    """Answers at once; the Transformers backend ends in the second measured round, or does not start."""

    calls: list[str] = []  # noqa: RUF012
    dies = True

    def __init__(self, implementation, folder, options, log, environment):
        self.name = implementation
        self.calls.append(f"start {self.name}")

    def ready(self):
        return dict(READY)

    def seconds(self, prompts, outputs, seed):
        self.calls.append(f"{seed} {self.name}")
        if self.name == "transformers" and self.dies and seed == "2 prefill":
            raise EngineFailed("ended with SIGKILL: out of memory")
        return 1.0

    def profile(self, prompts, outputs, seed):
        self.calls.append(f"{seed} {outputs[0]} {self.name}")
        steps = outputs[0] * len(outputs)  # of prefill, one
        return {"nvjet_gemm": [steps, 3.0 * steps], "cudaGraphLaunch": [steps, 0.0], "Memcpy": [5, 7.0]}

    def memory(self):
        return {"host peak GiB": 2.0}

    def close(self, patience=0.0):
        self.calls.append(f"close {self.name}")


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(run, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "calls", [])
    return lambda: FakeEngine.calls


def execute(tmp_path: Path, names: list[str], **changes) -> run.Results:
    settings = dict(workload=WORKLOAD, repeats=2, start_repeats=0, concurrent_start=False, profile=False, logs=tmp_path)
    settings |= {"folders": dict.fromkeys(names, tmp_path), "options": {}} | changes
    return run.Run(run.Settings(**settings), lambda text: None, lambda results: None).execute()


def test_rounds_are_interleaved_and_a_failure_is_left_out(calls, tmp_path):
    points = {"points": ("start", "prefill", "memory")}
    results = execute(tmp_path, ["native", "transformers", "ours"], workload=Workload(**(vars(WORKLOAD) | points)))
    assert calls() == [
        *("start native", "start transformers", "start ours"),
        *("0 prefill native", "0 prefill transformers", "0 prefill ours"),
        *("1 prefill transformers", "1 prefill ours", "1 prefill native"),
        *("2 prefill ours", "2 prefill native", "2 prefill transformers", "close transformers"),
        *("close native", "close ours"),
    ]
    both = {"start s": [1.0], "prefill tok/s": [20.0, 20.0], "host peak GiB": [2.0]}
    assert results.samples == {
        "native": both,
        "transformers": {"start s": [1.0], "prefill tok/s": [20.0]},
        "ours": both,
    }
    assert results.failed == {"transformers": "ended with SIGKILL: out of memory"}
    console = Console(width=150)
    with console.capture() as printed:
        console.print(report.table(results))
    assert "ended with SIGKILL: out of memory" in printed.get() and "Fake" in printed.get()


def test_profiles_are_of_one_step(calls, tmp_path):
    workload = Workload(**(vars(WORKLOAD) | {"points": ("decode", "prefill"), "batches": (4,)}))
    results = execute(tmp_path, ["native", "ours"], repeats=1, profile=True, workload=workload)
    asked = ["profile 4 1", "profile 4 33", "profile prefill 1"]
    assert [call for call in calls() if "profile" in call] == [f"{a} {n}" for n in ("native", "ours") for a in asked]
    assert list(results.profiles) == ["decode 4, a step", "prefill"]
    step, prefill = (results.profiles[title]["ours"] for title in results.profiles)
    # The copies, as many with one token as with 33, are no part of a step.
    assert step["kernels"] == {"nvjet_gemm": [4, 12]} and step["launches"]["graphs"] == 4
    assert {kind: us for kind, us in step["kinds"].items() if us} == {"matrix products": 12}
    assert {kind: us for kind, us in prefill["kinds"].items() if us} == {"matrix products": 6, "copies": 7}
    console = Console(width=150)
    with console.capture() as printed:
        console.print(profile.profile_table("prefill", results.profiles["prefill"]))
    assert "ours - native" in printed.get() and "+0.0" in printed.get()


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"max_model_len": 48, "points": ("decode",)}, "needs max_model_len 49, not 48"),
        ({"points": ("memory",)}, "neither is measured"),
    ],
)
def test_profiles_that_can_not_be_made_are_refused(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        profile.check_profiling(Workload(**(vars(WORKLOAD) | {"long_lengths": (8,)} | changes)))


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norms, activations, additions"),
        ("triton_poi_fused__to_copy_moe_forward_1", "norms, activations, additions"),
        ("_norm_rope_kernel", "qk norm and rope"),
        ("void vllm::moe::topkGating<8, 32, 4, 16, 32, int, __nv_bfloat16>", "experts and their routing"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "communication"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "matrix products"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "kv cache write"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<>>", "attention"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert profile.kind_of(kernel) == kind


def test_start_repeats_are_interleaved_and_cold_ones_kept_apart(calls, tmp_path):
    results = execute(
        tmp_path, ["native", "ours"], start_repeats=3, workload=Workload(**(vars(WORKLOAD) | {"points": ("start",)}))
    )
    assert calls() == ["start native", "close native", "start ours", "close ours"] * 3
    assert results.samples["ours"] == {"cold start s": [1.0], "start s": [1.0, 1.0]}


def test_engines_are_closed_when_the_run_is_interrupted(calls, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "memory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, ["native", "ours"])
    assert calls()[-2:] == ["close native", "close ours"]


@pytest.mark.parametrize("failing, code", [("ours", 1), ("transformers", 0)])
def test_command_fails_if_ours_does(calls, tmp_path, monkeypatch, failing, code):
    def ready(engine):
        if engine.name == failing:
            raise EngineFailed("refused")
        return dict(READY)

    monkeypatch.setattr(FakeEngine, "dies", False)
    monkeypatch.setattr(FakeEngine, "ready", ready)
    arguments = ["bench", "--shape", "tiny", "--output", str(tmp_path / "out.json"), "--logs", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "out.png")])
    assert result.exit_code == code, result.output
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["failed"] == {failing: "refused"} and data["machine"]["gpu"] == "none"
    assert data["graphs"] == {name: ["compiled"] for name in data["classes"]} and len(data["graphs"]) == 2
    assert data["options"]["repeats"] == 3 and data["engine"]["load_format"] == "dummy"
    assert f"{failing} failed: refused" in result.output and f"{failing}.log" in result.output
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_growth_runs_every_size(calls, tmp_path):
    arguments = ["bench", "--shape", "tiny", "--growth", "layers", "--factor", "1", "--factor", "2", "--only", "ours"]
    arguments += ["--point", "prefill", "--output", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    result = CliRunner().invoke(app, [*arguments, "--logs", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out.json").read_text())
    assert list(data["runs"]) == ["2", "4"] and calls().count("start ours") == 2
    assert data["curves"]["prefill tok/s"]["ours"]["sizes"] == [2, 4]
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_plot_needs_matplotlib_before_anything_starts(calls, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs matplotlib, which is not installed\.\nFix: pip install"):
        plot.check_plotting()


def test_shapes_are_those_of_the_published_models():
    """Parameters as their model cards count them, without a head that is tied."""
    published = {
        "qwen3-0.6b": 596_049_920,
        "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360,
        "llama3-8b": 8_030_261_248,
        "qwen3-30b-a3b": 30_532_122_624,
        "gemma3-4b": 3_880_263_168,  # of 4,300,079,472, the rest being the vision tower
        "gpt-oss-20b": 20_914_757_184,
    }
    for name, shape in SHAPES.items():
        cls, config = ta.read_hf_config(shape)
        model = ta.contract.meta_model(cls, config)
        if name in published:
            assert sum(parameter.numel() for parameter in model.parameters()) == published[name], name


def test_vllm_serves_the_shapes_itself():
    registry = pytest.importorskip("vllm.model_executor.models.registry", exc_type=ImportError)
    known = registry.ModelRegistry.get_supported_archs()
    assert {shape["architectures"][0] for shape in SHAPES.values()} <= set(known)


def test_scaled_shapes():
    tiny = SHAPES["tiny"]
    assert ta.read_hf_config(scaled(tiny, layers=2))[1].num_layers == 4
    wide = scaled(tiny, dim=2)
    assert (wide["hidden_size"], wide["num_attention_heads"], wide["head_dim"]) == (128, 8, 32)
    assert wide["vocab_size"] == tiny["vocab_size"]
    with pytest.raises(ConfigError, match=r"num_key_value_heads 2 becomes 0\.5"):
        scaled(tiny, dim=0.25)


def test_random_checkpoint_is_kept(tmp_path):
    folder = random_checkpoint(SHAPES["tiny"], tmp_path / "weights")
    before = (folder / "config.json").stat().st_mtime_ns
    assert random_checkpoint(SHAPES["tiny"], folder) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert str(next(iter(ta.load_model(folder).parameters())).dtype) == "torch.bfloat16"
    with pytest.raises(ConfigError, match="holds another shape"):
        random_checkpoint(scaled(SHAPES["tiny"], layers=2), folder)
