"""Varied prompts for comparing engines: prose, code, lists, arithmetic, other languages, chat, short and long."""

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "To make a good cup of tea, first",
    "In 1969, for the first time,",
    "The opposite of 'cold' is",
    "import numpy as np\n\ndef softmax(x):\n    e = np.exp(x - x.max())\n    return e / e.sum()\n\n",
    "The history of the Roman Empire begins with the founding of the city. It grew into a great power that ruled the "
    "Mediterranean for centuries, and its laws, language and roads",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 12 times 12?\nA:",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nExplain photosynthesis to a child.<|im_end|>\n<|im_start|>assistant\n",
    "La tour Eiffel se trouve",
    "Die Hauptstadt von Deutschland ist",
    "SELECT name, COUNT(*) FROM orders GROUP BY",
    '{"name": "Ada", "born": 1815, "field": "',
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondrion is",
    "Roses are red,\nViolets are blue,\n",
    "Chapter 1\n\nIt was a dark and stormy night;",
    "Step 1: Preheat the oven to",
    "The quick brown fox jumps over the lazy dog. " * 12,
]
