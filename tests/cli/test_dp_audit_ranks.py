"""`psgrad dp-audit` by several ranks: the numbers of one process, and a mistake that one rank alone makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from psgrad.commands import dp_audit
from psgrad.engine.privacy import rank_steps
from psgrad.engine.privacy.clipping import Clipping
from psgrad.errors import DataError
from tests.cli.test_dp_audit import _drawn_alike, private
from tests.forked_ranks import EndedRank, Plant, run_ranks
from tests.workplace import Workplace

__all__ = ["_drawn_alike", "private"]
NAME = f"private/NOT_PRIVATE_{dp_audit.FILE}"


def ranks(
    workplace: Workplace, size: int, *options: str, plant: Plant = lambda rank: None
) -> list[EndedRank]:
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    return run_ranks(workplace.folder, size, "dp-audit", "config.yaml", *options, plant=plant)


def assert_close(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_close(left, right)
    elif isinstance(one, float):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)
    else:
        assert one == other


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_audit_of_ranks_equals_one_process(
    private: Workplace, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.config["privacy"]["sampling"]["sample_rate"] = 0.5
    private.config["privacy"]["expected_batch_size"] = 12
    ended = ranks(private, size, "--output", "several", "--steps", "2", "--json")
    assert [rank.code for rank in ended] == [0] * size, [rank.err for rank in ended]
    assert [(rank.out, rank.err) for rank in ended[1:]] == [("", "")] * (size - 1)
    monkeypatch.delenv("RANK", raising=False)
    alone = ranks(private, 1, "--output", "one", "--steps", "2", "--json")
    assert alone[0].code == 0, alone[0].err
    contents = [json.loads((private.folder / run / NAME).read_text()) for run in ("one", "several")]
    assert_close(*contents)
    assert len(contents[0]["pairs"]) == 11
    manifest = json.loads((private.folder / "several/private/NOT_PRIVATE_manifest.json").read_text())
    assert [each["rank"] for each in manifest["ranks"]["each"]] == list(range(size))


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_audit_of_ranks_finds_the_mistake_of_one(private: Workplace, rank: int) -> None:
    """One rank clips to twice the bound: of the neighbours some are compared there."""

    def plant(own: int) -> None:
        factors = Clipping.factors

        def doubled(self: Clipping, *arguments: Any, **options: Any) -> Any:
            return 2 * factors(self, *arguments, **options)

        if own == rank:
            Clipping.factors = doubled

    ended = ranks(private, 2, "--steps", "2", plant=plant)
    assert [each.code for each in ended] == [1, 0], [each.err for each in ended]
    assert "VIOLATION" in ended[0].out


@pytest.mark.long
def test_audit_ends_where_a_rank_fails(private: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that can't compute its share is named; nothing is judged."""

    def plant(own: int) -> None:
        def fails(*arguments: Any) -> Any:
            raise DataError("the disk of this machine is gone")

        if own == 1:
            rank_steps._computed = fails

    ended = ranks(private, 2, "--steps", "2", plant=plant)
    assert [each.code for each in ended] == [3, 3]
    assert ended[1].err.startswith("error: the disk of this machine is gone")
    manifest = json.loads((Path("out-audit") / "private/NOT_PRIVATE_manifest.json").read_text())
    assert "rank 1 failed: the disk of this machine is gone" in manifest["error"]
    assert not (Path("out-audit") / NAME).exists()
