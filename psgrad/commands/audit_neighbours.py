"""A drawn batch and its neighbours, for an audit: one record more, less or another, records whose numbers are
none, records that cancel, and a record that comes again after others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from psgrad.commands.private_setup import PrivateSetup
from psgrad.commands.private_statement import Statement, ledger_header
from psgrad.engine.execution.loading import to_device
from psgrad.engine.privacy.audit import Replayed, compare_neighbours
from psgrad.engine.privacy.batches import ClippedSum, GradientSource, RecordStreams, batch_source
from psgrad.engine.privacy.clipped_sums import Total
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.records import Records, record_loss
from psgrad.engine.privacy.snapshot import tensors_of
from psgrad.engine.privacy.step import NoisySum, PrivateTraining
from psgrad.engine.privacy.unchanged import BitSums, Unchanged, has_bits
from psgrad.errors import DataError
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

# Records of a batch from whose rows such records are made.
_CANCELLING = 2
# The weights of the three rows of a record that cancels, of which the first and the one named by `same` are
# one row of the dataset. The larger the weights, the more digits are lost.
_TAKEN_BACK = [
    (same, weights)
    for large in (2.0**16, 2.0**20, 2.0**24, 2.0**32)
    for same, weights in (
        (1, (large, -large, 1.0)),
        (2, (large, 1.0, -large)),
        (1, (large, -large * (1 + 2.0**-22), 0.0)),
    )
]


class Neighbours(NamedTuple):
    """Two neighbouring batches.

    Attributes:
        pair: how they differ, in words. Of several pairs of one name the worst is told of.
        first, second: the clipped sums of both. Records are drawn when they are asked for: there is one
            source at a time.
        records: of the second one's dataset; None where what is published of a dataset is not compared.
        planted: whether the second one has a record with extreme inputs, which code may refuse to read.
    """

    pair: str
    first: GradientSource
    second: GradientSource
    records: int | None = None
    planted: bool = False


def audited_pairs(setup: PrivateSetup, base: float) -> tuple[list[NeighbourPair], list[str]]:
    """(what a step on a drawn batch and on each of its neighbours gave, with the same random numbers; what
    was left out, and why).
    """
    worst: dict[str, Replayed] = {}
    notes = []
    if not has_floats(setup):
        notes.append(
            "no record that is not finite was among the neighbours: no input of the dataset is floating point"
        )
    batch = setup.sampling.draw(len(setup.records), make_generator())[:_MOST_RECORDS]
    for neighbours in itertools.chain(_of_dataset(setup, batch), _cancelling(setup, batch)):
        try:
            found = _compared(setup, base, neighbours)
        except DataError as error:
            if not neighbours.planted:
                raise
            # an augmentation that takes no such numbers
            notes.append(f"not compared: {neighbours.pair}, on which {error.message}")
            continue
        before = worst.get(found.pair)
        if before is None or (not found.holds, found.over) > (not before.holds, before.over):
            worst[found.pair] = found
    return [_as_pair(found) for found in worst.values()], notes


def _compared(setup: PrivateSetup, base: float, neighbours: Neighbours) -> Replayed:
    """What the run's first step gives on both batches."""
    arguments = setup.step_arguments(base)
    del arguments["sampling"]
    datasets = iter((len(setup.records), neighbours.records))

    def public(noisy: NoisySum) -> dict[str, object]:
        """The ledger's header and first line, for a dataset with the number of records of this batch's
        dataset.
        """
        size = next(datasets)
        return {} if neighbours.records is None or size is None else _published(setup, base, size)

    return compare_neighbours(
        neighbours.first,
        neighbours.second,
        **{**arguments, "noise": setup.noise(base)(0)},
        generator=make_generator(),
        pair=neighbours.pair,
        public=public,
    )


def _published(setup: PrivateSetup, base: float, records: int) -> dict[str, object]:
    """What the ledger of a run on so many records says before its first step is released."""
    resized = dataclasses.replace(setup, records=Records.of_rows(records))
    generator = make_generator()
    training = PrivateTraining(
        setup.parameters,
        setup.source,
        records,
        **setup.step_arguments(base),
        optimizer=torch.optim.SGD(setup.parameters.values(), lr=0.0),
        generator=generator,
    )
    line = Statement(resized, base, generator).ledger_line(training.event(), training)
    return {f"the ledger's {name}": value for name, value in {**ledger_header(resized, base), **line}.items()}


def _as_pair(found: Replayed) -> NeighbourPair:
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(NeighbourPair)}
    return NeighbourPair(**{**fields, "differing": list(found.differing)})


class Contributions(NamedTuple):
    """What a few records add to the sum, and the state of the model and the loss then."""

    sums: dict[int, dict[str, Tensor]]  # by the record's number: name -> [*shape]
    bits: dict[str, BitSums]  # of the published tensors
    state: Unchanged


