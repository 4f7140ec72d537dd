"""Domains of parts: on which steps a part serves. A small expression language, evaluated without `eval`.

Names: `phase` ('prefill', 'decode', 'mixed'; 'forward' of a module), `num_seqs`, `query_tokens`, `context` (the longest), `ranks`.
Operators: and, or, not, comparisons (chained too), `in` over literal lists, + - * // %.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hotpass.errors import InputError
from hotpass.records.shapes import Phase

NAMES = ("phase", "num_seqs", "query_tokens", "context", "ranks")

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Domain:
    """A parsed domain; call it with the facts of a step."""

    text: str
    tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Domain:
        """Raises InputError for anything outside the language."""
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise InputError(
                "domain", text, f"is not an expression ({error.msg})", "write e.g. phase == 'decode'"
            ) from None
        _check(tree, text)
        return cls(text, tree)

    def serves(self, *, phase: str, num_seqs: int, query_tokens: int, context: int, ranks: int = 1) -> bool:
        """True when a step with these facts lies inside."""
        facts = {
            "phase": str(phase),
            "num_seqs": num_seqs,
            "query_tokens": query_tokens,
            "context": context,
            "ranks": ranks,
        }
        return bool(_value(self.tree, facts))

    def meets(self, other: Domain) -> bool:
        """True when some step lies in both. Decided on the grid of both domains' constants and their neighbours."""
        constants = sorted(
            {c + d for c in self.constants() | other.constants() | {1} for d in (-1, 0, 1) if c + d >= 0}
        )
        for phase in Phase:
            for num_seqs, query_tokens, context in itertools.product(constants, repeat=3):
                possible = (
                    num_seqs >= 1 and query_tokens >= num_seqs and (phase != Phase.DECODE or query_tokens == num_seqs)
                )
                facts = {"phase": phase.value, "num_seqs": num_seqs, "query_tokens": query_tokens, "context": context}
                if possible and self.serves(**facts) and other.serves(**facts):  # type: ignore[arg-type]
                    return True
        return False

    def constants(self) -> set[int]:
        """Integers in the expression: where its borders are."""
        return {
            node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool)
        }


def _check(node: ast.AST, text: str) -> None:
    allowed = (
        ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.BinOp, ast.Constant, ast.Name, ast.Load,
        ast.List, ast.Tuple, *_COMPARE, *_ARITHMETIC,
    )  # fmt: skip
    for child in ast.walk(node):
        if not isinstance(child, allowed):
            raise InputError("domain", text, f"uses {type(child).__name__}", "use comparisons, and, or, not, in")
        if isinstance(child, ast.Name) and child.id not in NAMES:
            raise InputError("domain", text, f"names {child.id!r}", f"known names: {', '.join(NAMES)}")


def _value(node: ast.expr, facts: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return facts[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item, facts) for item in node.elts]
    if isinstance(node, ast.BoolOp):
        test = all if isinstance(node.op, ast.And) else any
        return test(_value(item, facts) for item in node.values)
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand, facts)
        return not inner if isinstance(node.op, ast.Not) else -inner
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](_value(node.left, facts), _value(node.right, facts))
    if isinstance(node, ast.Compare):
        left = _value(node.left, facts)
        for op, item in zip(node.ops, node.comparators, strict=True):
            right = _value(item, facts)
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True
    raise AssertionError(f"checked at parse time: {node!r}")
