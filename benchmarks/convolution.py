"""What a convolution's per-sample weight gradients cost, as a multiple of the ordinary summed weight
gradient, by each way to them.

`groups`: the samples are groups of one convolution. `patches`: the patches are written out for a few samples
at a time and multiplied. `shifted`: a product for each place of the kernel, with the input moved. `pixels`:
the norms alone, from the pixels' Gram matrix, where that fits into memory. The last column is what psgrad
takes for the norms (transforms/rules/convolution_weights.py, gradients/terms/convolution.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from psgrad.engine.gradients.terms import Convolution
from psgrad.engine.transforms.rules.convolution_weights import (
    Geometry,
    as_groups,
    as_matrices,
    grams,
    shifted,
)

# samples, input channels, output channels, side of the input, padding; all kernels are 3x3
SHAPES = (
    (32, 16, 16, 32, 1),
    (32, 32, 32, 16, 1),
    (32, 64, 64, 8, 1),
    (64, 32, 64, 26, 0),
    (64, 1, 32, 28, 0),
    (32, 3, 16, 32, 1),
    (8, 256, 256, 14, 1),
    (8, 512, 512, 7, 1),
)
LARGEST_GRAM = 64 << 20  # numbers; beyond, `pixels` is not timed
WAYS = ("groups", "patches", "shifted", "pixels")
BLOCK = 8  # samples whose patches exist at a time


def median_seconds(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Each way's median; all take turns in every round, so that a busy machine slows them alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds\n")
    print(
        f"{'samples':>8}{'in':>5}{'out':>5}{'side':>6}{'summed':>12}"
        + "".join(f"{way:>9}" for way in WAYS)
        + "   taken"
    )
    for n, i, o, side, padding in SHAPES:
        geometry = Geometry((1, 1), (padding,) * 2, (1, 1), False, (0, 0), 1)
        shape = torch.Size((o, i, 3, 3))
        x, g = (
            torch.randn(n, 1, i, side, side),
            torch.randn(n, 1, o, side + 2 * padding - 2, side + 2 * padding - 2),
        )
        weight = torch.empty(shape)

        def summed(
            g: torch.Tensor = g,
            x: torch.Tensor = x,
            weight: torch.Tensor = weight,
            geometry: Geometry = geometry,
        ) -> object:
            mask = [False, True, False]
            return torch.ops.aten.convolution_backward(
                g.flatten(0, 1), x.flatten(0, 1), weight, [0], *geometry, mask
            )

        def groups(
            g: torch.Tensor = g, x: torch.Tensor = x, shape: torch.Size = shape, geometry: Geometry = geometry
        ) -> object:
            return as_groups(g, x, shape, geometry)

        def patches(
            g: torch.Tensor = g, x: torch.Tensor = x, shape: torch.Size = shape, geometry: Geometry = geometry
        ) -> None:
            for start in range(0, len(x), BLOCK):
                columns, rows = as_matrices(
                    g[start : start + BLOCK], x[start : start + BLOCK], shape, geometry
                )
                torch.matmul(columns.transpose(-2, -1), rows)

        def moved(
            g: torch.Tensor = g, x: torch.Tensor = x, shape: torch.Size = shape, geometry: Geometry = geometry
        ) -> object:
            return list(shifted(g, x, shape, geometry))

        def pixels(
            g: torch.Tensor = g, x: torch.Tensor = x, shape: torch.Size = shape, geometry: Geometry = geometry
        ) -> object:
            left, right = grams(g, x, shape, geometry)
            return left.mul_(right).flatten(1).sum(1)

        ways = dict(zip(WAYS, (groups, patches, moved, pixels), strict=True))
        if n * (side + 2 * padding) ** 4 > LARGEST_GRAM:
            del ways["pixels"]
        seconds = median_seconds({"summed": summed, **ways}, rounds)
        ratios = "".join(
            f"{seconds[way] / seconds['summed']:>9.1f}" if way in seconds else f"{'':>9}" for way in WAYS
        )
        taken = Convolution(g, x, shape, geometry).order()
        print(f"{n:>8}{i:>5}{o:>5}{side:>6}{1e3 * seconds['summed']:>9.2f} ms{ratios}   {taken}")


if __name__ == "__main__":
    main()
