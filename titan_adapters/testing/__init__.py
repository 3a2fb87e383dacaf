"""The conformance kit for model authors: `check_model` runs the contract suite on a model's tiny configs."""

from titan_adapters.errors import ContractError
from titan_adapters.nn import honours as nn_honours
from titan_adapters.testing.case import relative_error
from titan_adapters.testing.fill import unique_fill
from titan_adapters.testing.suite import CheckResult, check_model, pytest_check
from titan_adapters.vllm import honours as vllm_honours

__all__ = [
    "CheckResult",
    "capability_table",
    "check_model",
    "field_table",
    "pytest_check",
    "relative_error",
    "require",
    "unique_fill",
]


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
