"""Importable model classes for the registry's and the contract's tests; not a test."""

import titan_adapters as ta

Llama = ta.get_model("llama")


class Renamed(Llama):
    model_type = "renamed-llama"


class AlsoRenamed(Llama):
    model_type = "renamed-llama"


class Nested:
    class Inner(Llama):
        model_type = "nested-llama"


class Incomplete(ta.BaseTransformer):
    model_type = "incomplete"


class WrongEntryPoint(Llama):
    model_type = "something else"
