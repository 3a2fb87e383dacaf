"""What was proven of a served model, and what was not: comparing logprobs, verdicts, and the report.

Nothing here imports vllm; `titan_adapters.vllm.verify` runs the engines.
"""

from titan_adapters.verify.metrics import Comparison, Scored, compare, score_logits
from titan_adapters.verify.report import Report, Row

__all__ = ["Comparison", "Report", "Row", "Scored", "compare", "score_logits"]
