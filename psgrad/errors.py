"""The errors of the user: what arrived, what was expected, the likely cause, the next step, and the exit
code.
"""

from __future__ import annotations

from collections.abc import Mapping

EXIT_OK = 0
EXIT_GATE_FAILED = 1
EXIT_USAGE = 2
EXIT_RUNTIME = 3
EXIT_GATE_NOT_EVALUABLE = 4
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class PsgradError(Exception):
    """Base of all errors that psgrad raises on purpose.

    `arrived` is the only part that must be given: one sentence that says what was met, in the user's words.
    The other parts are printed on lines of their own, in the order below, where they are known.
    """

    exit_code = EXIT_RUNTIME

    def __init__(
        self,
        arrived: str,
        *,
        expected: str | None = None,
        cause: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.arrived = arrived
        self.expected = expected
        self.cause = cause
        self.next_step = next_step
        parts = [arrived]
        parts += [
            f"  {label}: {text}"
            for label, text in (("expected", expected), ("likely cause", cause), ("next step", next_step))
            if text
        ]
        super().__init__("\n".join(parts))

    def parts(self) -> dict[str, str | None]:
        """Its kind and its sentences, by name: all that `error_of` needs to make it again."""
        sentences = {name: getattr(self, name) for name in ("arrived", "expected", "cause", "next_step")}
        return {"kind": type(self).__name__, **sentences}


class ConfigError(PsgradError):
    """The command line or the config file is wrong; nothing was run."""

    exit_code = EXIT_USAGE


class ModelError(PsgradError):
    """The model's factory, or the model that it built, can't be used."""


class CheckpointError(PsgradError):
    """The checkpoint can't be read, is not safe to read, or does not fit the model."""


class DataError(PsgradError):
    """The dataset can't be read, or its rows can't be used."""


class UnreadableRow(DataError):
    """What one row holds can't be read; other rows can."""


class LossError(PsgradError):
    """The loss does not return one differentiable scalar per sample."""


class OutputError(PsgradError):
    """The run folder can't be written."""


class OutputExistsError(OutputError):
    """The run folder exists already, and --overwrite was not given."""

    exit_code = EXIT_USAGE


class LedgerError(OutputError):
    """The ledger of a private run is damaged, not this run's, or can't be written: nothing more may be
    released.
    """


class InfluenceError(PsgradError):
    """Scores can't be computed: curvature without an inverse, a solver that does not converge, gradients that
    are not finite.
    """


class MeasureError(PsgradError):
    """A measure does not go with this model, loss or data, or its numbers can't be computed."""


class DistributedError(PsgradError):
    """One of several processes failed, or they can't work together."""


class TransformError(PsgradError, RuntimeError):
    """A function can't be transformed (differentiated, mapped over samples) as it is written.

    It is a RuntimeError too, as the same mistakes are in torch.func.
    """


class TransformArgumentError(TransformError, ValueError):
    """A transform was called with arguments that it does not take.

    A ValueError too: torch.func has it now one way, now the other, and programs that catch either go on
    working.
    """


class UnsupportedOperatorError(TransformError, NotImplementedError):
    """An operator has no rule, and can't be decomposed into operators that have."""


class SelfCheckError(PsgradError):
    """Our gradients disagree with a plain one-sample gradient: no number of this run may be trusted."""


def error_of(parts: Mapping[str, str | None]) -> PsgradError:
    """The error of `PsgradError.parts`, of another process; PsgradError for a kind that is not known here."""
    kind, *sentences = (parts[name] for name in ("kind", "arrived", "expected", "cause", "next_step"))
    arrived, expected, cause, next_step = sentences
    known = globals().get(str(kind), PsgradError)
    made: PsgradError = known(arrived, expected=expected, cause=cause, next_step=next_step)
    return made
