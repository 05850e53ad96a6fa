"""The content of manifest.json as typed values. `psgrad/run/folders.py` stores and loads the file.

The fields of each class are the keys of the file, in its order. `content_of` gives what is written.
`read_manifest` reads it: a key that is missing or null, as in runs of earlier versions, has its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from psgrad.wording import unit_of_loss

UNKNOWN_UNIT = "unit of the loss"


# Metadata of a field whose key is left out of the file: `written` is asked with the object and the value.
OPTIONAL: dict[str, Any] = {"written": lambda _, value: value is not None}
_ORIGIN: dict[str, Any] = {"written": lambda model, _: model.origin != ModelOrigin()}
_REPLAY: dict[str, Any] = {"written": lambda engine, _: engine.chunks_replayed is not None}
_CHECK: dict[str, Any] = {"written": lambda facts, _: facts.predicts_removal and facts.fit is not None}
_GAP: dict[str, Any] = {"written": lambda _, gap: gap.rows is not None}
_LIMIT: dict[str, Any] = {"written": lambda run, _: run.identity is not None}


@dataclass(frozen=True)
class LossAgreement:
    """How similarly the score and another column order samples; `shared` of the first `top` are the same, and
    by the rank correlation `expected` would be.
    """

    other: str = "loss"
    spearman: float | None = None
    top: int | None = None
    shared: int | None = None
    top_overlap: float | None = None
    words: str = ""
    expected: float | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class ScoreGap:
    """`rows` samples have scores far above all others: the next is `factor` times smaller. None: there is no
    such gap.
    """

    rows: int | None = None
    factor: float | None = None


@dataclass(frozen=True)
class Separability:
    """Whether more samples are unusual than can be flagged: `surplus` more; words if `low`."""

    surplus: float | None = None
    low: bool | None = None
    words: str | None = None


@dataclass(frozen=True)
class ReferenceFacts:
    """The trusted samples that others were compared with. in_both: how many of the run's are among them."""

    kind: str | None = None
    source: str | None = None
    size: int = 0
    nonfinite: int = 0
    in_both: int = 0


@dataclass(frozen=True)
class GroupFacts:
    """One group: its samples, its trusted ones, and what these can decide."""

    samples: int | None = None
    tested: int = 0
    reference: int | None = None
    smallest_p: float | None = None
    smallest_flaggable: int | None = None
    evaluable: bool | None = None


@dataclass(frozen=True)
class Groups:
    """Groups by a column, None for none. joined: those with fewer than min_group samples."""

    by: str | None = None
    min_group: int | None = None
    joined: list[str] = field(default_factory=list)
    each: dict[str, GroupFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class OutlierCounts:
    """How many samples there are of each kind."""

    samples: int = 0
    ok: int = 0
    nonfinite: int = 0
    skipped: int = 0
    zero_gradients: int = 0
    tested: int = 0
    outliers: int = 0
    review: int = 0


@dataclass(frozen=True)
class DetectorFacts:
    """A detector beside the score. flagged: how many samples it would name."""

    title: str | None = None
    flagged: int | None = None
    reference: int | None = None
    meaning: str | None = None


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
    smallest_flaggable: int | None = None
    resolution: str | None = None
    counts: OutlierCounts = OutlierCounts()
    loss_agreement: LossAgreement = LossAgreement()
    gap: ScoreGap = field(default=ScoreGap(), metadata=_GAP)
    separability: Separability = Separability()
    robust_z: dict[str, Any] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)
    detectors: dict[str, DetectorFacts] = field(default_factory=dict)

    @property
    def referenced(self) -> bool:
        """Whether samples were compared with trusted ones."""
        return self.decided_by == "reference"


_PRETRAINED: dict[str, Any] = {"written": lambda origin, _: origin.pretrained is not None}


@dataclass(frozen=True)
class ModelOrigin:
    """Where a model that no factory built came from: a pretrained one, or one of timm.

    pretrained: as the config names it; folder, commit: where it was found; adapters: a sentence for each.
    timm: the model's name there; version: of timm.
    """

    pretrained: str | None = field(default=None, metadata=_PRETRAINED)
    folder: str | None = field(default=None, metadata=_PRETRAINED)
    commit: str | None = field(default=None, metadata=_PRETRAINED)
    task: str | None = field(default=None, metadata=_PRETRAINED)
    adapters: list[str] = field(default_factory=list, metadata=_PRETRAINED)
    dtype: str | None = field(default=None, metadata=_PRETRAINED)
    timm: str | None = field(default=None, metadata=OPTIONAL)
    version: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class ModelFacts:
    """The model: where it came from, and how many numbers it has. sha256: of the checkpoint's file. origin:
    of a model that no factory built.
    """

    factory: str | None = None
    parameters: int | None = None
    trainable: int | None = None
    checkpoint: Path | str | None = None
    sha256: str | None = None
    notes: list[str] = field(default_factory=list)
    modules_imported: list[str] = field(default_factory=list)
    origin: ModelOrigin = field(default=ModelOrigin(), metadata=_ORIGIN)

    @property
    def name(self) -> str | None:
        """The factory, or what the config names in its place."""
        return self.factory or self.origin.pretrained or self.origin.timm


