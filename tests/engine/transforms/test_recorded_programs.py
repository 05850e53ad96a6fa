"""Random programs of operators under every nest of transforms, recorded on one batch and replayed on others:
the same bits as the function itself gives (tests/random_programs).
"""

from __future__ import annotations

import datetime
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import capture as make
from psgrad.engine.transforms import program, shortening
from psgrad.engine.transforms.capture import Captured
from tests.random_programs import queries
from tests.random_programs.backends import Ours
from tests.random_programs.checking import attempted, first_line, quiet
from tests.random_programs.modes import MODES, Case
from tests.random_programs.programs import Program
from tests.random_programs.writer import PER_SAMPLE, write

SECONDS = 60
# Batches after the one that is recorded: one that the program is compared on, and some that it replays.
BATCHES = 4


def other_values(values: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Other numbers where they are floating; the first batch again in every second one, so that a program
    whose guards hold is replayed.
    """
    generator = torch.Generator().manual_seed(batch)
    return [
        x.clone()
        if not x.is_floating_point() or batch % 2 == 0
        else x * (torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 0.7).to(x.dtype)
        for x in values
    ]


def function_of(program: Program) -> Callable[..., list[Tensor]]:
    """The program under its transforms, as a function of its arguments."""

    def run(*args: Tensor) -> list[Tensor]:
        case = Case.of(program, program.function(), args)
        found: Any = (
            queries.ours(program, case) if program.mode == PER_SAMPLE else MODES[program.mode](Ours(), case)
        )
        return [x for x in torch.utils._pytree.tree_flatten(found)[0] if isinstance(x, Tensor)]

    return run


def difference(seed: int) -> tuple[str, int]:
    """(what a replay got wrong, empty where nothing; how many calls were replayed)."""
    program = write(seed)
    function, values = function_of(program), program.values()
    said: list[str] = []
    captured = Captured(function, said.append, hoists=True)
    with quiet(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in range(BATCHES + 1):
            outcomes = []
            for call in (function, captured):
                torch.manual_seed(batch)
                args = other_values(values, batch)
                found, error = attempted(lambda call=call, args=args: call(*args))  # type: ignore[misc]
                outcomes.append((found, None if error is None else first_line(error), torch.rand(1)))
            # PyTorch's own autograd may round otherwise while a mode is on, as it is in the recorded call.
            wrong = _compared(*outcomes, 4 if program.mode.startswith("autograd") else 0)
            if wrong:
                return f"seed {seed}, batch {batch}: {wrong}\n{program}", 0
    if any(why.startswith(("NameError", "KeyError", "AssertionError")) for why in said):
        return f"seed {seed}: {said}\n{program}", 0
    return "", sum(entry.replays for entry in captured.entries.values())


def _compared(plain: Any, replayed: Any, roundings: int) -> str:
    """What differs, beyond so many rounding errors; of none the same bits."""
    if replayed[1] is None and "should be between 0 and 1" in str(plain[1]):
        return ""  # by a loss that nobody reads: a program does not compute it
    if plain[1] != replayed[1]:
        return f"{plain[1]} by the function, {replayed[1]} by the program"
    if not torch.equal(plain[2], replayed[2]):
        return "another random state afterwards"
    for x, y in zip(plain[0], replayed[0], strict=True):
        if x.shape != y.shape or x.dtype != y.dtype or not _same(x, y, roundings):
            return f"{x} by the function, {y} by the program"
    return ""


def _same(x: Tensor, y: Tensor, roundings: int) -> bool:
    same = (x == y) | ((x != x) & (y != y))
    if roundings and x.is_floating_point():
        largest = x[x.isfinite()].abs().amax() if x.isfinite().any() else x.new_zeros(())
        same |= (x - y).abs() <= roundings * torch.finfo(x.dtype).eps * largest
    return bool(same.all())


@pytest.mark.parametrize("block", range(4))
def test_recorded_random_programs_fixed_seeds(block: int) -> None:
    found = [difference(seed) for seed in range(block * 12, block * 12 + 12)]
    assert not any(words for words, _ in found), "\n\n".join(filter(None, (words for words, _ in found)))
    assert sum(replays > 0 for _, replays in found) >= 6


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_recorded_random_programs_seed_of_the_day() -> None:
    end = time.monotonic() + SECONDS
    seed = int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")) * 1_000_000
    while time.monotonic() < end:
        words, _ = difference(seed)
        assert not words, words
        seed += 1


# -- planted errors ------------------------------------------------------------------------------------------


def replayed(function: Callable[..., Any], *batches: Tensor) -> list[Tensor]:
    captured: Captured = make(function)
    return [captured(x) for x in (batches[0], batches[0], *batches)][2:]


def branching(x: Tensor) -> Tensor:
    return x * 2 if bool((x > 0).all()) else x * 3


def test_recorded_programs_notice_a_guard_that_is_never_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "differs", lambda now, recorded: False)
    found = replayed(branching, torch.ones(2), -torch.ones(2))
    assert not torch.equal(found[1], branching(-torch.ones(2)))


def aliasing(x: Tensor) -> Tensor:
    made = x * 1
    other = made.view(-1)[:1]
    before = made + 1
    other.mul_(2)
    return before + (made + 1)


def test_a_view_of_a_result_that_an_equal_kernel_has_is_replayed() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = x * 2, x * 2
        return first + second.view(-1).view(2, 2) + second.view(-1).view(2, 2)

    said: list[str] = []
    captured = make(function, say=said.append)
    for step in range(4):
        x = torch.arange(4.0).view(2, 2) + step
        assert torch.equal(captured(x), function(x))
    assert said == []
    assert [entry.replays for entry in captured.entries.values()] == [3]


def test_recorded_programs_notice_a_missed_write_through_a_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(replayed(aliasing, x, x + 1)[1], aliasing(x + 1))
    monkeypatch.setattr(shortening, "_written_memory", lambda recording: set())
    with pytest.warns(UserWarning, match="other numbers"):  # the comparison sees it
        replayed(aliasing, x, x + 1)
