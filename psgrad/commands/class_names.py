"""What the numbers of classes mean in a run: whether the names of a dataset are those of the model's outputs,
whether the loss is one of the model's head, and with how many labels the model agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd

from psgrad.config import Config
from psgrad.config.model import TASK_LOSSES
from psgrad.data.loss import Criterion
from psgrad.data.rows import Samples
from psgrad.errors import ConfigError, DataError, LossError, ModelError
from psgrad.models.factory import LoadedModel
from psgrad.quality.label_agreement import label_facts
from psgrad.run.results.manifest import LabelFacts
from psgrad.wording import first_of

_SHOWN = 20
_HINT = "list all names in data.class_names, in the order of the model's outputs"


def require_names_of_outputs(config: Config, samples: Samples, outputs: int | None, custom: bool) -> None:
    """Raises ConfigError where data.class_names are not as many as the model's outputs, DataError where names
    that only the data tell are not: in sorted order they would be other classes than the model's.

    outputs: how many classes the model has, None where that is not known; custom: whether the loss is one of
    the user's own, of which it is known only where the output is one vector.
    """
    names = config.data.class_names
    unknown = outputs is None and not (custom and samples.names_found == "sorted")
    if names is None or outputs == len(names) or unknown:
        return
    if not samples.names_found:
        raise ConfigError(
            f"data.class_names has {len(names)} names, {first_of(names, _SHOWN)}, and the model has"
            f" {outputs} outputs; expected a name for each class, in the order of the outputs",
        )
    has = "output that does not tell how many classes there are" if outputs is None else f"{outputs} outputs"
    raise DataError(
        f"the labels of {config.data.source} have {len(names)} names, {_counted(samples, names)}, and the"
        f" model has {has}; expected as many names as outputs, where only the data tell the names",
        hint=_HINT,
    )


def _counted(samples: Samples, names: list[str]) -> str:
    """The names with their counts, the rarest first; of a name with one row which one that is."""
    if samples.targets is None:
        return first_of(names, _SHOWN)
    counts = np.bincount(samples.targets[samples.targets >= 0].astype(np.int64), minlength=len(names))
    words = []
    for number in np.argsort(counts, kind="stable")[:_SHOWN].tolist():
        rows = np.flatnonzero(samples.targets == number)
        place = f": {samples.row_name(int(rows[0]))}" if len(rows) == 1 else ""
        words.append(f"{names[number]} ({len(rows):,} row{'' if len(rows) == 1 else 's'}{place})")
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(words) + more


def require_one_numbering(names: list[str] | None, ours: str, other: Samples, theirs: str) -> None:
    """Raises ConfigError where another dataset has labels by name, and the run's own have no names."""
    if names is None and other.names_found == "sorted":
        raise ConfigError(
            f"the labels of {theirs} are names, and those of {ours} are numbers; expected names in both,"
            " or numbers in both",
            hint=_HINT,
        )


def require_loss_of_the_head(loaded: LoadedModel, criterion: Criterion) -> None:
    """Raises ConfigError where a head of several labels a row, or of one a token, would be compared with one
    class a row.
    """
    task = None if loaded.pretrained is None else loaded.pretrained.task
    if task is not None and TASK_LOSSES[task] == "token_cross_entropy" and criterion.kind == "class":
        raise ConfigError(
            f"the task {task} has a label for each token, and the loss {criterion.name} takes one a row;"
            " expected loss: token_cross_entropy, or a loss of your own",
            hint="leave loss out: the task has its own",
        )
    problem = None if loaded.pretrained is None else getattr(loaded.pretrained.config, "problem_type", None)
    if problem == "multi_label_classification" and criterion.kind == "class":
        raise ConfigError(
            f"the model has several labels a row ({problem}), and the loss {criterion.name} has one;"
            " expected loss: bce_with_logits, or a loss of your own",
            hint="say the loss in the config; the task's own is that of one label",
        )


@contextmanager
def errors_about(what: str, keys: str = "") -> Iterator[None]:
    """Errors about data, losses and models say that they are about another dataset than the run's own, such
    as the queries. keys: of the config, in place of data.inputs and data.target.
    """
    try:
        yield
    except (DataError, LossError, ModelError) as error:
        step = error.hint
        if step and keys:
            step = step.replace("data.inputs and data.target", keys)
        raise type(error)(
            f"{what}: {error.message}",
            hint=step,
        ) from error


def label_facts_of(criterion: Criterion, columns: pd.DataFrame, names: list[str] | None) -> LabelFacts | None:
    """How many labels the model agrees with; None where the loss has no classes, or rows no single label.

    columns: loss, and as far as known target, prediction, token_accuracy and length, of some rows. Those
    without a finite loss, and labels that do not count, are left out.
    """
    counted = columns[np.isfinite(columns["loss"].to_numpy("float64"))]
    if criterion.kind == "token" and names is not None and {"token_accuracy", "length"} <= {*counted}:
        lengths = counted["length"].to_numpy("float64")
        agree = round(float(lengths @ counted["token_accuracy"].to_numpy("float64")))
        return LabelFacts(int(lengths.sum()), agree, "tokens")
    if criterion.kind not in ("class", "binary") or not {"target", "prediction"} <= {*counted}:
        return LabelFacts() if names is not None and criterion.kind == "custom" else None
    target, prediction = (
        counted[name].to_numpy("float64", na_value=np.nan) for name in ("target", "prediction")
    )
    kept = np.isfinite(target) & np.isfinite(prediction) & (target != criterion.ignore_index)
    target, prediction = target[kept], prediction[kept]
    if criterion.kind == "binary":
        if not np.isin(target, (0, 1)).all():
            return None  # probabilities, which are no labels
        prediction = prediction > 0.5
    return label_facts(target.astype(np.int64), prediction.astype(np.int64))
