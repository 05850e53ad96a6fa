"""What the issue table of a run is made of beside its samples: features of inputs, and probabilities out of
sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from psgrad.commands.class_names import errors_about
from psgrad.commands.setup import Setup
from psgrad.data.derived import DrawnSamples
from psgrad.data.reader import digests
from psgrad.data.rows import Samples
from psgrad.data.sources.load import load_data
from psgrad.engine.execution.loading import Rows
from psgrad.errors import ConfigError, DataError
from psgrad.quality.issues import MOST, Leaks, copies_of, leaks_of
from psgrad.ragged import Block

Array = npt.NDArray[Any]

WIDTH = 32  # features of an input
_ROWS = 64  # read at once
# What a dataset is made of beside inputs: a column of its own is read without these.
_OTHERS = ("target", "text", "prompt", "completion", "messages", "image", "id", "weight")


def label_probabilities(setup: Setup) -> Array | None:
    """[rows, classes]: the column of the dataset that analyze.probabilities names, of the run's rows; None
    where it names none. Raises ConfigError where these are not probabilities of the loss's classes.
    """
    name, config, classes = setup.config.analyze.probabilities, setup.config, setup.reader.classes
    if name is None:
        return None
    if setup.criterion.kind != "class":
        raise ConfigError(
            f"analyze.probabilities: {name!r} is given, and the loss {config.loss.name} has no classes;"
            " expected it with cross_entropy",
        )
    alone = config.data.model_copy(update={**dict.fromkeys(_OTHERS), "inputs": {name: name}})
    column = load_data(alone, config.base)
    drawn = setup.samples.rows if isinstance(setup.samples, DrawnSamples) else np.arange(len(setup.samples))
    values = column.take(drawn).inputs[0].double().numpy()
    if values.ndim != 2 or column.ragged is not None or (classes or values.shape[1]) != values.shape[1]:
        raise ConfigError(
            f"analyze.probabilities: the column {name!r} has rows of the shape {list(values.shape[1:])};"
            f" expected {'a list of the' if classes is None else classes} probabilities, one for each class",
        )
    wrong = ~((values >= 0).all(1) & (np.abs(values.sum(1) - 1) < 1e-3))
    if wrong.any():
        raise ConfigError(
            f"analyze.probabilities: row {int(drawn[wrong.argmax()])} of the column {name!r} is no"
            " distribution over classes; expected numbers from 0 that add up to 1",
        )
    return values


def evaluation_data(setup: Setup) -> Samples | None:
    """The evaluation data, influence.queries; None where the config names none of its own. Raises DataError
    where they have other inputs than the training data.
    """
    queries = setup.config.influence.queries
    if queries is None or queries.own_data is None:
        return None
    with errors_about("the evaluation data", "influence.queries"):
        samples = setup.other_samples(queries.own_data, weighted=False)
        shapes, expected = (
            _shapes(each.take([0]).inputs_alone(each.weighted)) for each in (samples, setup.samples)
        )
        if shapes != expected:
            raise DataError(f"inputs of {shapes}; expected {expected}, as in the training data")
    return samples


def leaks_in(rows: Rows, weighted: bool, features: Array | None, evaluation: Rows, ids: Array) -> Leaks:
    """Which rows are in the evaluation data, whose ids these are: near duplicates, or copies alone where
    there are more evaluation rows than are searched, or inputs that have no features.

    weighted, features: of the rows, see `input_features`.
    """
    if features is not None and (others := searched_features(evaluation)) is not None:
        return leaks_of(features, others, ids)
    return copies_of(_prints(rows, weighted), _prints(evaluation), ids)


def _shapes(block: Block) -> str:
    kinds = [f"{'' if each.is_floating_point() else 'whole '}numbers" for each in block.inputs]
    shapes = [list(each.shape[1:]) if block.ragged is None else "" for each in block.inputs]
    return " and ".join(f"{kind} {shape}".strip() for kind, shape in zip(kinds, shapes, strict=True))


def _prints(rows: Rows, weighted: bool = False) -> list[str]:
    """A digest of the inputs of each row; empty where these are not finite."""
    found: list[str] = []
    for start in range(0, len(rows), _ROWS):
        block = rows.take(range(start, min(start + _ROWS, len(rows)))).inputs_alone(weighted)
        finite = [each.isfinite().flatten(1).all(1).tolist() for each in block.inputs]
        every = map(all, zip(*finite, strict=True))
        found += [own if known else "" for own, known in zip(digests(block), every, strict=True)]
    return found


def searched_features(rows: Rows, weighted: bool = False) -> Array | None:
    """`input_features`; None for more rows than are searched."""
    return input_features(rows, weighted) if len(rows) <= MOST else None


def input_features(rows: Rows, weighted: bool = False) -> Array | None:
    """[n, WIDTH]: each row's inputs in few numbers, such that near inputs have near ones: random projections
    of fractions, and means of random functions of whole numbers, such as tokens, in any order. None for
    fractions whose number differs from row to row. weighted: whether the last input is the weight of a row,
    which counts for nothing.
    """
    found: list[Array] = []
    matrices: dict[tuple[int, int], Array] = {}
    for start in range(0, len(rows), _ROWS):
        block = rows.take(range(start, min(start + _ROWS, len(rows))))
        # Rows of unequal lengths one by one, without the padding between them.
        apart = block.lengths is not None
        for part in [block.at(slice(row, row + 1)) for row in range(len(block))] if apart else [block]:
            each = []
            for place, tensor in enumerate(part.inputs[: len(part.inputs) - weighted]):
                draw = np.random.default_rng(place)
                flat = tensor.reshape(len(tensor), -1).double().numpy()
                if not tensor.is_floating_point():
                    waves = np.cos(flat[..., None] * draw.uniform(1, 1000, WIDTH) + draw.uniform(0, 7, WIDTH))
                    each.append(waves.mean(1))
                    continue
                if apart:
                    return None
                size = (place, flat.shape[1])
                if size not in matrices:
                    matrices[size] = draw.standard_normal((flat.shape[1], WIDTH)) / WIDTH**0.5
                each.append(flat @ matrices[size])
            found.append(np.sum(each, axis=0))
    return np.concatenate(found)
