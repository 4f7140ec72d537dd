"""The other process of `benchmarks.gpu.memory`: maps shared weights, looks at them or writes to them as a bad candidate would."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.gpu.outcome import Place
from engines.cuda.region import DeviceWeights, map_weights
from hotpass.decode import from_plain


def main() -> None:
    """Its argument says where the weights are. A line of standard input is an order; the answer to it is the weights' sums before it."""
    birth = json.loads(sys.argv[1])
    driver = Place(device=birth["device"], folder=Path(birth["folder"])).driver()
    found = map_weights(from_plain(DeviceWeights, birth["weights"]), driver)
    for line in sys.stdin:
        sums = {name: float(tensor.double().sum()) for name, tensor in found.items()}
        carry_out(line.strip(), found["a"], found["b"])
        driver.synchronize()
        print(json.dumps(sums), flush=True)


def carry_out(order: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Write as ordered; any other order writes nothing. a is float32, b of 16 bits."""
    match order:
        case "write one":
            b[0] += 1
        case "one bit":
            a.view(torch.int32)[-1] ^= 1
        case "swap":
            other = int((b != b[0]).nonzero()[0])
            b[0], b[other] = b[other].clone(), b[0].clone()
        case "compensate":
            words = b.view(torch.int16)
            words[2] += 1
            words[3] -= 1
        case "both":
            a[7] += 1
            b[8] += 1


if __name__ == "__main__":
    main()
