"""What the README says is true: its table is what the suite finds, and its example runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import titan_adapters as ta
from tests.conftest import INSTALLED
from tests.verify.faults import markdown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def code(title: str) -> str:
    """The Python block that starts with the comment `# title`."""
    return re.search(rf"```python\n(# {re.escape(title)}\n.*?)```", README, re.DOTALL).group(1)


def table(name: str) -> str:
    """The table between the two comments that name it."""
    return re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", README, re.DOTALL).group(1)


def test_field_table_is_current():
    assert table("fields") == ta.testing.field_table(), "run `titan-adapters check --fields` and paste its output"


def test_field_table_needs_no_vllm():
    script = "import sys; sys.modules['vllm'] = None; import titan_adapters as ta; "
    script += "print(ta.testing.field_table(), end='')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == ta.testing.field_table(), done.stderr


def test_capability_table_is_current():
    found = ta.testing.capability_table({name: ta.testing.check_model(name) for name in INSTALLED})
    assert table("capabilities") == found, "run `titan-adapters check --all --markdown` and paste its output"


def test_fault_table_is_current():
    found = markdown()
    assert (ROOT / "docs" / "faults.md").read_text() == found, "run `python -m tests.verify.faults > docs/faults.md`"
    num_faults = sum(line.startswith("| ") for line in found.splitlines()) - 3 * 2
    assert f"{num_faults} seeded faults" in README


@pytest.mark.engine
def test_own_model_runs(tmp_path):
    """The example as a user would run it: two files, one command, an engine in a process of its own."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    (tmp_path / "my_model.py").write_text(code("my_model.py"))
    (tmp_path / "serve.py").write_text(code("serve.py"))
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    run = subprocess.run(
        [sys.executable, "serve.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stderr[-3000:]
    tokens = re.search(r"^\[(\d+(?:, \d+)*)\]$", run.stdout, re.MULTILINE)
    assert tokens and len(tokens.group(1).split(",")) == 16, run.stdout[-2000:]
