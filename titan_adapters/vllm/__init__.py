"""Serving on vLLM. The only package here that imports vllm; it knows no model family."""

from titan_adapters.vllm.llm import LLM, engine_args

__all__ = ["LLM", "engine_args"]
