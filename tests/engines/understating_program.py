"""The toy program whose candidates turn out to need a costlier reload than they declared."""

from dataclasses import replace

from toy_program import ToyProgram

from hotpass.records.candidate import Reload


class Program(ToyProgram):
    def install(self, *args):
        return replace(super().install(*args), actual=Reload.REKV)
