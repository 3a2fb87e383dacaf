"""The engine on a CUDA GPU: parity with torch, eager and with compilation and CUDA graphs. Skips without a GPU."""

import pytest
import torch

import titan_adapters as ta
from tests.conftest import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none"),
]

LENGTH, NEW = 60, 8
# The last tiny config of each: biases, one kv head, windows. An engine takes 25 s to start on a GPU.
CASES = [
    pytest.param(cls, list(cls.tiny_configs().values())[-1], id=cls.model_type)
    for cls in map(ta.get_model, ("llama", "qwen2", "qwen3"))
]


def engine_and_torch_logprobs(model, folder, **options):
    """Logprobs of a random prompt and of what the engine continues it with; torch's for the same tokens."""
    from vllm import SamplingParams

    ta.save_checkpoint(model, folder / "checkpoint", cast=True)
    llm = ta.vllm.LLM(
        checkpoint=folder / "checkpoint", max_model_len=128, gpu_memory_utilization=0.1, skip_tokenizer_init=True,
        **options,
    )  # fmt: skip
    assert {row.claim for row in ta.vllm.weight_proof(llm, model) if row.verdict != "proven"} == set()
    prompt = torch.randint(model.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, prompt_logprobs=0, detokenize=False)
    output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    continuation = list(output.outputs[0].token_ids)
    steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    tokens = prompt + continuation
    ours = torch.tensor([step[token].logprob for step, token in zip(steps, tokens[1:], strict=True)])
    with torch.no_grad():
        reference = model(torch.tensor(tokens)).float().log_softmax(-1)[:-1]
    return ours, reference.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], reference[LENGTH - 1 :], continuation


NORM = dict(eps=1e-6, scope="per_head", weight=True, after_rope=False)
LLAMA_NORM = ta.QKNormSpec(**NORM, offset=0.0, weight_in_fp32=False)
GEMMA_NORM = ta.QKNormSpec(**NORM, offset=1.0, weight_in_fp32=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [None, LLAMA_NORM, GEMMA_NORM], ids=["no norm", "llama", "gemma"])
@pytest.mark.parametrize(
    ("rotary_dim", "layout"), [(128, "half"), (128, "interleaved"), (64, "half"), (64, "interleaved")]
)
def test_norm_and_rope_kernel(dtype, norm, rotary_dim, layout):
    """Against the torch modules: the same roundings, so at most one step of the dtype where fp32 sums differ."""
    from titan_adapters.nn import NormRope, Rope, make_norm
    from titan_adapters.vllm.norm_rope import EngineNormRope, fusible

    spec = next(iter(ta.get_model("llama").tiny_configs().values())).attention(0)
    rope_spec = ta.RopeSpec(theta=1e4, rotary_dim=rotary_dim, layout=layout, scaling=None)
    spec = spec.model_copy(update={"head_dim": 128, "qk_norm": norm, "rope": rope_spec})
    assert fusible(spec)
    generator = torch.Generator().manual_seed(0)
    rope = Rope(rope_spec, 64).cuda()
    norms = [None, None]
    if norm is not None:
        norms = [make_norm(128, norm) for _ in "qk"]
        for made in norms:
            made.weight.data.normal_(generator=generator)
        norms = [made.cuda().to(dtype) for made in norms]
    for tokens, heads, kv_heads in [(1, 9, 3), (37, 32, 1), (0, 8, 8)]:
        packed = torch.randn(tokens, (heads + 2 * kv_heads) * 128, generator=generator).to("cuda", dtype)
        q, k, _ = packed.split([heads * 128, kv_heads * 128, kv_heads * 128], dim=-1)
        q, k = q.unflatten(-1, (heads, 128)), k.unflatten(-1, (kv_heads, 128))
        positions = torch.randint(64, (tokens,), generator=generator).cuda()
        expected = NormRope(spec)(q, k, positions, *norms, rope)
        actual = EngineNormRope(spec)(q, k, positions, *norms, rope)
        step = torch.finfo(dtype).eps
        for ours, torchs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, torchs, rtol=4 * step, atol=4 * step)


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.mark.parametrize(("cls", "config"), CASES)
def test_fp32_equals_torch(cls, config, tmp_path):
    """Relative 3e-3: vLLM's Triton attention multiplies fp32 in TF32, of 10 mantissa bits. Torch ran on the CPU."""
    ours, reference, steps, continuation = engine_and_torch_logprobs(
        random_model(cls, config), tmp_path, dtype="float32", enforce_eager=True
    )
    assert ((ours - reference).norm() / reference.norm()).item() <= 3e-3
    assert steps.argmax(-1).tolist() == continuation


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
def test_bf16_with_cuda_graphs_is_within_rounding(name, tmp_path):
    """Both sides round to bf16 (8 bits) in every layer; 2e-2 relative is the size of that, a wrong function is O(1)."""
    cls = ta.get_model(name)
    config = next(iter(cls.tiny_configs().values()))
    config = config.model_copy(update={"dtype": "bfloat16"})
    model = random_model(cls, config).bfloat16()
    ours, reference, _, _ = engine_and_torch_logprobs(model, tmp_path)
    assert ((ours - reference).norm() / reference.norm()).item() <= 2e-2


@pytest.mark.parametrize("name", ["OwnRouter", "OwnBlock"])
@pytest.mark.usefixtures("no_registrations_left")
def test_an_authors_own_choice_in_the_fused_kernel(name, tmp_path):
    """In fp32, as above. Triton's kernel multiplies by what it takes for the weights of the chosen experts."""
    from tests.vllm import moe_models

    cls = getattr(moe_models, name)
    ta.register_model(cls)
    model = random_model(cls, cls.config(top_k=3))
    ours, reference, _, _ = engine_and_torch_logprobs(model, tmp_path, dtype="float32", enforce_eager=True)
    assert ((ours - reference).norm() / reference.norm()).item() <= 3e-3
