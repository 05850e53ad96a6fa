"""The content of manifest.json as typed values. `psgrad/run/folders.py` stores and loads the file.

The fields of each class are the keys of the file, in its order; what is None is not written, and a key that
is not there has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psgrad.run.results.plain import content_of as content_of
from psgrad.run.results.plain import read as read
from psgrad.wording import unit_of_loss

UNKNOWN_UNIT = "unit of the loss"


@dataclass(frozen=True)
class LossAgreement:
    """How similarly the score and another column order samples; `shared` of the first `top` are the same."""

    other: str = "loss"
    spearman: float | None = None
    top: int | None = None
    shared: int | None = None
    top_overlap: float | None = None
    words: str = ""


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
    caveats: list[str] = field(default_factory=list)

    @property
    def referenced(self) -> bool:
        """Whether samples were compared with trusted ones."""
        return self.decided_by == "reference"

    @property
    def listed(self) -> int:
        """How many finite samples are outliers; without a reference, how many are in the review list."""
        return self.counts.outliers if self.referenced else self.counts.review


@dataclass(frozen=True)
class ModelOrigin:
    """Where a model that no factory built came from: a pretrained one.

    pretrained: as the config names it; folder, commit: where it was found; adapters: a sentence for each.
    """

    pretrained: str | None = None
    folder: str | None = None
    commit: str | None = None
    task: str | None = None
    adapters: list[str] = field(default_factory=list)
    dtype: str | None = None


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
    origin: ModelOrigin = ModelOrigin()

    @property
    def name(self) -> str | None:
        """The factory, or what the config names in its place."""
        return self.factory or self.origin.pretrained


@dataclass(frozen=True)
class DataFacts:
    """The dataset. source: its path, or the factory that makes it. files: each file's hash, in order. notes:
    what was done to rows. A private run does not publish any of it.
    """

    source: Path | str | None = None
    fingerprint: str | None = None
    files: list[str] | None = None
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
    parameters: str | None = None
    recomputed: list[str] | None = None
    processes: int | None = None
    chunk_size: int | None = None
    out_of_memory_retries: int | None = None
    chunks: int | None = None
    chunks_replayed: int | None = None
    replayed_by: str | None = None
    not_replayed: str | None = None
    materialised: list[str] | None = None


@dataclass(frozen=True)
class SelfCheckFacts:
    """The comparison of a few gradients with plain ones; without samples, the reason why there was none.

    of_autocast: against float32, of gradients and of their norms; where products are in half precision.
    """

    samples: int = 0
    reason: str | None = None
    rows: list[int] | None = None
    worst_relative_error: float | None = None
    worst_error_of_autocast: float | None = None
    worst_norm_error_of_autocast: float | None = None


@dataclass(frozen=True)
class Counts:
    """How many rows a run read, of how many; and for a failed run, how many it had finished."""

    samples: int | None = None
    nonfinite: int | None = None
    in_dataset: int | None = None
    training_examples: int | None = None
    training_nonfinite: int | None = None
    queries: int | None = None
    queries_nonfinite: int | None = None
    finished_samples: int | None = None


@dataclass(frozen=True)
class LabelFacts:
    """How many labels the model agrees with. rows: of how many; of: what they are, labels or tokens.

    chance: how many would agree by chance, where no more do. order: where another order of the classes agrees
    far better, pairs of a label and the output that stands for it; agree_in_order: how many agree then.
    """

    rows: int = 0
    agree: int = 0
    of: str = "labels"
    chance: float | None = None
    order: list[Any] | None = None
    agree_in_order: int | None = None


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint of an influence run; all None for the weights that the factory gave."""

    path: str | None = None
    sha256: str | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class QueryFacts:
    """How many queries there are, and which data they are of."""

    rows: int = 0
    fingerprint: str | None = None


@dataclass(frozen=True)
class Coverage:
    """How many numbers a model's parameters have, how many of them scores are about, and the names of the
    parameters that are left out.
    """

    parameters: int = 0
    covered: int = 0
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class InfluenceFacts:
    """The settings of an influence run, and, from `check` on, its results. fit: the facts of the method at
    each checkpoint.
    """

    method: str | None = None
    sign: str | None = None
    unit: str | None = None
    predicts_removal: bool | None = None
    measurement: str | None = None
    normalize: str | None = None
    parameters: list[str] = field(default_factory=list)
    coverage: Coverage = Coverage()
    checkpoints: list[CheckpointFacts] = field(default_factory=list)
    queries: QueryFacts = QueryFacts()
    check: dict[str, Any] | None = None
    fit: list[dict[str, Any]] | None = None
    warnings: list[str] | None = None


@dataclass(frozen=True)
class RunManifest:
    """manifest.json.

    config: as resolved. config_folder: what its paths are relative to. versions: name -> version. hashes: see
    psgrad.commands.run_manifest. identity: all that the rows of `psgrad analyze` depend on. run: the hash of
    the identity that the run began with, which its shards have too. issue_table: what the issue table depends
    on besides the rows, the evaluation data and the folds; None for neither. limit: of --limit, None for the
    whole dataset. sampled_by: the seed by which its rows were drawn; None for the first ones. timings: phase
    -> seconds. state: running, finished, failed or interrupted.
    """

    version: int = 1
    command: str | None = None
    created: str | None = None
    command_line: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    config_folder: str = "."
    versions: dict[str, str] = field(default_factory=dict)
    model: ModelFacts = ModelFacts()
    data: DataFacts = DataFacts()
    hashes: dict[str, Any] = field(default_factory=dict)
    engine: EngineFacts = EngineFacts()
    self_check: SelfCheckFacts = SelfCheckFacts()
    contains_private_statistics: bool = True
    identity: dict[str, Any] | None = None
    run: str | None = None
    issue_table: dict[str, Any] | None = None
    limit: int | float | None = None
    sampled_by: int | None = None
    outliers: OutlierFacts | None = None
    labels: LabelFacts | None = None
    influence: InfluenceFacts = InfluenceFacts()
    evaluation: dict[str, Any] | None = None
    counts: Counts = Counts()
    timings: dict[str, float] = field(default_factory=dict)
    state: str | None = None
    error: str | None = None
    finished: str | None = None

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
        empty = {name for name in _PARTS if getattr(self, name) == getattr(RunManifest(), name)}
        content: dict[str, Any] = content_of(self)
        return {key: value for key, value in content.items() if key not in empty}


# Parts of the manifest that are left out while they are empty.
_PARTS = ("influence", "counts", "timings")


def read_manifest(content: Mapping[str, Any], file: Path | str = "manifest.json") -> RunManifest:
    """The content of manifest.json as typed values. Raises DataError for values of other types."""
    return read(RunManifest, content, str(file))
