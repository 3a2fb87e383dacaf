"""Speed and memory of ours beside vLLM's native implementation and its Transformers backend.

Each implementation lives in a process group of its own for the whole run. Rounds are interleaved, another one begins
each (A B C, B C A, ...), and only one works at a time, so that drift of the machine hits all alike.
"""

IMPLEMENTATIONS = ("native", "transformers", "ours")
