"""`titan-adapters new`: a model file and its test to start from."""

import keyword
from enum import StrEnum
from importlib import resources
from pathlib import Path

from titan_adapters.errors import ScaffoldError


class Template(StrEnum):
    """Modules of `titan_adapters.templates`."""

    llama = "llama"
    moe = "moe"


TEST = '''"""MyModel computes what its specs say, on every one of its tiny configs."""

import titan_adapters as ta

# With engine=True also in a vLLM engine: whole and chunked prompts, cached prefixes, decoding, mixed batches.
test_my_model = ta.testing.pytest_check("my_model:MyModel")

# CHANGE: add a test against an implementation that is not this one (logits of the original code on the same weights).
# Only that finds a wrong scale, norm, activation or rope: the suite compares your model with itself and its specs.
'''


def new_model(name: str, like: Template, folder: Path) -> list[Path]:
    """Write `NAME.py` and `test_NAME.py` into `folder`, which is created if needed; returns their paths.

    Args:
        name: Of the module and the model, in snake_case.

    Raises:
        ScaffoldError: the name can't be a module's, or a file exists; nothing is written then.
    """
    problems = []
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        problems.append(f"{name!r} can't name a module: use lower-case letters, digits and _, and start with a letter")
    files = [folder / f"{name}.py", folder / f"test_{name}.py"]
    problems += [f"{file} exists" for file in files if file.exists()]
    if problems:
        raise ScaffoldError(f"Can't start a model {name!r}.", problems, fix="give another NAME or --directory.")
    model = resources.files("titan_adapters.templates").joinpath(f"{like}.py").read_text()
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in zip(files, (model, TEST), strict=True):
        file.write_text(text.replace("my_model", name).replace("MyModel", class_name(name)))
    return files


def class_name(name: str) -> str:
    """my_model -> MyModel."""
    return "".join(part.capitalize() for part in name.split("_")) or name
