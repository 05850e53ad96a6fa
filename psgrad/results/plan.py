"""The results of `psgrad plan`."""

from __future__ import annotations

from dataclasses import dataclass, field

from psgrad.wording import ShortRepr


@dataclass(frozen=True)
class ParameterPlan:
    """How the norms of one parameter's gradients will be computed.

    `terms` are the kinds of terms that the gradient is a sum of, `way` the order in which they are
    contracted. `microseconds` and `bytes` are a sample's, the factors that are kept and the largest
    intermediate. `factored` is False where an operator needs the value, which is then materialised for each
    sample.
    """

    parameter: str
    shape: str
    terms: str
    way: str
    microseconds: float
    bytes: int
    factored: bool


@dataclass(frozen=True)
class ProcessesPlan:
    """The prediction for a run on several processes, from a simulation (`psgrad.engine.execution.cluster`).

    `seconds` is from the start to the last file, `efficiency` the seconds of one process over those of all
    together. `spent` has the seconds of a process by what they go to, and `bottleneck` is the largest of them
    beside computing. Bytes: `gathered_bytes` is what the measures of one process gather, `network_bytes` goes
    between processes, `storage_bytes` is read from and written to the storage. `assumed` are constants of the
    machines that were not measured.

    `parameters_live` is where the weights of a process would live on such machines: resident, sharded over
    `group` processes, or offloaded; `held_bytes` are those on a device, and `moved_bytes` come to it for a
    chunk.
    """

    processes: int
    seconds: float
    efficiency: float
    spent: dict[str, float]
    bottleneck: str
    gathered_bytes: int
    network_bytes: int
    storage_bytes: int
    assumed: dict[str, float]
    parameters_live: str = "resident"
    group: int = 1
    held_bytes: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True, repr=False)
class PlanResult(ShortRepr):
    """The predictions of `psgrad plan` for a run.

    `seconds` is for the gradients of all rows, `chunk_seconds` for those of one chunk of `chunk_size` rows.
    Bytes: `peak_bytes` is the highest memory of the pass over a chunk beyond the parameters
    (`parameter_bytes`) and the chunk's inputs (`input_bytes`). `replayed` is whether chunks will be replayed
    by a program, `replay_reason` why. `obstacle` is why the pass had to run for the prediction, None if it
    did not. `machine` is the source of prices: the device, and who measured it.

    `parameters_live` is where the weights live (resident, offloaded, sharded), `parameters_reason` why, and
    `moved_bytes` what of them comes to the device for a chunk; `shard_ranks` is of how many ranks each keeps
    a part of a weight. `recomputed` are the modules that run again in the backward pass. `processes` is the
    prediction for several processes, where one was asked for.
    """

    parameters: list[ParameterPlan]
    rows: int
    chunk_size: int
    seconds: float
    chunk_seconds: float
    peak_bytes: int
    input_bytes: int
    parameter_bytes: int
    replayed: bool
    replay_reason: str
    obstacle: str | None
    machine: str
    parameters_live: str = "resident"
    parameters_reason: str = ""
    shard_ranks: int = 1
    moved_bytes: int = 0
    recomputed: list[str] = field(default_factory=list)
    processes: ProcessesPlan | None = None

    @property
    def total_bytes(self) -> int:
        """All that the run has on its device at its highest."""
        return self.peak_bytes + self.input_bytes + self.parameter_bytes
