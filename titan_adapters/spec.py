"""The base of all specs and configs."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """Frozen pydantic base: unknown keys are errors, instances hash and compare by value."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
