"""`titan-adapters doctor`: what each process sees, and every known mistake with its fix."""

from titan_adapters.doctor.report import Report, examine

__all__ = ["Report", "examine"]
