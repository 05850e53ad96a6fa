"""What is explained: which rows are queries, and which number of a query."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from psgrad.config.data import DataConfig
from psgrad.config.values import ConfigSection, is_callable_spec, names_in_condition, nearest

_CHOICES = ("rows", "ids", "where", "wrong", "worst")
QUERY_NAMES = ("id", "index", "target", "label", "loss", "prediction", "confidence", "correct")
"""The columns that influence.queries.where can name; label is another name of target."""


def _query_condition(value: str) -> str:
    names_in_condition(value, QUERY_NAMES)
    return value


class QueriesConfig(DataConfig):
    """The queries: a dataset of their own, described as `data` is, whose keys it has where it leaves them
    out; without a source of their own, they are rows of the training data.

    `rows` or `ids` are the rows to ask about, of which `where`, `wrong` and `worst`, in this order, keep
    some; left out, all of them.
    """

    rows: list[Annotated[int, Field(ge=0)]] | None = None
    """The rows that are queries, counted from 0; left out, all of them."""
    ids: list[str | int] | None = None
    """In place of rows: the ids of the rows that are queries."""
    where: Annotated[str, AfterValidator(_query_condition)] | None = None
    """A condition on id, index, target (or label), loss, prediction, confidence and correct."""
    wrong: bool = False
    """Only rows whose predicted class is another than their label."""
    worst: Annotated[int, Field(ge=1)] | None = None
    """Only so many rows, those with the largest loss."""

    contrast: str | None = None
    """The column of a second completion of the same prompt: each row becomes two queries, and what helps the
    completion more than that one is ranked.
    """

    @model_validator(mode="after")
    def _contrast_of_completions(self) -> QueriesConfig:
        if self.contrast is None:
            return self
        if self.completion is None or not self.sources_given:
            raise ValueError(
                "contrast is a second completion of each prompt; name path, prompt and completion of the"
                " queries beside it"
            )
        if self.contrast == self.completion:
            raise ValueError(
                f"contrast and completion are both the column {self.contrast!r}; name two columns"
            )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> QueriesConfig:
        if len(self.sources_given) > 1:
            raise ValueError(f"give one of {', '.join(self.sources_given)}, not several")
        if self.sources_given:
            self._check_columns()
        elif not self.choice_given:
            raise ValueError(
                "neither path, dataset, images, factory nor rows, ids, where, wrong, worst says what the"
                " queries are; leave queries out to ask about all training rows"
            )
        return self

    @property
    def choice_given(self) -> set[str]:
        """The keys that choose among rows, those that are given."""
        return {key for key in _CHOICES if getattr(self, key) not in (None, False)}

    @model_validator(mode="after")
    def _each_row_once(self) -> QueriesConfig:
        if self.rows is not None and self.ids is not None:
            raise ValueError("rows and ids both say which rows are asked about; give one of them")
        for key, listed in (("rows", self.rows), ("ids", self.ids)):
            if listed is not None and not listed:
                raise ValueError(f"{key} is an empty list; name at least one row")
            if listed is not None and len(set(map(str, listed))) < len(listed):
                raise ValueError(f"a row is listed twice in {key}")
        return self

    @property
    def own_data(self) -> DataConfig | None:
        """The queries' own dataset; None where they are rows of the training data."""
        if not self.sources_given:
            return None
        return DataConfig.model_validate(self.model_dump(exclude={*_CHOICES, "contrast"}, exclude_unset=True))

    @property
    def contrast_data(self) -> DataConfig | None:
        """The same dataset with the other completions; None without any."""
        own = self.own_data
        if own is None or self.contrast is None:
            return None
        return own.model_copy(update={"completion": self.contrast})


MEASUREMENTS = ("loss", "margin", "logit", "log_probability")
"""What of a query is explained, by name."""


def _measurement_name(value: str) -> str:
    if value in MEASUREMENTS or is_callable_spec(value):
        return value
    close = nearest(value, MEASUREMENTS)
    suggestion = f"did you mean {close}? " if close else ""
    raise ValueError(
        f"there is no measurement {value!r}; {suggestion}known: {', '.join(MEASUREMENTS)}; or module:callable"
    )


class MeasurementConfig(ConfigSection):
    """What of a query is explained: its loss, the margin or the logit of its class, the log-probability of
    its class or of all its tokens, or a callable of (output, target) that returns one number. `larger_is`
    says whether a large one is good for the query; it is known for the named ones.
    """

    bare: ClassVar[str] = "name"

    name: Annotated[str, AfterValidator(_measurement_name)] = "loss"
    """loss, margin, logit, log_probability, or module:callable(output, target) that returns one number for
    each query.
    """
    larger_is: Literal["better", "worse"] | None = None
    """Of a callable of your own: whether a large value is good for the query."""

    @model_validator(mode="after")
    def _only_for_callables(self) -> MeasurementConfig:
        if self.name in MEASUREMENTS and self.larger_is is not None:
            raise ValueError(f"larger_is goes with a callable of your own; of {self.name} it is known")
        if self.name not in MEASUREMENTS and self.larger_is is None:
            raise ValueError(
                "larger_is is missing: better, or worse as a loss has it; without it scores would have no"
                " sign"
            )
        return self
