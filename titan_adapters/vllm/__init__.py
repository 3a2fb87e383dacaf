"""Serving on vLLM. The only package here that imports vllm; it knows no model family."""

from titan_adapters.vllm.llm import LLM, engine_args
from titan_adapters.vllm.recorder import RecordedRouting, record_routing

__all__ = ["LLM", "RecordedRouting", "engine_args", "record_routing"]
