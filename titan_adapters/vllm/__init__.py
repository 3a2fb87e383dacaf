"""Serving on vLLM. This package is the only part of the library that imports vllm; nothing here knows a model family."""

from titan_adapters.vllm.llm import LLM, engine_args

__all__ = ["LLM", "engine_args"]
