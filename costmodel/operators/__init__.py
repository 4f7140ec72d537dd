"""Operator times: the roofline, measured kernel tables, and a step as their sum."""

from costmodel.operators.layout import Layout
from costmodel.operators.source import SPREAD, OperatorSource, Provenance, Roofline, Timed
from costmodel.operators.step import Kind, Operator, Step, step
from costmodel.operators.tables import BACKENDS, Tables, source_for, tables_folder

__all__ = [
    "BACKENDS", "SPREAD", "Kind", "Layout", "Operator", "OperatorSource", "Provenance", "Roofline", "Step", "Tables", "Timed",
    "source_for", "step", "tables_folder",
]  # fmt: skip
