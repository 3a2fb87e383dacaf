"""A digest of the code that a model consists of, which keys the engine's compile cache.

vLLM itself compares the files of functions that the compiler traced. What other code worked out when the model was
built, such as a constant in another module, is in the compiled graph all the same.
"""

import ast
import hashlib
import importlib.util
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import titan_adapters
from titan_adapters.contract import BaseTransformer

_NOT_IN_A_FILE = uuid.uuid4().hex
LIBRARY = "titan_adapters"


def source_digest(model: type[BaseTransformer]) -> str:
    """Of the files that define `model`, of what they import in turn as far as it is the author's, and of this library.

    The author's is what is in the class's own top-level package, or not installed in site-packages. A class that is in
    no file, as in a notebook, has another digest in each process: it is compiled anew rather than mistaken.
    """
    digest = hashlib.sha256()
    for file in sorted(_library_files() | _author_files(model)):
        digest.update(str(file).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    if _file_of(model.__module__) is None:
        digest.update(_NOT_IN_A_FILE.encode())
    return digest.hexdigest()


def _library_files() -> set[Path]:
    return set(Path(titan_adapters.__file__).parent.rglob("*.py"))


def _author_files(model: type[BaseTransformer]) -> set[Path]:
    own_package = model.__module__.partition(".")[0]
    found: dict[str, Path] = {}
    todo = [base.__module__ for base in model.__mro__]
    while todo:
        name = todo.pop()
        file = None if name in found else _file_of(name)
        if file is None or not _is_authors(name, file, own_package):
            continue
        found[name] = file
        todo += _imported_by(name, file)
    return set(found.values())


def _is_authors(name: str, file: Path, own_package: str) -> bool:
    top = name.partition(".")[0]
    if top == own_package:
        return True
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return top != LIBRARY and top not in sys.stdlib_module_names and not installed


def _imported_by(name: str, file: Path) -> Iterator[str]:
    """Names of modules that a file imports anywhere, and of what may be a module or something in one."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            imported = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in imported:
            parts = path.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _file_of(name: str) -> Path | None:
    """Where module `name` would be imported from; nothing is imported. None if it is not a Python file."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: it is __main__, or was put together by hand
        file = vars(sys.modules[top]).get("__file__") if top in sys.modules and not rest else None
        return Path(file) if file else None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        stem = Path(folder, *rest)
        for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if file.is_file():
                return file
    return None
