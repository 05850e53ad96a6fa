"""Records of several rows: their gradient is that of the rows, averaged or summed before the clipping, and
each is its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy.batches import stream_source
from psgrad.engine.privacy.clipping import MARGIN, Clipping
from psgrad.engine.privacy.records import RecordReader, Records
from psgrad.errors import DataError
from psgrad.ragged import Block
from tests.oracles import one_sample_gradients
from tests.small_models import ARCHITECTURES

USERS = np.array([3, 3, 1, 3, 2, 1, 1, 1, 9, 9, 2, 3, 3, 7])  # 5, 4, 2, 2 and 1 rows
NAMES = [architecture.name for architecture in ARCHITECTURES]


def stream_of(objective: Objective, reader: RecordReader, **options: Any) -> Stream:
    return Stream(reader.loss_of(objective.loss), objective.params, reader, **options)


def whole(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in gradients.values()], dim=1).double()


# -- Which rows are whose ------------------------------------------------------------------------------------


@given(units=st.lists(st.sampled_from("abcde"), min_size=1, max_size=20), cap=st.none() | st.integers(1, 4))
def test_records_rows_of_unit_up_to_cap(units: list[str], cap: int | None) -> None:
    records = Records.of_units(np.array(units), cap)

    in_order = list(dict.fromkeys(units))
    expected = [[row for row, unit in enumerate(units) if unit == name][:cap] for name in in_order]
    assert [records.rows_of(record).tolist() for record in range(len(records))] == expected
    assert records.sizes.tolist() == [len(rows) for rows in expected]
    assert records.longest == max(map(len, expected))
    chosen = np.arange(len(records))[::-2]
    assert records.rows_of_each(chosen).tolist() == [row for record in chosen for row in expected[record]]


def test_records_one_row_each() -> None:
    records = Records.of_rows(7)
    assert (len(records), records.longest) == (7, 1)
    assert records.rows_of(4).tolist() == [4]
    assert records.rows_of_each(np.array([1, 5])).tolist() == [1, 5]


def test_records_unit_of_many_rows_without_cap_refused() -> None:
    units = np.array(["eve"] * 1001 + ["bob"])
    with pytest.raises(DataError) as caught:
        Records.of_units(units)
    assert "the unit eve has 1001 rows, and all rows of a unit are in memory together" in str(caught.value)
    assert "expected privacy.unit.max_rows where a unit has more than 1000 rows" in str(caught.value)
    assert Records.of_units(units, 1001).longest == 1001
    assert Records.of_units(units[1:]).longest == 1000


def test_records_units_independent() -> None:
    def rows(units: list[str]) -> dict[str, list[int]]:
        records = Records.of_units(np.array(units), 2)
        return {units[result[0]]: result.tolist() for result in map(records.rows_of, range(len(records)))}

    assert rows(list("abcabca")) == {"a": [0, 3], "b": [1, 4], "c": [2, 5]}
    assert rows(list("abcabcaxxx")) == {"a": [0, 3], "b": [1, 4], "c": [2, 5], "x": [7, 8]}


# -- The gradient of a record --------------------------------------------------------------------------------


def test_records_layer_stays_factored() -> None:
    model = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 4))
    inputs, target = (torch.randn(14, 50),), torch.randint(4, (14,))
    reader = RecordReader(Records.of_units(USERS), Block(inputs, target))
    reader.draw(range(5))
    gradients = stream_of(Objective(model, nn.functional.cross_entropy), reader).gradients(range(5))
    (placed,) = gradients.parts[0].gradients["0.weight"].terms
    shapes = sorted(tuple(x.shape) for x in placed.term.factors)
    assert shapes == [(5, 1, 5, 50), (5, 1, 5, 60)]  # users, 1, rows, features


def test_records_of_one_row_reading() -> None:
    inputs, target = (torch.randn(6, 4),), torch.arange(6)
    reader = RecordReader(Records.of_rows(6), Block(inputs, target))
    reader.draw([1, 4, 5])

    def loss(*_: Any) -> None: ...

    batch = reader.take(range(2))
    assert reader.loss_of(loss) is loss
    assert [x.tolist() for x in batch.inputs] == [inputs[0][[1, 4]].tolist()]
    assert batch.target is not None
    assert batch.target.tolist() == [1, 4]


def test_records_without_a_target() -> None:
    x = torch.randn(14, 3, dtype=torch.float64)
    model = nn.Linear(3, 2, dtype=torch.float64)
    reader = RecordReader(Records.of_units(USERS), Block((x,), None))
    reader.draw(range(5))
    gradients = stream_of(Objective(model, lambda output, _: output.square().sum()), reader).gradients(
        range(5)
    )
    by_hand = 2 * model(x).detach()[:, :, None] * x[:, None]
    expected = torch.stack([by_hand[reader.records.rows_of(record)].mean(0) for record in reader.drawn])
    torch.testing.assert_close(gradients.materialise()["weight"], expected, rtol=1e-12, atol=1e-12)


def test_records_rows_draw_independently() -> None:
    x = torch.ones(14, 400)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(400, 1))
    reader = RecordReader(Records.of_units(USERS), Block((x,), None))
    reader.draw([0, 1])
    loss = reader.loss_of(Objective(model, lambda output, _: output.sum()).loss, randomness="different")
    stream = Stream(loss, dict(model.named_parameters()), reader, randomness="different")
    torch.manual_seed(0)
    gradient = stream.gradients(range(2)).materialise()["1.weight"].squeeze(1)
    # each row is dropped, or kept and doubled
    kept = gradient * torch.from_numpy(reader.records.sizes[reader.drawn])[:, None] / 2
    assert set(kept[0].round().tolist()) == {0, 1, 2, 3, 4, 5}
    assert set(kept[1].round().tolist()) == {0, 1, 2, 3, 4}
    assert (kept - kept.round()).abs().max() < 1e-5


# -- In a stream ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_records_clipping_of_users(name: str) -> None:
    architecture = ARCHITECTURES[NAMES.index(name)]
    model = architecture.build(dtype=torch.float64)
    inputs, target = architecture.batch(len(USERS), dtype=torch.float64)
    rows = one_sample_gradients(model, architecture.loss, inputs, target)
    records = Records.of_units(USERS, 4)
    reader = RecordReader(records, Block(inputs, target))
    reader.draw([4, 1, 0, 3])
    result = stream_source(stream_of(Objective(model, architecture.loss), reader, chunk_size=3), 4)(
        Clipping.flat(rows, 0.3)
    )

    users = torch.stack([part.mean(0) for part in (whole(rows)[records.rows_of(r)] for r in reader.drawn)])
    clipped = (users * (0.3 * (1 - MARGIN) / users.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
    summed = torch.cat([result.sums[name].flatten() for name in rows])
    assert (summed - clipped).norm() <= 1e-9 * clipped.norm()
    torch.testing.assert_close(result.records.norms, users.norm(dim=1), rtol=1e-9, atol=0)


@pytest.mark.long
def test_records_nonfinite_row_removes_user_from_sum() -> None:
    x, y = torch.randn(14, 6), torch.randint(4, (14,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    objective = Objective(model, nn.functional.cross_entropy)
    clipping = Clipping.flat(objective.params, 0.3)

    def summed(x: Tensor, drawn: list[int]) -> dict[str, Tensor]:
        reader = RecordReader(Records.of_units(USERS), Block((x,), y))
        reader.draw(drawn)
        return stream_source(stream_of(objective, reader), len(drawn))(clipping).sums

    poisoned = x.clone()
    poisoned[USERS == 2] = torch.nan  # the third user to be met
    torch.testing.assert_close(
        summed(poisoned, [0, 1, 2, 3, 4]), summed(x, [0, 1, 3, 4]), rtol=1e-6, atol=1e-6
    )
