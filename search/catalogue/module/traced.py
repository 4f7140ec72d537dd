"""The whole module as a recorded sequence of operators, without the Python that led to them."""

from __future__ import annotations

import warnings

import torch
from torch.utils import _pytree as tree

from hotpass import part


@part(
    engine="module",
    claims=["model"],
    params={"optimize": [False, True]},
    numerics="bit-identical",
    numerics_when={"optimize=True": "tolerance"},
    reload="recapture",
)
class Traced:
    """For each shape of inputs the operators of one call are recorded and replayed by TorchScript's executor: module calls, argument
    handling and shape arithmetic happen once. The operators are the same, so the bits are. It helps modules of many small operators
    (recurrent loops, streaming models) and does little where a few large products take all the time. `optimize` also folds and fuses
    for inference, which reorders sums. What depends on the values of inputs (a branch, a number of steps) is frozen as it was
    recorded: the judge's fresh inputs tell. Layers held in the trace read the shared weights.
    """

    def prepare(self, ctx, params):
        self.reference, self.optimize = ctx.reference(), params["optimize"]
        self.recorded = {}

    def forward(self, *args, **kwargs):
        leaves, form = tree.tree_flatten((args, kwargs))
        key = (form, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))
        if key not in self.recorded:
            self.recorded[key] = _recorded(self.reference, leaves, form, self.optimize)
        replay, answer_form, constants = self.recorded[key]
        found = iter(replay(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))))
        return tree.tree_unflatten([next(found) if fixed is _TENSOR else fixed for fixed in constants], answer_form)

    def close(self):
        self.recorded.clear()


_TENSOR = object()
WARM_CALLS = 3
"""TorchScript specialises its plan over the first calls."""


def _recorded(reference, leaves, form, optimize):
    """(function of the tensors, form of the answer, its leaves: a constant, or the mark of a tensor)."""
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = tuple(leaves[index] for index in places)

    def call(*given):
        filled = list(leaves)
        for index, tensor in zip(places, given, strict=True):
            filled[index] = tensor
        args, kwargs = tree.tree_unflatten(filled, form)
        return reference(*args, **kwargs)

    answer, answer_form = tree.tree_flatten(call(*tensors))

    def flat(*given):
        return tuple(leaf for leaf in tree.tree_flatten(call(*given))[0] if isinstance(leaf, torch.Tensor))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns of every shape that it freezes, which is what is wanted
        replay = torch.jit.trace(_Flat(flat), tensors, check_trace=False)
        if optimize:
            replay = torch.jit.optimize_for_inference(torch.jit.freeze(replay.eval()))
        for _ in range(WARM_CALLS):
            replay(*tensors)
    return replay, answer_form, [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in answer]


class _Flat(torch.nn.Module):
    """A function as a module, which the tracer can freeze."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)
