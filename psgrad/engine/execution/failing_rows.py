"""Errors that name the rows on which the model, the loss or the memory failed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.errors import ModelError, PsgradError


def failure_together(error: Exception, rows: Sequence[int]) -> PsgradError:
    """Of rows that fail together, and none of them alone."""
    return ModelError(
        f"the model or the loss raised {type(error).__name__} on rows {rows[0]} to {rows[-1]} together,"
        f" though on none of them alone: {_first_line(error)}",
        cause=(
            "memory that is just enough for one sample"
            if is_out_of_memory(error)
            else "a program that depends on the batch's size"
        ),
        next_step="set engine.chunk_size: 1 and engine.verify: 1",
    )


def failure_alone(error: Exception, row: int, inputs: Sequence[torch.Tensor]) -> PsgradError:
    """Of one row, whose inputs on the device are these, [1, ...] each."""
    if isinstance(error, PsgradError):
        return error
    if is_out_of_memory(error):
        return too_large(row, error)
    given = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in inputs)
    cause = (
        "an input of another shape, type or range than the model takes (a token beyond the vocabulary,"
        " another image size)"
    )
    if any(x.dtype == torch.int64 for x in inputs):
        cause = (
            "a token beyond the vocabulary; or whole numbers, such as pixels or the columns of a CSV file,"
            " where the model takes floats as it was trained on (save them as 1.0, or call .float() in the"
            " model's forward)"
        )
    return ModelError(
        f"the model or the loss raised {type(error).__name__} on row {row}: {_first_line(error)}",
        expected=f"a forward pass that works for one row of the columns that the config names: {given}",
        cause=cause,
        next_step="check data.inputs and data.target; --debug shows the line of the model",
    )


def too_large(row: int, error: Exception) -> PsgradError:
    """Of one row that memory runs out on."""
    return ModelError(
        f"memory ran out on row {row} alone: {_first_line(error)}",
        expected="room for one sample's forward and backward pass",
        next_step="use a device with more memory, or engine.dtype: bfloat16",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
