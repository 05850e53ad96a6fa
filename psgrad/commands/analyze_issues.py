"""What the issue table of a run is made of beside its samples: features of inputs, and probabilities out of
sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from psgrad.commands.setup import Setup
from psgrad.data.derived import DrawnSamples
from psgrad.data.sources.load import load_data
from psgrad.engine.execution.loading import Rows
from psgrad.errors import ConfigError

Array = npt.NDArray[Any]

WIDTH = 32  # features of an input
_ROWS = 64  # read at once
# What a dataset is made of beside inputs: a column of its own is read without these.
_OTHERS = ("target", "text", "prompt", "completion", "messages", "image", "id", "weight")


def label_probabilities(run: Setup) -> Array | None:
    """[rows, classes]: the column of the dataset that analyze.probabilities names, of the run's rows; None
    where it names none. Raises ConfigError where these are not probabilities of the loss's classes.
    """
    name, config, classes = run.config.analyze.probabilities, run.config, run.reader.classes
    if name is None:
        return None
    if run.criterion.kind != "class":
        raise ConfigError(
            f"analyze.probabilities: {name!r} is given, and the loss {config.loss.name} has no classes;"
            " expected it with cross_entropy",
        )
    alone = config.data.model_copy(update={**dict.fromkeys(_OTHERS), "inputs": {name: name}})
    column = load_data(alone, config.base)
    drawn = run.samples.rows if isinstance(run.samples, DrawnSamples) else np.arange(len(run.samples))
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


def input_features(rows: Rows) -> Array | None:
    """[n, WIDTH]: each row's inputs in few numbers, such that near inputs have near ones: random projections
    of fractions, and means of random functions of whole numbers, such as tokens, in any order. None for
    fractions whose number differs from row to row.
    """
    found: list[Array] = []
    matrices: dict[tuple[int, int], Array] = {}
    for start in range(0, len(rows), _ROWS):
        block = rows.take(range(start, min(start + _ROWS, len(rows))))
        # Rows of unequal lengths one by one, without the padding between them.
        apart = block.lengths is not None
        for part in [block.at(slice(row, row + 1)) for row in range(len(block))] if apart else [block]:
            each = []
            for place, tensor in enumerate(part.inputs):
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
