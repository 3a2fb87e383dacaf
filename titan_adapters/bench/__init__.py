"""Speed and memory of ours beside vLLM's native implementation and its Transformers backend.

Each implementation lives in a process group of its own for the whole run. Rounds are interleaved (A B C, A B C, ...)
and only one works at a time, so that drift of the machine hits all alike.
"""

IMPLEMENTATIONS = ("native", "transformers", "ours")
