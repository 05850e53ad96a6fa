"""The errors of the user: what is wrong, what to do, and the exit code."""

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

    `message` is one line that says what is wrong with what arrived, and where; `hint` says what to do.
    """

    exit_code = EXIT_RUNTIME

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}\n  hint: {hint}" if hint else message)

    def parts(self) -> dict[str, str | None]:
        """Its kind, message and hint, by name: all that `error_of` needs to make it again."""
        return {"kind": type(self).__name__, "message": self.message, "hint": self.hint}


def one_line(*parts: str | None) -> str:
    """The parts of a message or a hint that are known, in one line."""
    return "; ".join(part for part in parts if part)


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
    known = globals().get(str(parts["kind"]), PsgradError)
    made: PsgradError = known(parts["message"], hint=parts["hint"])
    return made
