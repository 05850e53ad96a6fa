"""Measures of the user's own, in the config as file.py:Class: what is wrong with them is told by
their name.
"""

from __future__ import annotations

import pandas as pd
import pytest
import yaml

from tests.forked_ranks import run_ranks
from tests.workplace import Workplace

HEAD = """\
from dataclasses import dataclass

import torch

from psgrad.engine.measures.measure import Gathered, Measure, OwnPass


@dataclass
class Mine(Measure):
    times: float = 1.0
    needs_factors = True

"""


def use(place: Workplace, body: str, *others: str) -> None:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (place.folder / "mine.py").write_text(HEAD + lines + "\n")
    place.config["analyze"] = {"measures": [*others, "mine.py:Mine"]}


@pytest.mark.long
def test_its_columns_stand_in_the_table(workplace: Workplace) -> None:
    use(
        workplace,
        "def columns(self, gradients):\n    return {'mine': self.times * gradients.square_norms().half()}",
    )
    workplace.config["analyze"]["measures"] = [{"name": "mine.py:Mine", "times": 2.0}]
    workplace.succeeded()
    samples = workplace.samples()
    pd.testing.assert_series_equal(
        samples["mine"].astype(float), 2 * samples["grad_norm"] ** 2, rtol=2e-3, check_names=False
    )


def columns(value: str) -> str:
    return f"def columns(self, gradients):\n    return {value}"


def gather(value: str) -> str:
    return f"def gather(self, rows):\n    return {value}"


AGAIN = "needs_second_pass = True\n\ndef columns_again(self, gradients):\n    "


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (columns("{'mine': torch.zeros(3)}"), "Mine returned mine of shape (3,) for"),
        (columns("{'mine': torch.zeros(())}"), "Mine returned mine of shape ()"),
        (columns("{'mine': gradients.losses + 1j}"), "Mine returned mine of type torch.complex64"),
        (columns("{'mine': 3.0}"), "Mine returned float as mine in columns"),
        (columns("gradients.losses"), "Mine returned Tensor in columns"),
        (columns("{'loss': gradients.losses}"), "Mine makes a column loss"),
        (columns("{'status': gradients.losses}"), "Mine makes a column status"),
        (columns("{1: gradients.losses}"), "Mine names a tensor 1"),
        (columns("{'margin': gradients.losses}"), "two measures make the column margin"),
        (columns("{'mine': gradients.losses / gradients.nothing}"), "mine.py:14, in columns"),
        ("def prepare(self, setting):\n    raise KeyError('no such thing')", "Mine raised KeyError"),
        ("def summary(self, output, target):\n    return {'mine': int('x')}", "Mine raised ValueError"),
        (
            "def summary(self, output, target):\n    return {'class_outputs.output': output.sum()}",
            "the measure mine keeps class_outputs.output of each output",
        ),
        (gather("{}"), "Mine returned dict in gather"),
        (gather("Gathered(columns={'mine': torch.zeros(2)})"), "of shape (2,) for 24 samples in gather"),
        (gather("Gathered(columns={'margin': torch.zeros(24)})"), "two measures make the column margin"),
        (gather("Gathered(numbers={'a': object()})"), "in gather"),
        (gather("Gathered(tables={'a': 3})"), "Mine returned int as the table a in gather"),
        (gather("Gathered(tables={'a': {'b': [1], 'c': [1, 2]}})"), "in gather"),
        (gather("Gathered(arrays={'a': [1.0]})"), "Mine returned list as a in gather"),
        ("def passes(self):\n    return [3]", "in passes"),
        ("def columns(self, gradients):\n    raise SystemExit(0)", "Mine raised SystemExit"),
        ("def __post_init__(self):\n    raise RuntimeError('no')", "Mine raised RuntimeError: no"),
        (AGAIN + "raise OSError('gone')", "in columns_again"),
        (AGAIN + "return {'margin': gradients.losses}", "the pass samples-again"),
        ("def state(self):\n    return {'a': 1}", "Mine returned int as a in state"),
        ("name = 'margin'", "Mine calls itself margin"),
        ("name = '../up'", "Mine calls itself '../up'"),
        ("needs = ('nothing',)", "a measure needs nothing, which is none"),
    ],
)
def test_what_is_wrong_is_reported_by_its_name(workplace: Workplace, body: str, words: str) -> None:
    use(workplace, body, "margin")
    outcome = workplace.analyze()
    assert outcome.code in (2, 3), outcome.err
    assert words in outcome.err
    assert "Traceback" not in outcome.err
    assert "internal error" not in outcome.err


