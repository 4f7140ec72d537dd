"""Experiments an hour: the same candidates decided by three ways of working, and whether the decisions hold.

candidates ──► arms (a: cold vLLM · b: cold decoder engine · c: hotpass) ──► deciding ──► audit ──► one JSON line
"""
