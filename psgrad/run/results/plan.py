"""The results of `psgrad plan`."""

from __future__ import annotations

from dataclasses import dataclass, field

from psgrad.wording import ShortRepr


@dataclass(frozen=True)
class ParameterPlan:
    """How the norms of one parameter's gradients will be computed.

    `terms` are the kinds of terms that the gradient is a sum of, `way` the order in which they are
    contracted. `bytes` are those of a sample's factors, which are kept. `factored` is
    False where an operator needs the value, which is then materialised for each sample.
    """

    parameter: str
    shape: str
    terms: str
    way: str
    bytes: int
    factored: bool


@dataclass(frozen=True, repr=False)
class PlanResult(ShortRepr):
    """The predictions of `psgrad plan` for a run.

    `seconds` is for the gradients of all rows, `chunk_seconds` for those of one chunk of `chunk_size` rows:
    both by two chunks of different sizes that were run. Bytes: `peak_bytes` is the highest memory of the pass
    over a chunk beyond the parameters (`parameter_bytes`) and the chunk's inputs (`input_bytes`). `replayed`
    is whether chunks will be replayed by a program, `replay_reason` why.

    `parameters_live` is where the weights live (resident, offloaded), `parameters_reason` why. `recomputed`
    are the modules that run again in the backward pass.
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
    parameters_live: str = "resident"
    parameters_reason: str = ""
    recomputed: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """All that the run has on its device at its highest."""
        return self.peak_bytes + self.input_bytes + self.parameter_bytes
