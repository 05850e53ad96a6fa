"""Where the order of a product's contraction turns over: both orders timed, and what the planner chooses
beside them.

    python benchmarks/crossover.py [--rounds 9] [--json FILE] [--device cpu]

The squared norms of per-sample gradients that are sums over positions of outer products cost t*t*(a+b) by
Gram matrices and t*a*b by the value itself. Each line is a size of a and b: how long each order takes for
some positions t, the position from which materialising is quicker, as measured and as priced, and the regret:
the time of the chosen order as a multiple of the better one's.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from script import command_line, write_json

from psgrad.engine.gradients.machine import device_name
from psgrad.engine.gradients.terms import Product

SIZES = ((16, 16), (64, 64), (64, 576), (256, 256), (256, 1024), (1024, 1024), (10, 512), (8192, 64))
POSITIONS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
SAMPLES = 16
# Bars: the choice's time over the best order's.
MEDIAN_REGRET, WORST_REGRET = 1.1, 1.5
MOST_OPERATIONS = 4e9


class Forced(Product):
    """A product whose norms are taken one way, whatever it costs."""

    forced = "gram"

    def order(self) -> str:
        return self.forced


def seconds_of_both(left: torch.Tensor, right: torch.Tensor, rounds: int) -> dict[str, float]:
    """Median seconds of each order; they take turns, so that a busy machine slows them alike."""
    times: dict[str, list[float]] = {"gram": [], "materialise": []}
    term = Forced(left, right)
    for number in range(rounds + 1):
        for way, found in times.items():
            object.__setattr__(term, "forced", way)
            start = time.perf_counter()
            repeats = 0
            while not repeats or time.perf_counter() - start < 2e-3:
                term.square_norms()
                repeats += 1
            if left.device.type == "cuda":
                torch.cuda.synchronize(left.device)
            if number:
                found.append((time.perf_counter() - start) / repeats)
    return {way: statistics.median(found) for way, found in times.items()}


def crossover(choices: dict[int, str]) -> str:
    """The first position from which materialising is the quicker order for good."""
    last = max((positions for positions, way in choices.items() if way == "gram"), default=0)
    later = [positions for positions in choices if positions > last]
    return str(min(later)) if later else f"> {max(choices)}"


def main() -> None:
    parser = command_line(
        "Time both orders of contraction, beside the planner's choice.", rounds=9, device=True
    )
    arguments = parser.parse_args()
    device = arguments.device
    kind = device_name(device)
    print(f"torch {torch.__version__}, {kind}, {torch.get_num_threads()} threads, {arguments.rounds} rounds")
    print(f"\n{'a x b':>12}{'turns over at':>16}{'priced':>10}   regret by positions")
    rows: list[dict[str, Any]] = []
    regrets: list[float] = []
    for a, b in SIZES:
        measured, priced, line = {}, {}, []
        for positions in POSITIONS:
            if 2.0 * SAMPLES * positions * min(positions * (a + b), a * b) > MOST_OPERATIONS:
                continue
            left, right = (torch.randn(SAMPLES, 1, positions, size, device=device) for size in (a, b))
            taken = seconds_of_both(left, right, arguments.rounds)
            measured[positions] = min(taken, key=lambda way: taken[way])
            priced[positions] = Product(left, right).order()
            regret = taken[priced[positions]] / min(taken.values())
            regrets.append(regret)
            line.append(f"{positions}:{regret:.2f}")
            rows.append(
                {
                    "a": a,
                    "b": b,
                    "positions": positions,
                    "seconds": taken,
                    "chosen": priced[positions],
                    "regret": regret,
                }
            )
        print(
            f"{f'{a} x {b}':>12}{crossover(measured):>16}{crossover(priced):>10}   {' '.join(line)}",
            flush=True,
        )
    median, worst = statistics.median(regrets), max(regrets)
    print(
        f"\nregret: median {median:.2f}, at most {MEDIAN_REGRET}:"
        f" {'pass' if median <= MEDIAN_REGRET else 'FAIL'}; worst {worst:.2f}, at most {WORST_REGRET}:"
        f" {'pass' if worst <= WORST_REGRET else 'FAIL'}"
    )
    content = {"machine": kind, "torch": torch.__version__, "samples": SAMPLES, "rows": rows}
    write_json(arguments, content | {"median": median, "worst": worst})


if __name__ == "__main__":
    main()
