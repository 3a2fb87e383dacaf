"""Verdicts from scores, and the report: JSON both ways, a table, and a page that stands alone."""

import re

import pytest
import torch
from rich.console import Console

from titan_adapters.verify import Report, Row, StageVerdict, score_logits
from titan_adapters.verify.judge import Judge, Run
from titan_adapters.verify.rules import Noise

VOCABULARY = 11


def scores(noise: float, seed: int, length: int = 60) -> dict:
    """Of one sequence: fixed logits with `noise` upon them."""
    fixed = torch.Generator().manual_seed(0)
    tokens = tuple(torch.randint(VOCABULARY, (length,), generator=fixed).tolist())
    logits = 3 * torch.randn(length, VOCABULARY, generator=fixed)
    logits += noise * torch.randn(length, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return {tokens: score_logits(tokens, logits)}


@pytest.fixture
def judge() -> Judge:
    return Judge(scores(0.01, seed=1), scores(0.0, seed=1))


def outputs(noise: float, seed: int = 2) -> list:
    return list(scores(noise, seed).values())


def test_rounding_is_proven_and_more_fails(judge):
    row = judge.row("whole prompt", "served", Run(outputs(0.01), how="1 prompt"))
    assert row.verdict == "proven" and row.why.startswith("1 prompt: 59 tokens differ by 0.0")
    assert row.figures["best tokens compared"] == row.figures["tokens"] == 59
    row = judge.row("whole prompt", "served", Run(outputs(0.04), how="1 prompt"))
    assert row.verdict == "failed" and "in the mean, rounding would be at most" in row.why


def test_one_wrong_token_fails_although_the_mean_does_not(judge):
    found = outputs(0.0)
    found[0].logprobs[17] -= 0.3
    row = judge.row("whole prompt", "served", Run(found))
    assert row.verdict == "failed" and "(prompt 0, token 18)" in row.why and "mean" not in row.why


def test_a_few_tokens_may_have_one_that_rounding_throws_far():
    """As another expert does. The yardstick has seen one, elsewhere: of so few tokens, it is most of the mean."""
    reference, yardstick = scores(0.0, seed=1), scores(0.01, seed=1)
    for scored in yardstick.values():
        scored.logprobs[40] -= 3
    judge = Judge(yardstick, reference)
    assert 0.05 < judge.noise.mean < 0.07
    few = outputs(0.01)[0].between(48, 60)
    few.logprobs[5] -= 3  # 0.25 in the mean; 2 * 0.06 + 3 / 12 may be
    assert judge.row("token counts", "served", Run([few])).verdict == "proven"
    few.logprobs[7] -= 3
    row = judge.row("token counts", "served", Run([few]))
    assert row.verdict == "failed" and row.why.startswith("logprobs differ by 0.5")


def test_a_counterpart_must_agree_too(judge):
    row = judge.row("mixed batch", "served", Run(outputs(0.01), outputs(0.01, seed=3)))
    assert row.verdict == "proven" and 0 < row.figures["mean between the runs"] < 0.03
    row = judge.row("mixed batch", "served", Run(outputs(0.01), outputs(0.1, seed=3)))
    assert row.verdict == "failed" and row.why.startswith("between the two runs: ")


def test_what_did_not_happen_is_not_proven_and_what_broke_failed(judge):
    row = judge.row("prefix-cache hit", "served", Run(missing="it is off"))
    assert (row.verdict, row.why) == ("not proven", "it is off")
    row = judge.row("prefix-cache hit", "served", Run(failure="RuntimeError: x"))
    assert (row.verdict, row.why) == ("failed", "the engine broke with RuntimeError: x")
    assert judge.row("whole prompt", "served", Run()).why == "nothing was compared"


def test_another_implementation_is_compared_without_rounding(judge):
    assert judge.exactly("transformers", outputs(0.0)).verdict == "proven"
    assert judge.exactly("transformers", outputs(0.01)).verdict == "failed"


def test_noise_of_equal_scores_still_allows_the_steps_of_fp32():
    noise = Noise.of(outputs(0.0), outputs(0.0))
    assert noise.allowed_max > 0 and noise.allowed_mean(noise, 59) > 0


@pytest.fixture
def report(judge) -> Report:
    found = outputs(0.01)
    return Report(
        headline="layers.1.attention (attention) gives another function <&>",
        rows=[
            judge.row("whole prompt", "served", Run(found, how="one prompt")),
            Row(name="mixed batch", verdict="failed", why="a < b & c", engine="served"),
            Row(name="prefix-cache hit", verdict="not proven", why="it is off", engine="served"),
        ],
        stages=[
            StageVerdict("tok_embeddings", None, "embedding", 0.0, 1e-3, 5, "equal", ""),
            StageVerdict("layers.1.attention", 1, "attention", 0.3, 1e-3, 5, "wrong", "0.3"),
            StageVerdict("lm_head", None, "head", float("inf"), 0.0, -1, "not proven", "not recorded"),
        ],
        checkpoint="a folder",
        model="package:Model",
        command="titan-adapters verify 'a folder'",
        when="2026-01-01T00:00:00+00:00",
        versions={"torch": "2"},
        platform={"device": "cpu"},
        engines={"served": {"dtype": "bfloat16"}, "small": {"dtype": "bfloat16", "block_size": "32"}},
        prompts="1 prompt",
        rules="rules",
        seconds={"start": 1.5, "run": 2.0},
        points=judge.against_torch(found).points,
        noise=judge.differences(found),
    )


def test_json_both_ways(report, tmp_path):
    report.save(tmp_path)
    assert Report.load(tmp_path / "report.json") == report
    assert report.failed and report.summary() == "1 proven, 1 failed, 1 not proven; 4 s"
    assert report.row("mixed batch").why == "a < b & c"


def test_table_has_every_row(report):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report)
    text = console.export_text()
    for part in ("whole prompt", "a < b & c", "it is off", "package:Model", report.headline[:40]):
        assert part in text


def test_page_is_self_contained_and_complete(report, tmp_path):
    pytest.importorskip("matplotlib")
    page = report.save(tmp_path)[1].read_text()
    for row in report.rows:
        assert f"<th>{row.name}</th>" in page
    for part in ("a &lt; b &amp; c", "another function &lt;&amp;&gt;", "bfloat16", "layers.1.attention</th>", "rules"):
        assert part in page
    assert page.count("<svg") == 3
    assert not re.search(r"https?://|<script|<link|@import|src=", page)
    assert set(re.findall(r'href="(.)', page)) <= {"#"}
    assert not re.search(r"#0[1-5]0[1-5]0[1-5]", page), "a stand-in for a colour was left"