def contributions(setup: PrivateSetup) -> Contributions:
    """What a few records add to the sum, each by itself, with its own coins."""
    chosen = np.unique(np.linspace(0, len(setup.records) - 1, _REPEATED, dtype=np.int64))
    _by_record(setup, chosen)(setup.clipping)  # the first computation sizes chunks, which takes coins, too
    sums = {int(record): dict(_by_record(setup, record[None])(setup.clipping).sums) for record in chosen}
    tensors = tensors_of(setup.run.model)
    bits = {name: BitSums.of(each) for name, each in tensors.items() if has_bits(each)}
    return Contributions(sums, bits, Unchanged(setup.run.model, setup.run.criterion.function))


def audited_state(setup: PrivateSetup, before: Contributions) -> NeighbourPair:
    """Whether records still add to the sum what they added before other records were computed, and whether
    the state of the model and the loss is unchanged.

    before: `contributions` of before. A model or a loss that keeps what it saw shows here.
    """
    after, bits, _ = contributions(setup)
    squares = [
        sum(
            float((after[record][name].double() - value.double()).square().sum())
            for name, value in sums.items()
        )
        for record, sums in before.sums.items()
    ]
    distance = math.sqrt(max(squares, default=0.0))
    sensitivity = setup.clipping.sensitivity(setup.privacy.relation)
    differing = [
        f"the published {name}"
        for name, each in before.bits.items()
        if name not in bits or not each.same(bits[name])
    ]
    version = before.state.version
    before.state.renew()
    differing += ["the state of the model and the loss"] if before.state.version != version else []
    holds = distance <= _AGAIN * sensitivity and not differing  # not so for NaN
    finite = math.isfinite(distance)
    return NeighbourPair(
        "a record again, after the others",
        distance,
        sensitivity,
        distance / sensitivity,
        differing,
        finite,
        holds,
    )


def with_extreme_records(setup: PrivateSetup) -> PrivateSetup:
    """The setup with one more record for each of _EXTREME_FACTORS: the first record, its inputs multiplied by
    the factor.

    A dataset without floating-point inputs has no such records.
    """
    records, rows = setup.records, len(setup.run.samples)
    extremes = list(_EXTREME_FACTORS.values()) if has_floats(setup) else []

    def take(wanted: np.ndarray) -> Block:
        kind, row = np.divmod(wanted, rows)
        block = setup.run.reader.take(row)
        factors = np.array([1.0, *extremes])[kind]
        return dataclasses.replace(block, inputs=tuple(_times(x, factors) for x in block.inputs))

    own = records.rows_of(0)
    order = np.concatenate(
        [
            records.rows_of_each(np.arange(len(records))),
            *(own + rows * kind for kind in range(1, len(extremes) + 1)),
        ]
    )
    sizes = np.concatenate([records.sizes, np.full(len(extremes), len(own))])
    streams = RecordStreams(
        Records(order, np.cumsum(sizes) - sizes, sizes),
        take,
        setup.loss,
        setup.run.objective.params,
        lambda loss, read: setup.run.stream(lambda _: None, loss, read),
        coins=setup.streams.coins,
        reads_by_code=setup.streams.options["coins"] is not None,
        alone=setup.streams.alone,
        randomness=setup.run.randomness,
        zero_on_error=setup.streams.zero_on_error,
        **{key: value for key, value in setup.streams.options.items() if key != "coins"},
    )
    return dataclasses.replace(setup, records=streams.records, streams=streams)


def _by_record(setup: PrivateSetup, records: np.ndarray) -> GradientSource:
    """The clipped sum of these records; where something draws, each is computed alone with coins of its own,
    which are the same in each batch. A guarantee holds for any coins that two batches share.
    """
    if not setup.draws:
        return setup.source(records)

    def source(clipping: Clipping) -> ClippedSum:
        total = Total(clipping, setup.run.objective.params)
        for record in records:
            with setup.unchanged.throughout():
                total.add(setup.streams.source(record[None], 0, 0, int(record))(clipping))
        return total.result()

    return source


def has_floats(setup: PrivateSetup) -> bool:
    """Whether some input of a row is floating point."""
    return any(x.is_floating_point() for x in setup.run.samples.read(0, 1).inputs)


def _times(x: Tensor, factors: np.ndarray) -> Tensor:
    """[n, ...]: each row times its factor. NaN and infinite factors also change zeros."""
    if not x.is_floating_point():
        return x
    each = torch.from_numpy(factors).to(x.dtype).reshape(-1, *(1,) * (x.dim() - 1))
    return torch.where(each.isfinite(), x * torch.where(each.isfinite(), each, 1), each)


