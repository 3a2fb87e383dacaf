"""Who knows which model: registration, clashes, and how child processes inherit it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import titan_adapters as ta
from tests import example_models
from tests.conftest import titan_error_text
from titan_adapters import registry

ENVIRONMENT = "TITAN_ADAPTERS_MODELS"
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    """Registrations of one test must not reach another."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    yield
    os.environ.pop(ENVIRONMENT, None)


def names() -> list[str]:
    return [info.name for info in ta.list_models()]


def refusal(call) -> str:
    with pytest.raises(ta.TitanError) as caught:
        call()
    return titan_error_text(caught)


def in_child(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_installed_models_are_listed_without_being_imported():
    infos = {info.name: info for info in ta.list_models()}
    assert {"llama", "qwen2", "qwen3"} <= set(infos)
    assert infos["qwen3"].path == "titan_models.qwen3:Qwen3"
    assert infos["qwen3"].source == "installed (titan-adapters)"
    assert names() == sorted(names())
    code = "import json, sys, titan_adapters as ta; ta.list_models(); print(json.dumps('titan_models' in sys.modules))"
    assert in_child(code) is False


def test_register_a_class_as_a_decorator_or_by_path():
    assert ta.register_model(example_models.Renamed) is example_models.Renamed
    assert ta.get_model("renamed-llama") is example_models.Renamed
    assert ta.register_model("tests.example_models:Nested.Inner") == "tests.example_models:Nested.Inner"
    assert ta.get_model("nested-llama") is example_models.Nested.Inner
    infos = {info.name: (info.path, info.source) for info in ta.list_models()}
    assert infos["renamed-llama"] == ("tests.example_models:Renamed", "registered")
    ta.register_model(example_models.Renamed)  # the same again is no clash
    assert ta.get_model("tests.example_models:Renamed") is ta.get_model(example_models.Renamed)


def test_name_clash_is_refused():
    ta.register_model(example_models.Renamed)
    text = refusal(lambda: ta.register_model(example_models.AlsoRenamed))
    assert "'renamed-llama' is taken by tests.example_models:Renamed" in text
    assert "tests.example_models:AlsoRenamed can't have it too" in text
    assert ta.get_model("renamed-llama") is example_models.Renamed


def test_incomplete_class_is_not_registered():
    text = refusal(lambda: ta.register_model(example_models.Incomplete))
    assert "state_dict_adapter: missing" in text and "incomplete" not in names()
    assert ENVIRONMENT not in os.environ


def test_unknown_name_lists_the_known_ones():
    text = refusal(lambda: ta.get_model("gpt2"))
    assert (
        "No model is registered under 'gpt2'" in text
        and "known: " in text
        and "llama, " in text
        and "qwen2, " in text
        and ENVIRONMENT in text
    )


@pytest.mark.parametrize("path", ["no_such_module:X", "tests.example_models:Nope", "tests.example_models:", ":X"])
def test_path_that_cannot_be_imported(path):
    assert f"Can't import {path!r}" in refusal(lambda: ta.get_model(path))


def test_names_only_where_a_checkpoint_speaks():
    """`find_model` is what checkpoints are resolved with; a path is no name there."""
    assert "No model is registered" in refusal(lambda: registry.find_model("tests.example_models:Renamed"))
    assert "renamed-llama" not in names()


def test_why_a_class_cannot_be_imported_elsewhere():
    class Local(example_models.Llama):
        model_type = "local-llama"

    main = type("InMain", (example_models.Llama,), {"__module__": "__main__"})
    impostor = type("Renamed", (example_models.Llama,), {"__module__": "tests.example_models"})
    assert registry.unimportable_reason(Local) == "it is defined inside a function"
    assert registry.unimportable_reason(main) == "it is defined in __main__"
    assert registry.unimportable_reason(impostor) == "tests.example_models:Renamed is another object"
    assert registry.unimportable_reason(example_models.Nested.Inner) is None
    # It works in this process all the same, but is not promised to others.
    ta.register_model(Local)
    assert ta.get_model("local-llama") is Local and ENVIRONMENT not in os.environ


def test_class_whose_module_does_not_have_it_cannot_be_imported_elsewhere():
    gone = type("Gone", (example_models.Llama,), {"__module__": "tests.example_models"})
    nowhere = type("Gone", (example_models.Llama,), {"__module__": "no_such_module"})
    assert registry.unimportable_reason(gone) == "tests.example_models has no Gone"
    assert "No module named 'no_such_module'" in registry.unimportable_reason(nowhere)


def test_child_processes_inherit_registrations():
    ta.register_model(example_models.Renamed)
    ta.register_model(example_models.Nested.Inner)
    ta.register_model(example_models.Renamed)
    assert os.environ[ENVIRONMENT] == "tests.example_models:Renamed,tests.example_models:Nested.Inner"
    found = in_child(
        "import json, titan_adapters as ta; from titan_adapters.registry import import_path;"
        "print(json.dumps([import_path(ta.get_model(n)) for n in ('renamed-llama', 'nested-llama', 'llama')]))"
    )
    assert found == ["tests.example_models:Renamed", "tests.example_models:Nested.Inner", "titan_models.llama:Llama"]


def test_a_decorator_works_while_its_module_is_being_imported(tmp_path):
    """At that moment the module does not have the class yet, although a fresh interpreter will find it there."""
    (tmp_path / "decorated.py").write_text(
        "import titan_adapters as ta\n"
        "@ta.register_model\n"
        "class Model(ta.get_model('llama')):\n"
        "    model_type = 'decorated'\n"
    )
    code = (
        f"import json, os, sys; sys.path.insert(0, {str(tmp_path)!r}); import decorated;"
        f"print(json.dumps(os.environ.get({ENVIRONMENT!r})))"
    )
    assert in_child(code) == "decorated:Model"


def test_environment_that_names_nothing_is_an_error(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "no_such_module:Model")
    assert "Can't import 'no_such_module:Model'" in refusal(ta.list_models)


class EntryPoint:
    dist = None

    def __init__(self, name: str, value: str):
        self.name, self.value = name, value


def test_entry_point_must_be_named_like_the_model(monkeypatch):
    found = [EntryPoint("promised", "tests.example_models:WrongEntryPoint")]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "titan_adapters.models" else [])
    text = refusal(lambda: ta.get_model("promised"))
    assert "Entry point 'promised'" in text and "model_type is 'something else'" in text
