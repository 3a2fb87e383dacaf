"""The key of vLLM's compile cache: an edited model never meets the graph of what it was, an unchanged one does.

That the cache is used is not tested: on the CPU, vLLM 0.32 fails to load any model's graph, says so and compiles again.
"""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import one_windowed_layer
from titan_adapters import registry
from titan_adapters.checkpoint import Identity, write_identity
from titan_adapters.vllm.plugin import register
from titan_adapters.vllm.source import source_digest

pytestmark = pytest.mark.usefixtures("no_registrations_left")

PACKAGE = "edited_package"
SOURCES = {
    "__init__.py": "",
    "model.py": """
import titan_adapters as ta

from . import helpers

Qwen3 = ta.get_model("qwen3")

class Edited(Qwen3):
    model_type = "edited"

    def __init__(self, config):
        super().__init__(config)
        self.factor = helpers.factor()

    def embed(self, tokens):
        return super().embed(tokens) * self.factor
""",
    "helpers.py": f"def factor():\n    from {PACKAGE}.deep.numbers import FACTOR\n    return FACTOR\n",
    "deep/__init__.py": "",
    "deep/numbers.py": "FACTOR = 2.0\n",
    "unused.py": "",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`package(file=text, ...)`: the author's class after these edits, as a new process would import it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second would not be noticed
    for file, text in SOURCES.items():
        (tmp_path / PACKAGE / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / PACKAGE / file).write_text(text)

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        registry._REGISTERED.pop("edited", None)

    def edit(**files: str) -> type[ta.BaseTransformer]:
        for file, text in files.items():
            (tmp_path / PACKAGE / f"{file.replace('__', '/')}.py").write_text(text)
        forget()
        importlib.invalidate_caches()
        return ta.get_model(f"{PACKAGE}.model:Edited")

    yield edit
    forget()


def key(folder: Path) -> str:
    """All that the name of a cached graph depends on before it is traced, in vLLM 0.26 and 0.32."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    arguments = ta.vllm.engine_args(checkpoint=folder, load_format="dummy", skip_tokenizer_init=True)
    return EngineArgs(**arguments).create_engine_config().compute_hash()


def test_key_changes_with_the_config(tmp_path):
    """Between these no shape differs: rope's numbers and windows are constants in the graph."""
    qwen3 = ta.get_model("qwen3")
    config = one_windowed_layer(qwen3, 5)
    rope = config.rope.model_copy(update={"theta": config.rope.theta * 1.01})
    keys = []
    for other in (
        config,
        config.model_copy(update={"rope": rope}),
        config.model_copy(update={"windows": (6,)}),
        config,
    ):
        write_identity(tmp_path, Identity(qwen3, other, "native"))
        keys.append(key(tmp_path))
    assert keys[0] == keys[3] and len(set(keys)) == 3


def test_key_without_a_checkpoint_is_the_same_each_time():
    arguments = [
        ta.vllm.engine_args("qwen3", one_windowed_layer(ta.get_model("qwen3"), window), load_format="dummy")["model"]
        for window in (5, 6, 5)
    ]
    assert arguments[0] == arguments[2] != arguments[1]


def test_key_changes_with_the_authors_source(package, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_identity(folder, Identity(package(), one_windowed_layer(ta.get_model("qwen3"), 5), "native"))
    first = key(folder)
    package(deep__numbers="FACTOR = 3.0\n")
    assert key(folder) != first
    package(deep__numbers=SOURCES["deep/numbers.py"])
    assert key(folder) == first


def test_digest_covers_what_the_model_imports_and_nothing_else(package):
    first = source_digest(package())
    assert source_digest(package(unused="x = 1")) == first
    assert source_digest(package(helpers="from .deep.numbers import FACTOR\n\ndef factor():\n    return 2.0")) != first
    assert source_digest(package(helpers=SOURCES["helpers.py"])) == first
    assert source_digest(package(model=SOURCES["model.py"] + "\n")) != first


def test_digest_of_a_class_that_is_in_no_file_is_valid_in_this_process(monkeypatch):
    llama = ta.get_model("llama")
    nowhere = type("Nowhere", (llama,), {"__module__": "in_no_file"})
    assert source_digest(nowhere) == source_digest(nowhere) != source_digest(llama)
    before = source_digest(nowhere)
    monkeypatch.setattr("titan_adapters.vllm.source._NOT_IN_A_FILE", "another process")
    assert source_digest(nowhere) != before
