"""docs/performance.md says what benchmarks/results hold, and tuned tiles are what vLLM reads."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import load_script

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))
TUNED = sorted((ROOT / "titan_adapters/vllm/tuned").glob("*.json"))


def test_tables_are_those_of_the_results():
    tables = load_script(ROOT / "benchmarks/tables.py")
    text = tables.DOCUMENT.read_text()
    assert len(tables.TABLE.findall(text)) >= 4
    assert tables.rewritten(text) == text, "run python benchmarks/tables.py"
    assert tables.rewritten(text.replace("| 1.0", "| 9.0")) == text  # a wrong figure does not stay


def test_every_result_is_named_in_the_document():
    text = (ROOT / "docs/performance.md").read_text()
    assert [path.name for path in RESULTS if path.stem not in text] == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_what_ran_where_and_name_no_folder(path):
    text = path.read_text()
    assert not re.search(r'"[^"]*(/tmp|/home|/root|/work|/opt|/dev)/', text)
    data = json.loads(text)
    if isinstance(data, dict):
        assert data["machine"]["torch"] and {"gpu", "cpu", "device"} & set(data["machine"])


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.stem)
def test_tuned_tiles_are_ones_that_were_measured(path):
    """By the name that vLLM looks for; Triton would refuse tiles that don't fit shared memory at the first forward."""
    tune = load_script(ROOT / "benchmarks/tune_experts.py")
    assert re.fullmatch(r"E=\d+,N=\d+,device_name=\w+", path.stem)
    data = {int(tokens): tiles for tokens, tiles in json.loads(path.read_text()).items()}
    assert set(data) == set(tune.TOKENS)
    for tokens, tiles in data.items():
        assert tiles in list(tune.candidates(tokens))
        assert 2 * tiles["num_stages"] * (tiles["BLOCK_SIZE_M"] + tiles["BLOCK_SIZE_N"]) * tiles["BLOCK_SIZE_K"] < 2**18