# -- records of the dataset, and extreme ones ----------------------------------------------------------------


def _of_dataset(setup: PrivateSetup, batch: np.ndarray) -> Iterator[Neighbours]:
    """The neighbours of a batch, as the relation has them: records of the dataset come, go or are replaced,
    and records with extreme inputs come.
    """
    mixed, count = with_extreme_records(setup), len(setup.records)
    extremes = dict(zip(_EXTREME_FACTORS, range(count, len(mixed.records)), strict=False))
    outside = np.setdiff1d(np.arange(count), batch)
    chosen = _chosen(setup, mixed, batch)

    def pair(name: str, first: np.ndarray, second: np.ndarray, records: int) -> Neighbours:
        def source_of(batch: np.ndarray) -> GradientSource:
            return lambda clipping: _by_record(mixed, batch)(clipping)

        planted = bool(second.max(initial=-1) >= count)
        return Neighbours(name, source_of(first), source_of(second), records, planted)

    if setup.privacy.relation == "replace_one":
        others = dict(zip(("another", "one more of the others"), outside[:2], strict=False)) | extremes
        for (name, other), (place, which) in itertools.product(others.items(), chosen.items()):
            yield pair(f"{which} becomes {name}", batch, _sorted(batch[batch != place], other), count)
        if len(batch) and len(outside):
            yield pair("a batch of one record becomes another", batch[:1], outside[:1], count)
        return
    more = 0 if setup.privacy.relation == "zero_out" else 1
    for place, which in chosen.items():
        yield pair(f"{which} goes", batch, batch[batch != place], count - more)
    if len(outside):
        yield pair("a record comes", batch, _sorted(batch, outside[0]), count + more)
    for name, record in extremes.items():
        yield pair(f"a record comes whose inputs are {name}", batch, _sorted(batch, record), count + more)
    alone = {int(batch[0]) if len(batch) else 0: "a record"} | dict(list(chosen.items())[:1])
    for place, which in alone.items():
        yield pair(f"{which} comes into an empty batch", batch[:0], np.array([place]), count + more)


def _chosen(setup: PrivateSetup, mixed: PrivateSetup, batch: np.ndarray) -> dict[int, str]:
    """Records of a batch to take out: the one with the longest gradient, and a few more."""
    if not len(batch):
        return {}
    norms = mixed.source(batch)(setup.clipping).records.norms
    longest = int(mixed.streams.drawn[int(norms.nan_to_num(nan=-1.0).argmax())])
    rest = [int(record) for record in batch if record != longest][:_MORE]
    return {longest: "the record with the longest gradient"} | {record: f"record {record}" for record in rest}


def _sorted(batch: np.ndarray, record: int) -> np.ndarray:
    return np.sort(np.append(batch, record))


# -- records whose positions cancel --------------------------------------------------------------------------


def _cancelling(setup: PrivateSetup, batch: np.ndarray) -> Iterator[Neighbours]:
    """A record alone, and no record. The record is three rows of the dataset, of one of the first records of
    a batch (of the first row where the batch is empty), and of the row that follows.

    The record's loss is that of the rows, added up with weights that take one row's gradient back, but for a
    small share, and leave a little of another. Whatever operators the model has, the rows meet as positions
    in its gradients.
    """
    starts = [int(setup.records.rows_of(int(record))[0]) for record in batch[:_CANCELLING]] or [0]
    name = f"a record comes whose positions cancel, the worst of {len(starts) * len(_TAKEN_BACK)}"
    for start, (same, weights) in itertools.product(starts, _TAKEN_BACK):
        rows = np.full(3, start)
        rows[3 - same] = (start + 1) % len(setup.run.samples)
        one, none = (_cancelling_source(setup, rows, weights, count) for count in (1, 0))
        yield Neighbours(name, one, none)


def _cancelling_source(
    setup: PrivateSetup, rows: np.ndarray, weights: tuple[float, ...], count: int
) -> GradientSource:
    """The clipped sum of the record of these rows [k], with their weights, or of none."""
    objective, block = setup.run.objective, setup.run.reader.take(rows)
    device = next(iter(objective.params.values())).device
    read, target = to_device(block.inputs, block.target, device, setup.run.dtype)
    each = torch.tensor(weights, dtype=torch.float64)
    inputs = tuple(x.to(device)[None][:count] for x in (*read, each))
    target = None if target is None else target[None][:count]
    loss = record_loss(setup.loss, randomness=setup.run.randomness)
    dims = (0, None if target is None else 0)
    return batch_source(
        loss,
        objective.params,
        inputs,
        target,
        in_dims=dims,
        has_aux=True,
        randomness=setup.run.randomness,
        coins=setup.streams.coins,
    )
