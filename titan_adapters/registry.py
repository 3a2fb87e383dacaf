"""Which models exist, by name.

Three sources, all under the control of whoever runs the process and none under that of a checkpoint: classes
registered here, entry points in the group `titan_adapters.models`, and the environment variable
`TITAN_ADAPTERS_MODELS` (comma-separated `pkg.module:Class`), through which child processes inherit registrations.
"""

import importlib
import os
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from titan_adapters.contract import BaseTransformer, check_contract
from titan_adapters.errors import RegistryError

ENTRY_POINT_GROUP = "titan_adapters.models"
ENVIRONMENT = "TITAN_ADAPTERS_MODELS"

T = TypeVar("T", str, type[BaseTransformer])


@dataclass(frozen=True)
class ModelInfo:
    """One registered model."""

    name: str
    path: str
    """`pkg.module:Class`."""
    source: str
    """"registered", "environment", or "installed" with the distribution's name."""


_REGISTERED: dict[str, type[BaseTransformer]] = {}


def register_model(model: T) -> T:
    """Make a model known under its `model_type`; usable as a class decorator.

    The class is checked at once. If a fresh interpreter can import it, its path is also put into the environment, so
    that engine and worker processes started later know it.

    Args:
        model: A `BaseTransformer` subclass, or `"pkg.module:Class"`.

    Raises:
        ContractError: lists everything that is missing or wrong in the class.
        RegistryError: the path can't be imported, or another class has the name.
    """
    cls: type[BaseTransformer] = _import(model) if isinstance(model, str) else model
    check_contract(cls)
    name = cls.model_type
    known = _REGISTERED.get(name)
    if known is not None and import_path(known) != import_path(cls):
        raise RegistryError(
            f"Model name {name!r} is taken by {import_path(known)}; {import_path(cls)} can't have it too.",
            fix="give one of them another model_type.",
        )
    _REGISTERED[name] = cls
    if not unimportable_reason(cls):
        _put_into_environment(import_path(cls))
    return model


def get_model(model: str | type[BaseTransformer]) -> type[BaseTransformer]:
    """The class behind a registered name, `"pkg.module:Class"`, or a class itself (which is checked).

    Never call this with a path that was read from a checkpoint; `find_model` accepts names only.
    """
    if isinstance(model, str) and ":" not in model:
        return find_model(model)
    cls = _import(model) if isinstance(model, str) else model
    register_model(cls)
    return cls


def find_model(name: str) -> type[BaseTransformer]:
    """The class registered or installed under `name`.

    Raises:
        RegistryError: no such model; lists those that exist.
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = list_models()
    for info in known:
        if info.name == name:
            cls = _import(info.path)
            check_contract(cls)
            if cls.model_type != name:
                raise RegistryError(
                    f"Entry point {name!r} points at {info.path}, whose model_type is {cls.model_type!r}.",
                    fix="name the entry point like the model_type.",
                )
            _REGISTERED[name] = cls
            return cls
    raise RegistryError(
        f"No model is registered under {name!r}.",
        [f"known: {', '.join(sorted(info.name for info in known)) or '(none)'}"],
        fix="call register_model, install a package with an entry point in the group "
        f"{ENTRY_POINT_GROUP!r}, or set {ENVIRONMENT}=pkg.module:Class.",
    )


def list_models() -> list[ModelInfo]:
    """All known models, sorted by name. Installed ones are not imported; those from the environment are."""
    for path in _environment_paths():
        if _being_imported(path.partition(":")[0]):
            continue  # that module asks for another model on its way, such as the one it derives from
        cls = _import(path)
        check_contract(cls)
        _REGISTERED.setdefault(cls.model_type, cls)
    infos = {
        e.name: ModelInfo(e.name, e.value, f"installed ({e.dist.name if e.dist else 'unknown'})")
        for e in entry_points(group=ENTRY_POINT_GROUP)
    }
    for name, cls in _REGISTERED.items():
        if name not in infos or infos[name].path != import_path(cls):
            infos[name] = ModelInfo(name, import_path(cls), "registered")
    return [infos[name] for name in sorted(infos)]


def import_path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def unimportable_reason(cls: type) -> str | None:
    """Why a fresh interpreter could not import `cls`, or None if it could."""
    if cls.__module__ == "__main__":
        return "it is defined in __main__"
    if "<locals>" in cls.__qualname__:
        return "it is defined inside a function"
    try:
        found: object = importlib.import_module(cls.__module__)
    except ImportError as error:
        return f"its module can't be imported: {error}"
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is None:  # a decorator sees its class before the module does
        return None if _being_imported(cls.__module__) else f"{cls.__module__} has no {cls.__qualname__}"
    return None if found is cls else f"{import_path(cls)} is another object"


def _being_imported(module_name: str) -> bool:
    """Whether the module's body is running at this moment, so that its classes may not be there yet."""
    spec = getattr(sys.modules.get(module_name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))  # what importlib itself asks in a circular import


def _put_into_environment(path: str) -> None:
    paths = _environment_paths()
    if path not in paths:
        os.environ[ENVIRONMENT] = ",".join([*paths, path])


def _environment_paths() -> list[str]:
    return [path for path in os.environ.get(ENVIRONMENT, "").split(",") if path]


def _import(path: str) -> type[BaseTransformer]:
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise RegistryError(
            f"Can't import {path!r}: {error}.",
            fix="give it as 'pkg.module:Class', with the package installed or on PYTHONPATH.",
        ) from error
    return found
