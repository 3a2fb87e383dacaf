"""Proving that an engine computes the model; torch only."""

from titan_adapters.verify.records import Kind, StageRecords
from titan_adapters.verify.stages import StageVerdict, check_stages, first_fault

__all__ = ["Kind", "StageRecords", "StageVerdict", "check_stages", "first_fault"]