@dataclass(frozen=True)
class DataFacts:
    """The dataset. source: its path, or the factory that makes it. files: each file's hash, in order. notes:
    what was done to rows. A private run does not publish any of it.
    """

    source: Path | str | None = None
    fingerprint: str | None = None
    files: list[str] | None = field(default=None, metadata=OPTIONAL)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EngineFacts:
    """The device and settings of the computation; from chunk_size on what is known after the passes.
    parameters: where weights live, if not on the device. recomputed: the modules that ran again in the
    backward pass. chunks: how many the first process computed. chunks_replayed, replayed_by: how many of
    these a program computed, and of which kind. not_replayed: why not more.
    """

    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    parameters: str | None = field(default=None, metadata=OPTIONAL)
    recomputed: list[str] | None = field(default=None, metadata=OPTIONAL)
    processes: int | None = field(default=None, metadata=OPTIONAL)
    chunk_size: int | None = field(default=None, metadata=OPTIONAL)
    out_of_memory_retries: int | None = field(default=None, metadata=OPTIONAL)
    chunks: int | None = field(default=None, metadata=OPTIONAL)
    chunks_replayed: int | None = field(default=None, metadata=OPTIONAL)
    replayed_by: str | None = field(default=None, metadata=_REPLAY)
    not_replayed: str | None = field(default=None, metadata=OPTIONAL)
    materialised: list[str] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class SelfCheckFacts:
    """The comparison of a few gradients with plain ones; without samples, the reason why there was none.

    of_autocast: against float32, of gradients and of their norms; where products are in half precision.
    """

    samples: int = 0
    reason: str | None = field(default=None, metadata=OPTIONAL)
    rows: list[int] | None = field(default=None, metadata=OPTIONAL)
    worst_relative_error: float | None = field(default=None, metadata=OPTIONAL)
    worst_error_of_autocast: float | None = field(default=None, metadata=OPTIONAL)
    worst_norm_error_of_autocast: float | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Counts:
    """How many rows a run read, of how many; and for a failed run, how many it had finished."""

    samples: int | None = field(default=None, metadata=OPTIONAL)
    nonfinite: int | None = field(default=None, metadata=OPTIONAL)
    in_dataset: int | None = field(default=None, metadata=OPTIONAL)
    training_examples: int | None = field(default=None, metadata=OPTIONAL)
    training_nonfinite: int | None = field(default=None, metadata=OPTIONAL)
    queries: int | None = field(default=None, metadata=OPTIONAL)
    queries_nonfinite: int | None = field(default=None, metadata=OPTIONAL)
    finished_samples: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class LabelFacts:
    """How many labels the model agrees with. rows: of how many; of: what they are, labels or tokens.

    chance: how many would agree by chance, where no more do. order: where another order of the classes agrees
    far better, pairs of a label and the output that stands for it; agree_in_order: how many agree then.
    """

    rows: int = 0
    agree: int = 0
    of: str = "labels"
    chance: float | None = field(default=None, metadata=OPTIONAL)
    order: list[Any] | None = field(default=None, metadata=OPTIONAL)
    agree_in_order: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class InfluenceFacts:
    """The settings of an influence run, and, from `check` on, its results.

    checkpoints: path, sha256 and learning_rate of each. queries: rows and fingerprint. fit: the facts of the
        method at each checkpoint. coverage: by parts of the model, which of its parameters scores are about;
        see psgrad.commands.influence_tables. search: of an approximate search of an index, which share of
        the strongest rows it has found.
    """

    method: str | None = None
    sign: str | None = None
    unit: str | None = None
    predicts_removal: bool | None = None
    measurement: str | None = None
    normalize: str | None = None
    average: str | None = field(default=None, metadata=OPTIONAL)
    parameters: list[str] = field(default_factory=list)
    coverage: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    queries: dict[str, Any] = field(default_factory=dict)
    check: dict[str, Any] | None = field(default=None, metadata=_CHECK)
    fit: list[dict[str, Any]] | None = field(default=None, metadata=OPTIONAL)
    search: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    warnings: list[str] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class RunManifest:
    """manifest.json.

    config: as resolved. config_folder: what its paths are relative to. versions: name -> version. hashes: see
    psgrad.commands.run_identity. identity: all that the rows of `psgrad analyze` depend on. run: the hash of
    the identity that the run began with, which its shards have too. limit: of --limit, None for the whole
    dataset. sampled_by: the seed by which its rows were drawn; None for the first ones.
    ranks: of a run by several processes, the backend and each process's host, rows (of a private run
    records) and seconds.
    timings: phase -> seconds. state: running, finished, failed or interrupted.
    """

    version: int = 1
    command: str | None = None
    created: str | None = None
    command_line: str | None = None
    revision: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    config_folder: str = "."
    versions: dict[str, str] = field(default_factory=dict)
    model: ModelFacts = ModelFacts()
    data: DataFacts = DataFacts()
    hashes: dict[str, Any] = field(default_factory=dict)
    engine: EngineFacts = EngineFacts()
    self_check: SelfCheckFacts = SelfCheckFacts()
    contains_private_statistics: bool = True
    identity: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    run: str | None = field(default=None, metadata=OPTIONAL)
    limit: int | float | None = field(default=None, metadata=_LIMIT)
    sampled_by: int | None = field(default=None, metadata=OPTIONAL)
    outliers: OutlierFacts | None = field(default=None, metadata=OPTIONAL)
    labels: LabelFacts | None = field(default=None, metadata=OPTIONAL)
    influence: InfluenceFacts = InfluenceFacts()
    evaluation: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    counts: Counts = Counts()
    ranks: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    timings: dict[str, float] = field(default_factory=dict)
    state: str | None = field(default=None, metadata=OPTIONAL)
    error: str | None = field(default=None, metadata=OPTIONAL)
    finished: str | None = field(default=None, metadata=OPTIONAL)

    @property
    def loss(self) -> Any:
        """The loss's name."""
        loss = self.config.get("loss")
        return loss.get("name") if isinstance(loss, Mapping) else loss

    @property
    def loss_unit(self) -> str:
        """The unit of a loss: nats for psgrad's own cross-entropies, with what is done over tokens; of any
        other one the unit is not known.
        """
        return unit_of_loss(self.loss, self.setting("loss", "reduction") or "mean") or UNKNOWN_UNIT

    @property
    def judged(self) -> OutlierFacts:
        """How samples were judged, with defaults for a run of an earlier version."""
        return self.outliers or OutlierFacts()

    @property
    def score(self) -> str:
        """The column that decided which samples are outliers, as the config names it."""
        return str(self.setting("analyze", "outliers", "score") or "grad_norm")

    @property
    def partial(self) -> str | None:
        """A part of a sentence if the run read a part of its dataset."""
        looked, there = self.counts.samples or 0, self.counts.in_dataset or 0
        if looked >= there:
            return None
        which = "the first" if self.sampled_by is None else f"by seed {self.sampled_by} at random"
        return f"looked at {which} {looked:,} of {there:,} samples (--limit)"

    def setting(self, *keys: str) -> Any:
        """A value of the config by its keys, one inside the other; None where there is none."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def content(self) -> dict[str, Any]:
        """What the file holds. Parts of a run that has none of them are left out."""
        result = content_of(self)
        return {key: value for key, value in result.items() if value or key not in _PARTS}


# Parts of the manifest that are left out while they are empty.
_PARTS = ("influence", "counts", "timings")


def content_of(value: Any) -> Any:
    """The keys and values that are written of an object: an object inside that says nothing is null."""
    if isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())):
        return {key: content_of(each) for key, each in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    result = {}
    for each in dataclasses.fields(value):
        inner = getattr(value, each.name)
        written = each.metadata.get("written")
        if written is not None and not written(value, inner):
            continue
        empty = dataclasses.is_dataclass(inner) and inner == each.default
        result[each.name] = None if empty else content_of(inner)
    return result


def read_manifest(content: Mapping[str, Any]) -> RunManifest:
    """The content of manifest.json as typed values."""
    return read(RunManifest, content)


T = TypeVar("T")


def read(kind: type[T], content: Any) -> T:
    """A dataclass from what JSON holds: unknown keys are left out, missing and null ones are the default."""
    given = content if isinstance(content, Mapping) else {}
    hints = get_type_hints(kind)
    given_names = [each.name for each in dataclasses.fields(kind) if given.get(each.name) is not None]  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], given[name]) for name in given_names})


def _value(hint: Any, value: Any) -> Any:
    if isinstance(hint, UnionType):
        hint = get_args(hint)[0]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read(hint, value)
    inner = get_args(hint)[1] if get_origin(hint) is dict else None
    if dataclasses.is_dataclass(inner) and isinstance(inner, type):
        return {str(key): read(inner, each) for key, each in value.items()} if isinstance(value, dict) else {}
    return value
