"""The model graph: parameters, caches and matrices of a model from its configuration."""

from costmodel.graph.families import FAMILIES, graph_of
from costmodel.graph.records import BYTES, Attention, AttentionKind, Layer, Matrix, ModelGraph, Role

__all__ = ["BYTES", "FAMILIES", "Attention", "AttentionKind", "Layer", "Matrix", "ModelGraph", "Role", "graph_of"]
