"""Traces and metrics of idemgate by OpenTelemetry: a delivery links to every trigger that it merged."""

from __future__ import annotations

from idemgate_otel.instrumentation import Instrumentation, Step, instrument

__all__ = ["Instrumentation", "Step", "instrument"]
