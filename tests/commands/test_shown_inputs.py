"""What of a sample's input reaches a report: the values of a table's row, and the words of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from psgrad.data.previews import MAX_VALUES, input_of, values_of
from psgrad.data.rows import Block, Samples
from psgrad.run import RunFolder
from psgrad.run.finished import load_run
from tests.workplace import Workplace


class Rows(Samples):
    """One row of these inputs, of which the last may be its weight."""

    def __init__(self, names: list[str], *inputs: Any, weighted: bool = False) -> None:
        super().__init__(np.array(["row"]), None, "")
        self.weighted = weighted
        self.input_names, self.block = (
            tuple(names),
            Block(tuple(torch.as_tensor(x)[None] for x in inputs), None),
        )

    def take(self, rows: Any) -> Block:
        return self.block


@pytest.mark.parametrize(
    ("samples", "values"),
    [
        (Rows(["age", "hours"], [39.0, 40.5]), (("age", 39.0), ("hours", 40.5))),
        (Rows(["age", "hours"], [39.0, 40.5], 0.5, weighted=True), (("age", 39.0), ("hours", 40.5))),
        (Rows(["age", "kind"], 39.0, 2), (("age", 39.0), ("kind", 2))),
        (Rows(["features"], [1.0, 2.0]), (("features[0]", 1.0), ("features[1]", 2.0))),
        (Rows(["ids"], [3, 17, 22]), (("ids", "3 17 22"),)),
        (Rows([], [1.5]), (("input 0[0]", 1.5),)),
        (Rows(["a", "table"], 1.0, [[1.0, 2.0, 3.0]]), ()),
    ],
)
def test_the_values_of_a_row_have_the_names_of_their_columns(
    samples: Rows, values: tuple[tuple[str, Any], ...]
) -> None:
    found = input_of(samples, 0)
    assert found.values == values
    assert found.image is None
    assert found.text is None


def test_values_of_long_rows_are_bounded() -> None:
    assert len(values_of((torch.zeros(1, 5000),), ["x"])) == MAX_VALUES
    ((_, words),) = values_of((torch.zeros(1, 5000, dtype=torch.int64),), ["x"])
    assert str(words).endswith("0 and 4,800 more")


@pytest.mark.long
def test_values_and_words_come_back_from_the_folder(workplace: Workplace) -> None:
    workplace.succeeded()
    RunFolder(workplace.folder / "out").write_inputs(
        load_run(workplace.folder / "out").top_inputs, {0: "[PAD]", 5: "good"}
    )
    assert load_run(workplace.folder / "out").vocabulary == {0: "[PAD]", 5: "good"}


@pytest.mark.long
def test_no_value_is_kept_where_inputs_are_left_out(workplace: Workplace) -> None:
    workplace.config["report"] = {"include_inputs": False}
    workplace.succeeded()
    assert not (workplace.folder / "out" / "inputs").exists()
    assert b'id="values"' not in (workplace.folder / "out" / "report.html").read_bytes()
