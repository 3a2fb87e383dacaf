"""What `import titan_adapters` costs and offers. In a process of its own: this one has imported far more already."""

import json
import subprocess
import sys

import titan_adapters as ta

LIMIT = 2.5
"""Seconds, torch included; torch alone is about 1.5 of them."""

SCRIPT = """
import json, sys, time
start = time.perf_counter()
import titan_adapters
seconds = time.perf_counter() - start
heavy = [name for name in ("vllm", "transformers", "typer", "hypothesis", "matplotlib") if name in sys.modules]
public = set(vars(titan_adapters))
print(json.dumps([seconds, heavy, sorted(public)]))
"""


def imported() -> tuple[float, list[str], list[str]]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_import_is_light_and_quick():
    """The best of three runs, because the machine may be busy with something else."""
    runs = [imported() for _ in range(3)]
    for _, heavy, public in runs:
        assert heavy == []
        # Those three are imported on first use; all other names are there at once.
        assert set(ta.__all__) - set(public) == {"testing", "verify", "vllm"}
    assert min(seconds for seconds, _, _ in runs) < LIMIT, runs


def test_public_names_are_sorted_and_resolve():
    assert sorted(ta.__all__) == ta.__all__ and len(set(ta.__all__)) == len(ta.__all__)
    for name in set(ta.__all__) - {"vllm"}:  # which needs the engine
        assert getattr(ta, name) is not None
    try:
        ta.no_such_name  # noqa: B018
    except AttributeError as error:
        assert str(error) == "module 'titan_adapters' has no attribute 'no_such_name'"
    else:
        raise AssertionError("an unknown name resolved")
