"""Running the contract suite: as a list of results, or as pytest items."""

import importlib.util
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeVar

import torch

from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import ContractError, TitanError
from titan_adapters.registry import get_model, import_path
from titan_adapters.testing.case import Case, Skip
from titan_adapters.testing.checks import CHECKS
from titan_adapters.testing.engine import ENGINE_CHECKS, Served, shut_down
from titan_adapters.testing.geometry import geometry

Outcome = Literal["passed", "failed", "skipped"]
T = TypeVar("T")


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check on one tiny config."""

    check: str
    config: str
    """Name of the tiny config; empty for a check of the class, or of all configs together."""
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Item:
    """One check on one tiny config, not yet run."""

    check: str
    config: str
    promise: str
    """What the check promises, and what to look for if it fails."""
    work: Callable[[], str]

    def run(self) -> CheckResult:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # handing such small work to other threads takes longer than doing it
        outcome: Outcome = "failed"
        try:
            with torch.no_grad():
                detail = self.work()
            outcome = "passed"
        except Skip as skip:
            outcome, detail = "skipped", str(skip)
        except (AssertionError, TitanError) as error:
            detail = str(error) or traceback.format_exc()
        except Exception:  # a model under test may raise anything
            detail = traceback.format_exc()
        finally:
            torch.set_num_threads(threads)
        return CheckResult(self.check, self.config, outcome, detail)


class Suite:
    """The checks of one model. Weights are drawn, and engines started, when a config's first check runs.

    Args:
        model: A registered name, `"pkg.module:Class"`, or a class.
        engine: Also run the checks that need a vLLM engine.
    """

    def __init__(self, model: str | type[BaseTransformer], engine: bool = False):
        self.model = model
        self.engine = engine
        self._served: dict[str, Served] = {}  # one at most: engines of a process can't be ended one by one

    def items(self) -> list[Item]:
        """Config by config. A class that does not meet the contract, or has no tiny configs, yields failing items."""
        try:
            cls = get_model(self.model)
        except ContractError as error:
            return [_failing("contract", problem) for problem in error.problems]
        try:
            configs = cls.tiny_configs()
        except NotImplementedError:
            configs = {}
        items = [Item("contract", "", "The class meets the contract.", partial(import_path, cls))]
        if not configs:
            return [*items, _failing("tiny_configs", "missing; override it, and give at least one tiny config")]
        items.append(_item(geometry, "", partial(geometry, cls, list(configs.values()))))
        for name, config in configs.items():
            case = cache(partial(Case.build, cls, config))
            items += [_item(check, name, partial(_applied, check, case)) for check in CHECKS]
            if self.engine:
                served = partial(self._start, name, case)
                items += [_item(check, name, partial(_applied, check, served)) for check in ENGINE_CHECKS]
        return items

    def close(self) -> None:
        """Shut down the engine that runs, if any."""
        shut_down(served.llm for served in self._served.values())
        self._served.clear()

    def _start(self, config: str, case: Callable[[], Case]) -> Served:
        if importlib.util.find_spec("vllm") is None:
            raise Skip("vllm is not installed")
        if config not in self._served:
            self.close()
            self._served[config] = Served.start(case())
        return self._served[config]


def _item(check: Callable[..., str], config: str, work: Callable[[], str]) -> Item:
    return Item(check.__name__, config, inspect.getdoc(check) or "", work)


def _failing(check: str, problem: str) -> Item:
    def fail() -> str:
        raise AssertionError(problem)

    return Item(check, "", 'See "Add a model" in CONTRIBUTING.md.', fail)


def _applied(check: Callable[[T], str], subject: Callable[[], T]) -> str:
    return check(subject())


def check_model(model: str | type[BaseTransformer], *, engine: bool = False) -> list[CheckResult]:
    """Run every check on every tiny config of `model`, a registered name, `"pkg.module:Class"` or a class.

    Args:
        engine: Also start an eager vLLM engine in this process for each tiny config, a few seconds each, and compare
            it with plain torch. Skipped without vllm, or where its attention can't do a config's head size.

    A class that does not meet the contract yields one failed result per problem and is not built.
    """
    suite = Suite(model, engine)
    try:
        return [item.run() for item in suite.items()]
    finally:
        suite.close()


def pytest_check(*models: str | type[BaseTransformer], engine: bool = False) -> Callable[..., None]:
    """A pytest function with one item per model, check and tiny config. Arguments as for `check_model`.

    Assign it to a name that pytest collects: `test_my_model = ta.testing.pytest_check("my_package.model:MyModel")`.
    """
    import pytest

    parameters = []
    for model in models:
        suite = Suite(model, engine)
        prefix = f"{model if isinstance(model, str) else import_path(model)}: " if len(models) > 1 else ""
        for item in suite.items():
            parameters.append(
                pytest.param(suite, item, id=prefix + " - ".join(filter(None, (item.check, item.config))))
            )

    @pytest.mark.parametrize(("suite", "item"), parameters)
    def test(suite: Suite, item: Item, request: Any) -> None:
        request.node.getparent(pytest.Module).addfinalizer(suite.close)
        result = item.run()
        if result.outcome == "skipped":
            pytest.skip(result.detail)
        if result.outcome == "failed":
            where = f" on tiny config {item.config!r}" if item.config else ""
            pytest.fail(f"{item.check}{where}: {result.detail}\n\n{item.promise}", pytrace=False)

    return test
