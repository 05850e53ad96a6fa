"""What of a query is explained: a number of its output and target that is large where the model is bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from psgrad.config import MEASUREMENTS, MeasurementConfig
from psgrad.data.loss import Criterion
from psgrad.engine.execution.objective import require_number
from psgrad.errors import ConfigError, LossError
from psgrad.user_code import module_of, resolve


@dataclass(frozen=True)
class Measurement:
    """One number of a query's output and target.

    criterion: (output, target) of one sample to a number that is larger the worse: the measurement itself, or
    minus it. sign: 1, or -1 where `criterion` is minus it. change: what a change for the worse is called,
    with its unit.
    """

    name: str
    criterion: Criterion
    sign: int
    change: str


def resolve_measurement(config: MeasurementConfig, loss: Criterion, base: Path) -> Measurement:
    """The measurement that a config names, for a model trained with this loss.

    Raises ConfigError where the loss has no such measurement, LossError where a callable of the user's own
    can't be imported.
    """
    if config.name == "loss":
        unit = f", in {loss.unit}" if loss.unit is not None else ""
        return Measurement("loss", loss, 1, f"rise of the query's loss{unit}")
    if config.name not in MEASUREMENTS:
        function = resolve(config.name, base, raises=LossError)
        sign, way = (1, "rise") if config.larger_is == "worse" else (-1, "fall")
        criterion = Criterion(
            config.name,
            partial(_times, sign, config.name, function),
            "custom",
            modules_imported=(module_of(config.name),),
        )
        return Measurement(config.name, criterion, sign, f"{way} of the query's {config.name}")
    functions: dict[tuple[str, str], Number] = {
        ("margin", "class"): _margin,
        ("margin", "binary"): _binary_margin,
        ("logit", "class"): _logit,
        ("log_probability", "class"): partial(_log_probability, loss.ignore_index, 1),
        ("log_probability", "token"): partial(_log_probability, loss.ignore_index, 2),
    }
    known = functions.get((config.name, loss.kind))
    if known is None or loss.name == "nll":  # whose outputs are log-probabilities, not logits
        raise ConfigError(
            f"influence.measurement: the loss {loss.name} has no {config.name}; expected a loss of one class"
            f" a sample: cross_entropy{_OTHERS.get(config.name, '')}",
            hint="measure the loss, or name a callable of (output, target) of your own",
        )
    criterion = Criterion(config.name, partial(_minus, known), loss.kind, loss.ignore_index)
    return Measurement(config.name, criterion, -1, _FALLS[config.name])


_FALLS = {
    "margin": "fall of the query's margin, in nats",
    "logit": "fall of the logit of the query's class",
    "log_probability": "fall of the query's log-probability, in nats",
}
_OTHERS = {"margin": " or bce_with_logits", "log_probability": ", or token_cross_entropy"}
Number = Callable[[Any, Any], Any]


def _times(sign: int, name: str, function: Number, output: Any, target: Any) -> Any:
    value = function(output, target)
    require_number(
        value,
        f"the measurement {name}",
        "query",
        hint="it sees the output and the target of one query, without a batch axis",
    )
    return sign * value


def _minus(function: Number, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = -function(output, target)
    return value


def _margin(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The log-odds of the right class, z_y - logsumexp of the others (Park et al., "TRAK", 2023): finite
    where p_y rounds to 1. Zero for a label to be ignored, which is none of the classes.
    """
    right = _is_target(output, target)
    return (_logit(output, target) - output.masked_fill(right, -torch.inf).logsumexp(0)) * right.any()


def _binary_margin(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * (2 * target.reshape(output.shape) - 1)).sum()


def _logit(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.masked_fill(~_is_target(output, target), 0).sum()


def _log_probability(ignored: int, axes: int, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The log-probability of the class, or of all tokens that count together. axes: of the output, the
    classes last.
    """
    _require_labels(output, target, axes)
    logits = output.reshape(-1, output.shape[-1]).double()
    lost = F.cross_entropy(logits, target.reshape(-1), ignore_index=ignored, reduction="sum")
    return -lost.to(output.dtype)


def _is_target(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    _require_labels(output, target, 1)
    return torch.arange(output.shape[0], device=output.device) == target


def _require_labels(output: torch.Tensor, target: torch.Tensor, axes: int) -> None:
    """Raises LossError unless the output has so many axes, the classes last, and the target labels."""
    if output.dim() != axes or target.is_floating_point():
        expected = "logits [c] and one label" if axes == 1 else "logits [positions, classes] and labels"
        raise LossError(
            f"the output of one query has shape {tuple(output.shape)}, its target {tuple(target.shape)} of"
            f" {target.dtype}; expected {expected}",
            hint="measure the loss, or name a callable of (output, target) of your own",
        )
