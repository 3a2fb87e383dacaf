"""What was proven of a served model, and what was not: comparing logprobs and stages, verdicts, and the report.

Nothing here imports vllm; `titan_adapters.vllm.verify` runs the engines.
"""

from titan_adapters.verify.metrics import Comparison, Scored, compare, score_logits
from titan_adapters.verify.records import Kind, StageRecords
from titan_adapters.verify.report import Report, Row
from titan_adapters.verify.stages import StageVerdict, check_stages, first_fault

__all__ = [
    "Comparison",
    "Kind",
    "Report",
    "Row",
    "Scored",
    "StageRecords",
    "StageVerdict",
    "check_stages",
    "compare",
    "first_fault",
    "score_logits",
]
