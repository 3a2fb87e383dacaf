"""`titan-adapters new`: what it writes passes the contract suite at once, in a repository that is not this one."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import titan_adapters as ta
from tests.conftest import titan_error_text
from titan_adapters.cli import app
from titan_adapters.scaffold import Template, new_model

ROOT = Path(__file__).parents[1]


def in_folder(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_what_it_writes_passes_pytest_and_ruff(tmp_path):
    """Both templates in one run of pytest, because importing torch takes most of the time."""
    for like in Template:
        done = CliRunner().invoke(app, ["new", f"my_{like}_2", "--like", like, "--directory", str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert f"titan-adapters check my_{like}_2:My{like.capitalize()}2" in done.output
        assert len((tmp_path / f"my_{like}_2.py").read_text().splitlines()) < 100
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "my_llama_2.py", "my_moe_2.py", "test_my_llama_2.py", "test_my_moe_2.py"
    ]  # fmt: skip
    assert not [path for path in tmp_path.iterdir() if "my_model" in path.read_text() or "MyModel" in path.read_text()]
    out = in_folder(tmp_path, "-m", "pytest", "-v", "-p", "no:cacheprovider")
    for item in (
        "test_my_llama_2.py::test_my_llama_2[reach - square, first layer windowed] PASSED",
        "test_my_moe_2.py::test_my_moe_2[geometry] PASSED",
        "test_my_moe_2.py::test_my_moe_2[hard_router_logits - one of three experts] PASSED",
    ):
        assert item in out
    in_folder(tmp_path, "-m", "ruff", "check", "--isolated", "--line-length", "120", "--select", "E,F,I,UP,B,RUF", ".")
    in_folder(tmp_path, "-m", "ruff", "format", "--isolated", "--line-length", "120", "--check", ".")


def test_existing_files_are_left_alone(tmp_path):
    for name in ("taken.py", "test_taken.py"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(ta.TitanError) as caught:
        new_model("taken", Template.llama, tmp_path)
    assert titan_error_text(caught) == (
        "Can't start a model 'taken'.\n"
        f"  - {tmp_path}/taken.py exists\n  - {tmp_path}/test_taken.py exists\n"
        "Fix: give another NAME or --directory."
    )
    (tmp_path / "taken.py").unlink()
    with pytest.raises(ta.TitanError, match=r"test_taken\.py exists"):
        new_model("taken", Template.llama, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_taken.py"]


@pytest.mark.parametrize("name", ["my-model", "2fast", "class", "MyModel", "a.b", "../up", ""])
def test_names_that_no_module_can_have(tmp_path, name):
    with pytest.raises(ta.TitanError, match="can't name a module"):
        new_model(name, Template.llama, tmp_path)
    assert not list(tmp_path.iterdir())


def test_templates_are_packaged():
    """They are modules of a package that is installed like all others; no package data to forget."""
    listed = (ROOT / "pyproject.toml").read_text()
    assert '"titan_adapters.templates"' in listed
    folders = {f"titan_adapters.{path.parent.name}" for path in (ROOT / "titan_adapters").glob("*/__init__.py")}
    assert not {folder for folder in folders if f'"{folder}"' not in listed}
    assert importlib.metadata.version("titan-adapters") == ta.__version__
