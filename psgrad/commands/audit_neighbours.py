"""A drawn batch and its neighbours, for an audit: one record more, less or another, records whose numbers are
none, records that cancel, and a record that comes again after others.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from psgrad.commands.private_setup import PrivateSetup
from psgrad.commands.private_statement import Statement, ledger_header
from psgrad.engine.execution.loading import to_device
from psgrad.engine.execution.ranks import Processes
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
from psgrad.run.results import NeighbourPair

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


@dataclass(frozen=True)
class _NeighbourBatches:
    """Two batches, each as (setup, record numbers), and how they differ."""

    pair: str
    first: np.ndarray
    second: np.ndarray
    records: int  # of the second one's dataset


def audited_pairs(
    setup: PrivateSetup, base: float, processes: Processes
) -> tuple[list[NeighbourPair], list[str]]:
    """(what a step on a drawn batch and on each of its neighbours gave, with the same random numbers; what
    was left out, and why). Several processes share the pairs; rank 0 has the results of all, and the others
    none.
    """
    mixed = with_extreme_records(setup)
    batch, longest = _drawn(setup, mixed, processes)
    neighbours = list(_neighbours(setup, mixed, batch, longest))
    cancelling = list(_cancelling_records(setup, batch))
    mine = range(processes.rank, len(neighbours) + len(cancelling), processes.size)
    found: dict[int, Any] = {}
    for place in mine:
        if place < len(neighbours):
            found[place] = _pair_or_note(setup, mixed, base, neighbours[place])
        else:
            alone = _compared_with_none(setup, base, cancelling[place - len(neighbours)])
            found[place] = alone.over, dataclasses.asdict(_as_pair(alone))
    texts = processes.texts("audited pairs", json.dumps(list(found.items())))
    if not processes.leads:
        return [], []
    every = dict(item for text in texts for item in json.loads(text))
    return _pairs_and_notes(setup, [every[place] for place in range(len(neighbours))], every, len(cancelling))


def _pairs_and_notes(
    setup: PrivateSetup, compared: list[Any], every: dict[int, Any], cancelling: int
) -> tuple[list[NeighbourPair], list[str]]:
    """The pairs and the notes that the processes found: `compared`, and of the cancelling ones, which come
    last in `every`, the worst.
    """
    notes = []
    if not has_floats(setup):
        notes.append(
            "no record that is not finite was among the neighbours: no input of the dataset is floating point"
        )
    notes += [each for each in compared if isinstance(each, str)]
    pairs = [NeighbourPair(**each) for each in compared if not isinstance(each, str)]
    _, worst = max(
        (every[place] for place in range(len(compared), len(compared) + cancelling)),
        key=lambda each: (not each[1]["holds"], each[0]),
    )
    name = f"a record comes whose positions cancel, the worst of {cancelling}"
    return [*pairs, NeighbourPair(**{**worst, "pair": name})], notes


def _drawn(setup: PrivateSetup, mixed: PrivateSetup, processes: Processes) -> tuple[np.ndarray, int | None]:
    """(the batch that rank 0 draws, its record with the longest gradient; None where it is empty)."""
    message: dict[str, Tensor] = {}
    if processes.leads:
        generator = make_generator(setup.privacy.noise.generator)
        batch = setup.sampling.draw(len(setup.records), generator)[:_MOST_RECORDS]
        message = {"batch": torch.from_numpy(batch), "longest": torch.tensor(_longest(setup, mixed, batch))}
    message = processes.broadcast("audited batch", message)
    return message["batch"].numpy(), next(iter(message["longest"].tolist()), None)


def _pair_or_note(
    setup: PrivateSetup, mixed: PrivateSetup, base: float, neighbours: _NeighbourBatches
) -> dict[str, Any] | str:
    """The fields of a NeighbourPair, or why there is none."""
    try:
        return dataclasses.asdict(_compared(setup, mixed, base, neighbours))
    except DataError as error:
        if neighbours.second.max(initial=-1) < len(setup.records):
            raise
        # an augmentation that takes no such numbers
        return f"not compared: {neighbours.pair}, on which {error.arrived}"


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


def audited_state(setup: PrivateSetup, before: Contributions, processes: Processes) -> list[NeighbourPair]:
    """Whether records still add to the sum what they added before other records were computed, and whether
    the state of the model and the loss is unchanged. Rank 0 has the worst result of all processes; the
    other ranks have none.

    before: `contributions` of before. A model or a loss that keeps what it saw shows here.
    """
    own = dataclasses.asdict(_state_of_one(setup, before))
    every = [NeighbourPair(**json.loads(text)) for text in processes.texts("audited state", json.dumps(own))]
    return [max(every, key=lambda pair: (not pair.holds, pair.distance))] if every else []


def _state_of_one(setup: PrivateSetup, before: Contributions) -> NeighbourPair:
    """The result of `audited_state` for this process alone."""
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
    # By values, and not by counts of writes: ranks give each other the same weights again.
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


def _neighbours(
    setup: PrivateSetup, mixed: PrivateSetup, batch: np.ndarray, longest: int | None
) -> Iterator[_NeighbourBatches]:
    """The neighbours of a batch, as the relation has them. longest: its record with the longest gradient."""
    count = len(setup.records)
    extremes = dict(zip(_EXTREME_FACTORS, range(count, len(mixed.records)), strict=False))
    outside = np.setdiff1d(np.arange(count), batch)
    chosen = _chosen(batch, longest)
    if setup.privacy.relation == "replace_one":
        others = dict(zip(("another", "one more of the others"), outside[:2], strict=False)) | extremes
        for name, other in others.items():
            for place, which in chosen.items():
                yield _NeighbourBatches(
                    f"{which} becomes {name}", batch, _sorted(batch[batch != place], other), count
                )
        if len(batch) and len(outside):
            yield _NeighbourBatches("a batch of one record becomes another", batch[:1], outside[:1], count)
        return
    more = 0 if setup.privacy.relation == "zero_out" else 1
    for place, which in chosen.items():
        yield _NeighbourBatches(f"{which} goes", batch, batch[batch != place], count - more)
    if len(outside):
        yield _NeighbourBatches("a record comes", batch, _sorted(batch, outside[0]), count + more)
    for name, monster in extremes.items():
        yield _NeighbourBatches(
            f"a record comes whose inputs are {name}", batch, _sorted(batch, monster), count + more
        )
    yield _NeighbourBatches(
        "a record comes into an empty batch",
        batch[:0],
        np.array([batch[0] if len(batch) else 0]),
        count + more,
    )
    for place, which in list(chosen.items())[:1]:
        yield _NeighbourBatches(
            f"{which} comes into an empty batch", batch[:0], np.array([place]), count + more
        )


def _longest(setup: PrivateSetup, mixed: PrivateSetup, batch: np.ndarray) -> list[int]:
    """The record of a batch with the longest gradient; none of an empty one."""
    if not len(batch):
        return []
    norms = mixed.source(batch)(setup.clipping).records.norms
    return [int(mixed.streams.drawn[int(norms.nan_to_num(nan=-1.0).argmax())])]


def _chosen(batch: np.ndarray, longest: int | None) -> dict[int, str]:
    """Records of a batch to take out: the one with the longest gradient, and a few more."""
    if longest is None:
        return {}
    rest = [int(record) for record in batch if record != longest][:_MORE]
    return {longest: "the record with the longest gradient"} | {record: f"record {record}" for record in rest}


def _sorted(batch: np.ndarray, record: int) -> np.ndarray:
    return np.sort(np.append(batch, record))


def _compared(
    setup: PrivateSetup, mixed: PrivateSetup, base: float, neighbours: _NeighbourBatches
) -> NeighbourPair:
    """What a step gives on two batches of the datasets `mixed`."""
    arguments = _arguments(setup, base)
    datasets = iter((len(setup.records), neighbours.records))

    def public(noisy: NoisySum) -> dict[str, object]:
        """The ledger's header and first line, for a dataset with the number of records of this batch's
        dataset.
        """
        size = next(datasets)
        resized = dataclasses.replace(setup, records=Records.of_rows(size))
        training = PrivateTraining(
            setup.parameters,
            setup.source,
            size,
            **setup.step_arguments(base),
            optimizer=torch.optim.SGD(setup.parameters.values(), lr=0.0),
            generator=make_generator(setup.privacy.noise.generator),
        )
        line = Statement(resized, base, arguments["generator"]).ledger_line(training.event(), training)
        return {
            f"the ledger's {name}": value for name, value in {**ledger_header(resized, base), **line}.items()
        }

    # Records are drawn when they are asked for: there is one source at a time.
    first, second = (
        lambda clipping, records=records: _by_record(mixed, records)(clipping)
        for records in (neighbours.first, neighbours.second)
    )
    return _as_pair(compare_neighbours(first, second, **arguments, pair=neighbours.pair, public=public))


def _arguments(setup: PrivateSetup, base: float) -> dict[str, Any]:
    """What `compare_neighbours` takes of a run: its first step, of batches that are drawn already."""
    found = {**setup.step_arguments(base), "noise": setup.noise(base)(0)}
    del found["sampling"]
    return {**found, "generator": make_generator(setup.privacy.noise.generator)}


def _as_pair(found: Replayed) -> NeighbourPair:
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(NeighbourPair)}
    return NeighbourPair(**{**fields, "differing": list(found.differing)})


# -- records whose positions cancel --------------------------------------------------------------------------


@dataclass(frozen=True)
class _CancellingRecord:
    """Three rows [3] of the dataset, and the weight of each.

    The record's loss is that of the rows, added up with weights that take one row's gradient back, but for a
    small share, and leave a little of another. Whatever operators the model has, the rows meet as positions
    in its gradients.
    """

    rows: np.ndarray
    weights: tuple[float, float, float]


def _cancelling_records(setup: PrivateSetup, batch: np.ndarray) -> Iterator[_CancellingRecord]:
    """Records whose positions cancel, made of rows of the first records of a batch; of the first row where
    the batch is empty.
    """
    starts = [int(setup.records.rows_of(int(record))[0]) for record in batch[:_CANCELLING]] or [0]
    for start, (same, weights) in itertools.product(starts, _TAKEN_BACK):
        rows = np.full(3, start)
        rows[3 - same] = (start + 1) % len(setup.run.samples)
        yield _CancellingRecord(rows, weights)


def _compared_with_none(setup: PrivateSetup, base: float, record: _CancellingRecord) -> Replayed:
    """What a step on this record alone gives, beside one on no record."""
    one, none = _cancelling_source(setup, record, 1), _cancelling_source(setup, record, 0)
    return compare_neighbours(one, none, **_arguments(setup, base))


def _cancelling_source(setup: PrivateSetup, record: _CancellingRecord, count: int) -> GradientSource:
    """The clipped sum of one record, or of none."""
    objective, block = setup.run.objective, setup.run.reader.take(record.rows)
    device = next(iter(objective.params.values())).device
    rows, target = to_device(block.inputs, block.target, device, setup.run.dtype)
    weights = torch.tensor(record.weights, dtype=torch.float64)
    inputs = tuple(x.to(device)[None][:count] for x in (*rows, weights))
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
