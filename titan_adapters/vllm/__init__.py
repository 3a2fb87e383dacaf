"""Serving on vLLM. The only package here that imports vllm; it knows no model family."""

from titan_adapters.vllm.llm import LLM, engine_args
from titan_adapters.vllm.recorder import RecordedRouting, record_routing
from titan_adapters.vllm.stages import RecordedStages, record_stages

__all__ = ["LLM", "RecordedRouting", "RecordedStages", "engine_args", "record_routing", "record_stages"]