def test_a_pass_of_its_own_is_checked_too(workplace: Workplace) -> None:
    body = """
def passes(self):
    from psgrad.engine.execution.chunk_measure import Columns

    def run(rows, size):
        yield Columns(rows.start, rows.stop, {"mine": torch.zeros(len(rows) - 1)})

    return [OwnPass("mine-alone", run)]
"""
    use(workplace, body)
    assert "the measure mine.py:Mine returned mine of shape (23,) for 24 samples" in workplace.analyze().err


@pytest.mark.sweep
def test_memory_that_runs_out_in_it_is_no_mistake_of_its_own(workplace: Workplace) -> None:
    body = """
def columns(self, gradients):
    if len(gradients) > 2:
        raise MemoryError("not enough")
    return {"mine": gradients.losses}
"""
    use(workplace, body)
    workplace.config["engine"] = {"chunk_size": 8}
    workplace.succeeded()
    assert (workplace.samples()["mine"] > 0).all()
    assert workplace.manifest()["engine"]["out_of_memory_retries"] > 0


# -- where several processes share the samples ---------------------------------------------------------------

NO_MERGE = "the measure mine gathers over all samples, and has no method merge"
SECOND_PASS = "the measure mine gathers over the samples in its second pass"
# A measure that gathers where it is told to, into a tensor that it changes in place.
GATHERING = """
needs_second_pass = True

def prepare(self, setting):
    self.total = torch.zeros(1, dtype=torch.float64)

def {where}(self, gradients):
    self.total += gradients.losses.double().sum()
    return {{}}

def state(self):
    return {{"total": self.total}}

def restore(self, state):
    self.total = state["total"]

def gather(self, rows):
    return Gathered(numbers={{"total": float(self.total)}})
"""
MERGE = "\ndef merge(self, state):\n    self.total += state['total']\n"


def test_part_of_one_without_merge_is_refused_before_the_first_pass(workplace: Workplace) -> None:
    use(workplace, GATHERING.format(where="columns"))
    workplace.refused(3, NO_MERGE, "add the method, or run", options=("--part", "1/2"))
    assert not (workplace.folder / "out").exists()


@pytest.mark.sweep
def test_ranks_with_one_without_merge_are_refused_before_the_first_pass(workplace: Workplace) -> None:
    use(workplace, GATHERING.format(where="columns"))
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    ended = run_ranks(workplace.folder, 2, "analyze", "config.yaml", "--no-report", "--output", "ranks")
    assert [each.code for each in ended] == [3, 3], ended
    assert NO_MERGE in ended[0].err + ended[1].err
    assert not (workplace.folder / "ranks").exists()


@pytest.mark.long
def test_part_of_one_that_gathers_in_its_second_pass_is_refused(workplace: Workplace) -> None:
    """Also where it changes the tensor of its state; and so is the merge, as no row of that pass is kept."""
    use(workplace, GATHERING.format(where="columns_again") + MERGE)
    workplace.succeeded("--part", "1/2")
    workplace.refused(3, SECOND_PASS, "gather in `columns`", options=("--part", "2/2"))
    workplace.refused(3, SECOND_PASS, options=("--part", "1/2"))
    workplace.command("merge", "out").refused(3, "rows of the pass samples-again are missing")
