"""What manifest.json holds, as typed values: the keys that readers of a finished run use.

`read_manifest` makes them from the file's content. A key that is missing or null, as in runs of earlier
versions, has its default. `workflows` and `storage` write the file; a key that they add is added here as soon
as something reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from psgrad.wording import LOSSES_IN_NATS

UNKNOWN_UNIT = "unit of the loss"


@dataclass(frozen=True)
class LossAgreement:
    """How far the score and another column put samples into the same order: rank correlation, and how many of
    the first `top` they share.
    """

    other: str = "loss"
    spearman: float | None = None
    top: int | None = None
    shared: int | None = None
    words: str = ""


@dataclass(frozen=True)
class Separability:
    """Whether more samples are strange than can be told apart; empty words where that is not so."""

    words: str = ""


@dataclass(frozen=True)
class ReferenceFacts:
    """The trusted samples that others were compared with."""

    kind: str | None = None
    source: str | None = None
    size: int = 0


@dataclass(frozen=True)
class GroupFacts:
    """One group: its samples, its trusted ones, and what these can tell."""

    samples: int | None = None
    reference: int | None = None
    smallest_p: float | None = None
    smallest_flaggable: int | None = None
    evaluable: bool | None = None


@dataclass(frozen=True)
class Groups:
    """By which column samples were grouped, None for not at all, and each group."""

    by: str | None = None
    each: dict[str, GroupFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class DetectorFacts:
    """A detector beside the score. flagged: how many samples it would name."""

    title: str | None = None
    meaning: str | None = None
    flagged: int | None = None


@dataclass(frozen=True)
class OutlierFacts:
    """How samples were judged: `outliers` of the manifest.

    decided_by is "reference" or "review list"; why_not: why a verdict was not possible, where `evaluable` is
    False; resolution: a sentence about the least that the reference can tell.
    """

    score: str = "grad_norm"
    tail: str = "upper"
    fdr: float | None = None
    review_fraction: float | None = None
    decided_by: str | None = None
    reference: ReferenceFacts = ReferenceFacts()
    groups: Groups = Groups()
    evaluable: bool = True
    why_not: str | None = None
    resolution: str | None = None
    loss_agreement: LossAgreement = LossAgreement()
    separability: Separability = Separability()
    detectors: dict[str, DetectorFacts] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)

    @property
    def referenced(self) -> bool:
        """Whether samples were compared with trusted ones."""
        return self.decided_by == "reference"


@dataclass(frozen=True)
class ModelFacts:
    """The model: where it came from, and how many numbers it has."""

    factory: str | None = None
    parameters: int | None = None
    trainable: int | None = None
    checkpoint: str | None = None
    sha256: str | None = None
    notes: list[str] = field(default_factory=list)
    modules_imported: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DataFacts:
    """The dataset."""

    source: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class EngineFacts:
    """On what the run was computed."""

    device: str | None = None
    dtype: str | None = None
    chunk_size: int | None = None


@dataclass(frozen=True)
class SelfCheckFacts:
    """The comparison of a few gradients with plain ones; without samples, the reason why there was none."""

    samples: int = 0
    worst_relative_error: float | None = None
    worst_error_of_autocast: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Counts:
    """Of the dataset, before --limit."""

    in_dataset: int | None = None


@dataclass(frozen=True)
class InfluenceFacts:
    """What an influence run was asked for. checkpoints: path and learning_rate of each."""

    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    normalize: str | None = None
    predicts_removal: bool | None = None
    unit: str | None = None


@dataclass(frozen=True)
class RunManifest:
    """manifest.json. config: as resolved; limit: of --limit, None for the whole dataset; timings: phase ->
    seconds; versions: name -> version.
    """

    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    model: ModelFacts = ModelFacts()
    data: DataFacts = DataFacts()
    engine: EngineFacts = EngineFacts()
    self_check: SelfCheckFacts = SelfCheckFacts()
    counts: Counts = Counts()
    influence: InfluenceFacts = InfluenceFacts()
    outliers: OutlierFacts | None = None
    limit: int | None = None
    created: str | None = None
    command_line: str | None = None
    revision: str | None = None

    @property
    def loss(self) -> Any:
        """The loss's name."""
        loss = self.config.get("loss")
        return loss.get("name") if isinstance(loss, Mapping) else loss

    @property
    def loss_unit(self) -> str:
        """The unit of a loss: nats for psgrad's own cross-entropies; of any other one the unit is not
        known.
        """
        return "nats" if self.loss in LOSSES_IN_NATS else UNKNOWN_UNIT

    @property
    def judged(self) -> OutlierFacts:
        """How samples were judged, with defaults for a run of an earlier version."""
        return self.outliers or OutlierFacts()


def read_manifest(content: Mapping[str, Any]) -> RunManifest:
    """The content of manifest.json as typed values."""
    return read(RunManifest, content)


T = TypeVar("T")


def read(kind: type[T], content: Any) -> T:
    """A dataclass from what JSON holds: unknown keys are left out, missing and null ones have their
    default.
    """
    given = content if isinstance(content, Mapping) else {}
    hints = _hints(kind)  # type: ignore[arg-type]
    known = [each.name for each in dataclasses.fields(kind) if given.get(each.name) is not None]  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], given[name]) for name in known})


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: Any) -> Any:
    if isinstance(hint, UnionType):
        hint = get_args(hint)[0]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read(hint, value)
    inner = get_args(hint)[1] if get_origin(hint) is dict else None
    if dataclasses.is_dataclass(inner) and isinstance(inner, type):
        return {str(key): read(inner, each) for key, each in value.items()} if isinstance(value, dict) else {}
    return value
