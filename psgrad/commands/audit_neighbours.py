"""A drawn batch and its neighbours, for an audit: one record more, less or another, records whose numbers are
none, and a record that comes again after others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from psgrad.commands.private_setup import PrivateSetup
from psgrad.engine.execution.loading import ChangedRows, ChosenRows
from psgrad.engine.privacy.audit import Replayed, compare_neighbours
from psgrad.engine.privacy.batches import ClippedSum, GradientSource
from psgrad.engine.privacy.clipped_sums import Sums, Total
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Records
from psgrad.engine.privacy.unchanged import Unchanged
from psgrad.ragged import Block
from psgrad.run.results.privacy import NeighbourPair

# The largest batch: neighbours differ by one record in any batch.
_MOST_RECORDS = 256
# Records that are taken out or exchanged, besides the longest one.
_MORE = 2
# Records that are computed at the beginning of an audit and again at its end, and how far their contributions
# may be apart, as a share of the sensitivity.
_REPEATED, _AGAIN = 3, 1e-6
# The inputs of a record that must not change the sum are multiplied by these.
_EXTREME_FACTORS = {"NaN": math.nan, "infinite": math.inf, "1e30 times as large": 1e30}

Neighbours = tuple[str, GradientSource, GradientSource]
"""Two neighbouring batches: how they differ, in words, and the clipped sum of each. Records are drawn when a
sum is asked for: there is one source at a time.
"""


def audited_pairs(setup: PrivateSetup, multiplier: float) -> tuple[list[NeighbourPair], list[str]]:
    """(what a step on a drawn batch and on each of its neighbours gave, with the same random numbers; what
    was left out, and why). Of several pairs of one name it is the worst.
    """
    worst: dict[str, Replayed] = {}
    batch = setup.sampling.draw(len(setup.records), make_generator())[:_MOST_RECORDS]
    for pair, first, second in _neighbours(setup, batch):
        relation, noise = setup.privacy.relation, Noise(multiplier)
        found = compare_neighbours(first, second, setup.clipping, noise, relation, pair=pair)
        before = worst.get(pair)
        if before is None or (not found.holds, found.over) > (not before.holds, before.over):
            worst[pair] = found
    pairs = [
        NeighbourPair(
            found.pair,
            found.distance,
            found.sensitivity,
            found.ratio,
            list(found.differing),
            found.finite,
            found.holds,
        )
        for found in worst.values()
    ]
    none = "no record that is not finite was among the neighbours: no input of the dataset is floating point"
    return pairs, [] if has_floats(setup) else [none]


@dataclasses.dataclass(frozen=True)
class Contributions:
    """What a few records add to the sum, by the record's number, and the state of the model and the loss
    then.
    """

    sums: dict[int, Sums]
    state: Unchanged


def contributions(setup: PrivateSetup) -> Contributions:
    """What a few records add to the sum, each by itself, with its own coins."""
    chosen = np.unique(np.linspace(0, len(setup.records) - 1, _REPEATED, dtype=np.int64))
    _by_record(setup, chosen)(setup.clipping)  # the first computation sizes chunks, which takes coins, too
    sums = {int(record): dict(_by_record(setup, record[None])(setup.clipping).sums) for record in chosen}
    return Contributions(sums, Unchanged(setup.common.model, setup.common.criterion.function))


def audited_state(setup: PrivateSetup, before: Contributions) -> NeighbourPair:
    """Whether records still add to the sum what they added before other records were computed, and whether
    the state of the model and the loss is unchanged.

    before: `contributions` of before. A model or a loss that keeps what it saw shows here.
    """
    changed, after = before.state.changes(by_bits=True), contributions(setup).sums
    squares = [
        sum(float((after[record][name] - value).square().sum()) for name, value in sums.items())
        for record, sums in before.sums.items()
    ]
    distance = math.sqrt(max(squares, default=0.0))
    sensitivity = setup.clipping.sensitivity(setup.privacy.relation)
    differing = [f"the state of the model and the loss ({name})" for name in changed]
    holds = distance <= _AGAIN * sensitivity and not differing  # not so for NaN
    ratio, finite = distance / sensitivity, math.isfinite(distance)
    name = "a record again, after the others"
    return NeighbourPair(name, distance, sensitivity, ratio, differing, finite, holds)


def with_extreme_records(setup: PrivateSetup) -> PrivateSetup:
    """The setup with one more record for each of _EXTREME_FACTORS: the first record, its inputs multiplied by
    the factor.

    A dataset without floating-point inputs has no such records.
    """
    records, rows = setup.records, len(setup.common.samples)
    extremes = list(_EXTREME_FACTORS.values()) if has_floats(setup) else []

    def multiplied(block: Block, numbers: torch.Tensor) -> Block:
        factors = np.array([1.0, *extremes])[numbers.numpy() // rows]
        return dataclasses.replace(block, inputs=tuple(_times(x, factors) for x in block.inputs))

    again = ChosenRows(setup.common.reader, np.arange(rows * (1 + len(extremes))) % rows)
    own = records.rows_of(0)
    more = [own + rows * kind for kind in range(1, len(extremes) + 1)]
    order = np.concatenate([records.rows_of_each(np.arange(len(records))), *more])
    sizes = np.concatenate([records.sizes, np.full(len(extremes), len(own))])
    mixed = Records(order, np.cumsum(sizes) - sizes, sizes)
    return dataclasses.replace(
        setup, records=mixed, streams=setup.streams.of(mixed, ChangedRows(again, multiplied))
    )


def _by_record(setup: PrivateSetup, records: np.ndarray) -> GradientSource:
    """The clipped sum of these records; where something draws, each is computed alone with coins of its own,
    which are the same in each batch. A guarantee holds for any coins that two batches share.
    """

    def source(clipping: Clipping) -> ClippedSum:
        if not setup.draws:
            return setup.source(records)(clipping)
        total = Total(clipping, setup.common.objective.params)
        for record in records:
            with setup.unchanged.throughout():
                total.add(setup.streams.source(record[None], 0, 0, int(record))(clipping))
        return total.result()

    return source


def has_floats(setup: PrivateSetup) -> bool:
    """Whether some input of a row is floating point."""
    return any(x.is_floating_point() for x in setup.common.samples.take([0]).inputs)


def _times(x: Tensor, factors: np.ndarray) -> Tensor:
    """[n, ...]: each row times its factor. NaN and infinite factors also change zeros."""
    if not x.is_floating_point():
        return x
    each = torch.from_numpy(factors).to(x.dtype).reshape(-1, *(1,) * (x.dim() - 1))
    return torch.where(each.isfinite(), x * torch.where(each.isfinite(), each, 1), each)


def _neighbours(setup: PrivateSetup, batch: np.ndarray) -> Iterator[Neighbours]:
    """The neighbours of a batch, as the relation has them: records of the dataset come, go or are replaced,
    and records with extreme inputs come.
    """
    mixed = with_extreme_records(setup)
    outside = np.setdiff1d(np.arange(len(setup.records)), batch)
    extremes = dict(zip(_EXTREME_FACTORS, range(len(setup.records), len(mixed.records)), strict=False))
    chosen = _chosen(mixed, batch)
    pairs: list[tuple[str, np.ndarray, np.ndarray]] = []
    if setup.privacy.relation == "replace_one":
        others = dict(zip(("another", "one more of the others"), outside[:2], strict=False)) | extremes
        for (name, other), (place, which) in itertools.product(others.items(), chosen.items()):
            pairs.append((f"{which} becomes {name}", batch, _with(batch[batch != place], other)))
        if len(batch) and len(outside):
            pairs.append(("a batch of one record becomes another", batch[:1], outside[:1]))
    else:
        pairs += [(f"{which} goes", batch, batch[batch != place]) for place, which in chosen.items()]
        comes = {"a record comes": int(outside[0])} if len(outside) else {}
        comes |= {f"a record comes whose inputs are {name}": each for name, each in extremes.items()}
        pairs += [(name, batch, _with(batch, record)) for name, record in comes.items()]
        alone = {int(batch[0]) if len(batch) else 0: "a record"} | dict(list(chosen.items())[:1])
        for place, which in alone.items():
            pairs.append((f"{which} comes into an empty batch", batch[:0], np.array([place])))
    for name, first, second in pairs:
        yield name, _by_record(mixed, first), _by_record(mixed, second)


def _chosen(setup: PrivateSetup, batch: np.ndarray) -> dict[int, str]:
    """Records of a batch to take out: the one with the longest gradient, and a few more."""
    if not len(batch):
        return {}
    norms = setup.source(batch)(setup.clipping).records.norms
    longest = int(setup.streams.drawn[int(norms.nan_to_num(nan=-1.0).argmax())])
    rest = [int(record) for record in batch if record != longest][:_MORE]
    return {longest: "the record with the longest gradient"} | {record: f"record {record}" for record in rest}


def _with(batch: np.ndarray, record: int) -> np.ndarray:
    return np.sort(np.append(batch, record))
