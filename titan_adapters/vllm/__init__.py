"""Serving on vLLM. The only package here that imports vllm; it knows no model family."""

from titan_adapters.vllm.llm import LLM, engine_args
from titan_adapters.vllm.proof import ProofRow, fingerprint, weight_proof
from titan_adapters.vllm.recorder import RecordedRouting, record_routing
from titan_adapters.vllm.stages import RecordedStages, record_stages
from titan_adapters.vllm.verification import verify

__all__ = [
    "LLM",
    "ProofRow",
    "RecordedRouting",
    "RecordedStages",
    "engine_args",
    "fingerprint",
    "record_routing",
    "record_stages",
    "verify",
    "weight_proof",
]
