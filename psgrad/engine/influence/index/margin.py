"""The model's output as one number that the loss is a function of: what TRAK takes gradients of, in place of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.objective import Objective
from psgrad.engine.transforms import grad_and_value
from psgrad.errors import InfluenceError

# What may be left of the loss's slope that the margin does not explain, relative, squared.
_UNEXPLAINED = 1e-4


def margin(output: Any, target: Any) -> torch.Tensor:
    """f of one sample: of logits [c] and a label, z_y - logsumexp(z without y), the log odds of the label; of one number, that number.

    Park et al., "TRAK: Attributing Model Behavior at Scale" (2023), section 3. A label outside the classes (one to ignore)
    has margin zero everywhere, and no gradient.

    Raises InfluenceError for any other output.
    """
    if not isinstance(output, torch.Tensor):
        raise _no_margin(f"the model returned an object of type {type(output).__name__}")
    if output.numel() == 1:
        return output.sum()
    if output.dim() != 1 or not isinstance(target, torch.Tensor) or target.numel() != 1 or target.is_floating_point():
        of = f" and a {str(target.dtype).removeprefix('torch.')} target {list(target.shape)}" if isinstance(target, torch.Tensor) else ""
        raise _no_margin(f"one sample has an output {list(output.shape)}{of}")
    here = torch.arange(len(output), device=output.device) == target.reshape(())
    odds = (output * here).sum() - output.masked_fill(here, -torch.inf).logsumexp(0)
    return odds * here.any()


def _no_margin(arrived: str) -> InfluenceError:
    return InfluenceError(
        f"TRAK has no margin here: {arrived}",
        expected="logits [classes] with one label, or one number",
        cause="a loss over positions or over several values, which is no function of one number of the model's output",
        next_step="choose another method, such as influence or ekfac",
    )


def with_margin(examples: Examples) -> Examples:
    """The same rows, differentiated by their margin; the `aux` of each has `loss`, `weight`, `slope`, `unexplained` [] float64.

    weight: -dl/df, for a cross entropy 1 - p_y, so that the gradient of the loss is -weight * the gradient of the margin. It is found
    from the slopes of loss and margin in the model's output; unexplained: the square of what is left of the loss's slope, whose square
    is `slope`. All is computed in float64: p_y rounds to one in float32 where a sample is learnt.
    """
    criterion = examples.objective.criterion

    def summary(output: torch.Tensor, target: Any) -> dict[str, torch.Tensor]:
        z = output.double()
        slope, loss = _slope(criterion, z, target)
        rise, _ = _slope(margin, z, target)
        square = rise.square().sum()
        weight = -(slope * rise).sum() / torch.where(square > 0, square, torch.ones_like(square))
        return {"loss": loss, "weight": weight, "slope": slope.square().sum(), "unexplained": (slope + weight * rise).square().sum()}

    objective = Objective(examples.objective.model, margin, summary, autocast=examples.objective.autocast)
    objective.params = examples.params
    return replace(examples, objective=objective)


def _slope(function: Callable[[Any, Any], torch.Tensor], output: torch.Tensor, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = grad_and_value(lambda z: function(z, target))(output)
    return found


def require_explained(aux: dict[str, torch.Tensor], numbers: torch.Tensor) -> None:
    """Raises InfluenceError unless the loss of these samples, rows `numbers` [k], is a function of their margin alone."""
    rest, slope = aux["unexplained"], aux["slope"]
    wrong = rest > _UNEXPLAINED * slope + torch.finfo(torch.float64).eps
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InfluenceError(
            f"TRAK: the loss of row {int(numbers[row])} is no function of its margin, which leaves {(rest / slope).sqrt()[row].item():.0%} "
            "of its slope",
            expected="a loss of the label's log odds alone, such as a cross entropy, or a loss of an output that is one number",
            cause="label smoothing, probabilities as targets, or a loss that looks at the other classes one by one",
            next_step="choose another method, such as influence or ekfac",
        )
