"""The conformance kit for model authors: `check_model` runs the contract suite on a model's tiny configs."""

from dataclasses import dataclass
from typing import Literal

from titan_adapters.contract import BaseTransformer, contract_problems
from titan_adapters.errors import ContractError
from titan_adapters.nn import honours as nn_honours
from titan_adapters.registry import get_model
from titan_adapters.testing.checks import CHECKS, Case, Skip, relative_error
from titan_adapters.testing.fill import unique_fill
from titan_adapters.vllm import honours as vllm_honours

__all__ = [
    "CheckResult",
    "capability_table",
    "check_model",
    "field_table",
    "relative_error",
    "require",
    "unique_fill",
]

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check on one tiny config."""

    check: str
    config: str
    outcome: Outcome
    detail: str


def check_model(model: str | type[BaseTransformer]) -> list[CheckResult]:
    """Run every check on every tiny config of `model`, a registered name, `"pkg.module:Class"` or a class.

    A class that does not meet the contract yields one failed result per problem and is not built.
    """
    if isinstance(model, type) and (problems := contract_problems(model)):
        return [CheckResult("contract", "", "failed", problem) for problem in problems]
    cls = get_model(model)
    results = [CheckResult("contract", "", "passed", f"{cls.__module__}:{cls.__qualname__}")]
    try:
        configs = cls.tiny_configs()
    except NotImplementedError:
        return [*results, CheckResult("tiny_configs", "", "failed", "missing; give at least one tiny config")]
    for name, config in configs.items():
        case = Case.build(cls, config)
        results += [_run(check, name, case) for check in CHECKS]
    return results


def require(results: list[CheckResult]) -> None:
    """Raise ContractError that lists every failed check."""
    failed = [f"{r.check} [{r.config}]: {r.detail}" for r in results if r.outcome == "failed"]
    if failed:
        raise ContractError("The model failed its contract suite.", failed, fix="see each check's docstring.")


def capability_table(results: dict[str, list[CheckResult]]) -> str:
    """Markdown: models by check, each with the number of tiny configs that passed of those it applies to."""
    checks = list(dict.fromkeys(r.check for found in results.values() for r in found))
    lines = [f"| model | {' | '.join(check.replace('_', ' ') for check in checks)} |", f"|---|{'---|' * len(checks)}"]
    for model, found in results.items():
        cells = []
        for check in checks:
            ran = [r.outcome == "passed" for r in found if r.check == check and r.outcome != "skipped"]
            cells.append(f"{sum(ran)}/{len(ran)}" if ran else "-")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def field_table() -> str:
    """Markdown: every spec field, and who computes it in plain torch and in vLLM. Needs no vllm."""
    lines = ["| field | plain torch | vLLM |", "|---|---|---|"]
    for spec in nn_honours.HONOURED:
        torchs, vllms = nn_honours.HONOURED[spec], vllm_honours.HONOURED.get(spec, {})
        for field in spec.model_fields:
            module = f"`nn.{torchs[field].__name__}`" if field in torchs else "not honoured"
            lines.append(f"| `{spec.__name__}.{field}` | {module} | {vllms.get(field, 'refused')} |")
    return "\n".join(lines) + "\n"


def _run(check, config_name: str, case: Case) -> CheckResult:
    outcome: Outcome
    try:
        outcome, detail = "passed", check(case)
    except Skip as skip:
        outcome, detail = "skipped", str(skip)
    except Exception as error:  # a model under test may raise anything; the report names it
        outcome, detail = (
            "failed",
            str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}",
        )
    return CheckResult(check.__name__, config_name, outcome, detail)
