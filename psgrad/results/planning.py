"""What `psgrad plan` foretells."""

from __future__ import annotations

from dataclasses import dataclass

from psgrad.results.short_repr import ShortRepr


@dataclass(frozen=True)
class ParameterPlan:
    """How the norms of one parameter's gradients will be computed.

    `terms` are the kinds of terms that the gradient is a sum of, `way` the order in which they are contracted. `microseconds` and
    `bytes` are a sample's, the factors that are kept and the largest intermediate. `factored` is False where an operator needs the
    value, which is then written out for each sample.
    """

    parameter: str
    shape: str
    terms: str
    way: str
    microseconds: float
    bytes: int
    factored: bool


@dataclass(frozen=True, repr=False)
class PlanResult(ShortRepr):
    """What `psgrad plan` foretells of a run.

    `seconds` is for the gradients of all rows, `chunk_seconds` for those of one chunk of `chunk_size` rows. Bytes: `peak_bytes` is what
    the pass over a chunk has at its highest beyond the parameters (`parameter_bytes`) and the chunk's inputs (`input_bytes`).
    `replayed` says whether chunks will be replayed from a record, `replay_reason` why. `obstacle` is why the pass had to run to be
    followed, None where it was not run. `machine` is where prices come from: the device, and who measured it.
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

    @property
    def total_bytes(self) -> int:
        """All that the run has on its device at its highest."""
        return self.peak_bytes + self.input_bytes + self.parameter_bytes
