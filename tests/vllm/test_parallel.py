"""Engines over two real processes compute what the torch model computes in one."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, titan_error_text
from tests.verify.faults import RANK_FAULTS
from tests.vllm.conftest import ROOT, child_environment
from tests.vllm.conftest import TINY as TINY_ENGINE
from tests.vllm.models import TINY, FreeAttention, Llama, ReplicatedOutput, Skipping
from tests.vllm.moe_models import Mixture
from tests.vllm.parallel_cases import GROUPS, MIXTURES
from tests.vllm.test_processes import assert_computed_by, run
from tests.vllm.test_proof import CLAIMS
from titan_adapters.contract import meta_model
from titan_adapters.vllm import engine_args, parallel, wrapper
from titan_adapters.vllm.parallel import Parallel, plan_problems, share_cores

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]

TOLERANCE = 1e-5  # measured: 1.5e-7 to 7e-7


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Any:
    """`results(group)`: what the ranks of `tests.vllm.ranks` found out, by case; each group runs once."""
    found: dict[str, dict[str, Any]] = {}

    def of(group: str) -> dict[str, Any]:
        if group not in found:
            folder = tmp_path_factory.mktemp(group)
            for case in GROUPS[group]:
                ta.save_checkpoint(case.model(), folder / case.name)
            found[group] = run_ranks(group, folder)
        return found[group]

    return of


def run_ranks(group: str, folder: Any) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", group[-1]]
    environment = child_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "tests.vllm.ranks", group, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    return {line["name"]: line for line in lines}


SLOW = pytest.mark.skipif("TITAN_SLOW_TESTS" not in os.environ, reason="four processes; set TITAN_SLOW_TESTS=1")
EVERY_CASE = [
    pytest.param(group, case.name, id=f"{group}: {case.name}", marks=SLOW if group == "tp4" else ())
    for group, cases in GROUPS.items()
    for case in cases
]


@pytest.mark.parametrize(("group", "name"), EVERY_CASE)
def test_logprobs_and_greedy_tokens_equal_one_process(results, group, name):
    result = results(group)[name]
    assert result.get("failure") is None
    assert result["error"] < TOLERANCE
    if name.endswith("updated"):
        assert max(result["extra"]) < TOLERANCE


@pytest.mark.parametrize(("group", "name"), EVERY_CASE)
def test_the_weights_of_all_ranks_are_the_models(results, group, name):
    """After the updates, where there are any."""
    assert results(group)[name]["claims"] == {claim: ["proven", []] for claim in CLAIMS}


def test_faults_over_ranks_are_found_where_they_are(results):
    found = results("tp2")["llama"]["extra"]
    assert found.pop("") == [None, {}]
    assert found.keys() == {fault.name for fault in RANK_FAULTS}
    for fault in RANK_FAULTS:
        names = {claim: list(fault.names) for claim in fault.claims}
        assert found[fault.name] == [[fault.path, fault.kind], names]


# ----- what each rank has, by hand


def shapes(results, group: str, name: str, prefix: str = "") -> list[dict[str, tuple[int, ...]]]:
    return [
        {path.removeprefix(prefix): tuple(shape) for path, shape in rank.items() if path.startswith(prefix)}
        for rank in results(group)[name]["shapes"]
    ]


def test_each_rank_has_its_heads_channels_and_words(results):
    attention = {"attention.qkv_linear.packed.weight": ((3 + 1 + 1) * 32, 48), "attention.wo.weight": (48, 3 * 32)}
    mlp = {"feed_forward.w13.weight": (2 * 40, 48), "feed_forward.w2.weight": (48, 40)}
    norms = {"attention_norm.weight": (48,), "ffn_norm.weight": (48,)}
    assert shapes(results, "tp2", "llama", "layers.0.") == 2 * [attention | mlp | norms]
    words = {"tok_embeddings.weight": (96, 48), "lm_head.head.weight": (96, 48)}  # 131 are padded to 192
    for rank in shapes(results, "tp2", "llama"):
        assert {name: shape for name, shape in rank.items() if shape == (96, 48)} == words


def test_norms_over_all_heads_are_sharded_like_them(results):
    prefix = "layers.0.attention."
    two_kv, one_kv = (
        shapes(results, "tp2", f"olmo2{what}", prefix) for what in ("", ", one kv head, updated")
    )  # four heads of 32 channels, of which a rank has two
    assert {rank["q_norm.weight"] for rank in two_kv + one_kv} == {(64,)}
    assert {rank["k_norm.weight"] for rank in two_kv + one_kv} == {(32,)}


def test_kv_heads_fewer_than_ranks_are_replicated(results):
    packed = "layers.0.attention.qkv_linear.packed.weight"  # two of four query heads, and the one key and value head
    assert {rank[packed] for rank in shapes(results, "tp2", "qwen3, one kv head")} == {((2 + 1 + 1) * 32, 96)}
    for rank in shapes(results, "tp2", "separate projections, one kv head, updated", "layers.0.attention."):
        assert (rank["qkv_linear.wk.weight"], rank["qkv_linear.wv.weight"]) == ((32, 48), (24, 48))
        assert (rank["inner_attention.sinks"], rank["wg.weight"]) == ((3,), (3, 48))


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_split_by_width_or_distributed_whole(results, name):
    fused, torch, whole = (
        shapes(results, "tp2", f"{name} experts, {how}", "layers.1.moe.") for how in ("fused", "torch", "whole")
    )
    for rank in fused:
        assert rank["runner.routed_experts.w13_weight"] == (6, 2 * 32, 64)
        assert rank["runner.routed_experts.w2_weight"] == (6, 64, 32)
    assert {rank["experts.local.w1"] for rank in torch} == {(6, 32, 64)}
    assert {rank["experts.local.w2"] for rank in torch} == {(6, 64, 32)}
    assert {rank["experts.local.w1"] for rank in whole} == {rank["experts.local.w2"] for rank in whole} == {(3, 64, 64)}


@pytest.mark.parametrize("how", ["fused", "whole"])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_rank_records_the_routing(results, name, how):
    layers = {"1": True} if name == "plain" else {"0": True, "1": True}
    assert results("tp2")[f"{name} experts, {how}"]["extra"] == [layers, layers]


def test_each_stage_records_the_routing_of_its_layers(results):
    assert results("pp2")["mixture"]["extra"] == [{"0": True}, {"1": True}]


def test_each_stage_has_its_layers(results):
    def parts(name: str) -> list[set[str]]:
        return [{".".join(p.split(".")[:2]) for p in rank} for rank in shapes(results, "pp2", name)]

    head, words = "lm_head.head", "tok_embeddings.weight"
    # Three layers; vLLM gives the odd one to the first stage, because the last has the head.
    assert parts("llama") == [{words, "layers.0", "layers.1"}, {"layers.2", "norm.weight", head}]
    # A tied head is the embedding's own parameter.
    assert parts("llama, tied") == [{words, "layers.0", "layers.1"}, {words, "layers.2", "norm.weight"}]


# ----- vLLM's own executors


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_processes_that_vllm_starts(tmp_path, size):
    model = random_model(Llama, TINY)
    ta.save_checkpoint(model, tmp_path / "checkpoint")
    options = json.dumps({size: 2})
    # With a cache of a given size, an eager engine on the CPU is not warmed up by vLLM.
    result = run("parallel", tmp_path / "checkpoint", options, VLLM_CPU_KVCACHE_SPACE="1")
    assert_computed_by(model, result["logprobs"])
    assert not ta.fingerprint_differences(result["fingerprint"], ta.fingerprint(model))


def test_replicas(tmp_path):
    model = random_model(Llama, TINY)
    ta.save_checkpoint(model, tmp_path / "checkpoint")
    result = run("replicas", tmp_path / "checkpoint", VLLM_CPU_KVCACHE_SPACE="1")
    assert_computed_by(model, result["logprobs"])


# ----- refusals


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ta.TitanError) as caught:
        call(*args, **kwargs)
    return titan_error_text(caught)


def sizes_refused(cls, config, **options) -> str:
    return refusal(engine_args, cls, config, load_format="dummy", **options)


def test_sizes_are_refused_with_the_legal_ones():
    text = sizes_refused(Llama, TINY, tensor_parallel_size=4, pipeline_parallel_size=4)
    assert "num_heads 6 of layers [0, 1, 2] is not divisible by tensor_parallel_size 4; legal sizes: 1, 2\n" in text
    assert "num_layers 3 can't be split into pipeline_parallel_size 4 stages; legal sizes: 1 to 3" in text
    four = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
    text = sizes_refused(Mixture, MIXTURES["plain"], **four)
    assert "num_experts 6 of layers [1] is not divisible by 4 expert-parallel ranks; legal sizes: 1, 2, 3, 6" in text
    assert "data_parallel_size 2 with mixtures of experts" in text


def test_sizes_are_refused_by_the_workers_too(tmp_path, monkeypatch):
    """Whatever started them. Only the sizes are pretended here."""
    ta.save_checkpoint(random_model(Llama, TINY), tmp_path / "checkpoint")
    pretended = Parallel.from_arguments({"tensor_parallel_size": 3})
    monkeypatch.setattr(Parallel, "from_vllm", lambda _: pretended)
    monkeypatch.setattr(wrapper, "swap_modules", None)
    text = refusal(ta.vllm.LLM, checkpoint=tmp_path / "checkpoint", **TINY_ENGINE)
    assert "hidden_dim 80 of layers [0, 1, 2] is not divisible by tensor_parallel_size 3; legal sizes: 1, 2" in text


def test_tokens_are_not_split_at_inference():
    text = sizes_refused(Llama, TINY, tensor_parallel_size=2, decode_context_parallel_size=2)
    assert "context parallelism over 2 ranks" in text
    passes = {"pass_config": {"enable_sp": True}}
    assert "sequence parallelism" in sizes_refused(Llama, TINY, tensor_parallel_size=2, compilation_config=passes)


def test_a_layer_loop_of_its_own_is_not_split():
    text = sizes_refused(Skipping, TINY, pipeline_parallel_size=2)
    assert "pipeline_parallel_size 2: Skipping overrides run_layers" in text
    engine_args(Skipping, TINY, load_format="dummy", tensor_parallel_size=2)


def test_replicas_need_another_front_end():
    text = refusal(ta.vllm.LLM, Llama, TINY, load_format="dummy", data_parallel_size=2)
    assert "vllm.LLM runs one replica" in text and "--data-parallel-size" in text and "AsyncLLM" in text


def test_a_plan_whose_rows_contradict_each_other():
    model = meta_model(ReplicatedOutput, TINY)
    styles = ReplicatedOutput.parallel_plan(TINY).resolve(model)
    assert plan_problems(model, styles, 1) == []
    attention = [f"layers.{layer}.attention" for layer in range(3)]
    needed = "is needed: each rank's attention has its own heads"
    assert sorted(plan_problems(model, styles, 2)) == sorted(
        [f"{path}.qkv_linear.wv is planned replicate, colwise {needed}" for path in attention]
        + [f"{path}.wo is planned replicate, rowwise {needed}" for path in attention]
    )
    model = meta_model(FreeAttention, FreeAttention.config({"sinks": True}))
    planned = ta.decoder_plan(model.config).rows
    changed = {
        "layers.*.attention.inner_attention": ta.replicate,
        "layers.*.feed_forward.w3": ta.replicate,
        "lm_head": ta.colwise,
    }
    problems = plan_problems(model, ta.ParallelPlan(planned | changed).resolve(model), 2)
    assert [problem.split(":")[0] for problem in problems] == [
        "layers.0.attention.inner_attention is planned replicate, headwise is needed",
        "layers.0.feed_forward.w3 is planned replicate, colwise is needed",
        "lm_head is planned colwise; logits are needed whole",
    ]
    whole = {f"layers.*.feed_forward.w{i}": ta.replicate for i in (1, 2, 3)}
    assert plan_problems(model, ta.ParallelPlan(planned | whole).resolve(model), 2) == []


def test_cores_are_shared_unless_the_user_says_how(monkeypatch):
    two, one = (Parallel.from_arguments({"tensor_parallel_size": size}) for size in (2, 1))
    monkeypatch.setattr(parallel, "_set_by_us", None)
    monkeypatch.setattr(parallel, "NODES", ROOT / "nowhere")
    monkeypatch.setattr(parallel, "_first_sibling", lambda core: core // 2 * 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.delenv(parallel.THREADS, raising=False)
    share_cores(two)
    assert os.environ[parallel.THREADS] == "0,2|4,6"
    share_cores(one)  # what was set for the engine before does not fit this one
    assert parallel.THREADS not in os.environ
    monkeypatch.setenv(parallel.THREADS, "0|1")
    share_cores(two)
    assert os.environ[parallel.THREADS] == "0|1"
