"""What a config names, made live: the model, the loss, the data, and the engine's stream over them.

Ctrl-C at a moment that suits: what must not be left half done is finished first.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad.config import Config
from psgrad.engine.execution.loading import Read
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.self_check import SelfCheck, self_check
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import machine
from psgrad.engine.measures.output_values import summary_for
from psgrad.engine.transforms import random_draws
from psgrad.errors import ConfigError
from psgrad.inputs.loss import Criterion, resolve_loss
from psgrad.inputs.models.factory import LoadedModel, load_model
from psgrad.inputs.models.identity import ModelIdentity, identify
from psgrad.inputs.rows import Block, Samples
from psgrad.inputs.sources.load import load_data
from psgrad.inputs.targets import check_targets

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Setup:
    """The parts of a run.

    `dtype` is the type of parameters and inputs; see `pick_precision`. `first_output` calls the model on the
    first row. `identity` is the model's as it was loaded.
    """

    config: Config
    device: torch.device
    dtype: torch.dtype
    loaded: LoadedModel
    criterion: Criterion
    samples: Samples
    model: nn.Module
    objective: Objective
    reader: CheckedReader
    first_output: Callable[[], Any]
    identity: ModelIdentity

    @property
    def randomness(self) -> str:
        """Of what a model draws, as for vmap: a model in eval mode draws nothing."""
        return "different" if self.model.training else "error"

    def stream(
        self, say: Callable[[str], None], loss: Loss | None = None, read: Read | None = None
    ) -> Stream:
        """Gradients chunk by chunk, as the config's engine section wants them: of the dataset's rows, or of
        what `read` and `loss` know.
        """
        return Stream(
            self.objective.loss if loss is None else loss,
            self.objective.params,
            self.reader if read is None else read,
            **self.stream_options(say),
        )

    def stream_options(self, say: Callable[[str], None]) -> dict[str, Any]:
        """How the config's engine section wants chunks to be taken, as arguments of Stream."""
        engine = self.config.engine
        return {
            "chunk_size": engine.chunk_size,
            "memory": None if engine.memory == "auto" else engine.memory,
            "randomness": self.randomness,
            "capture": engine.capture,
            "compile": engine.compile,
            "say": say,
        }

    def self_check(self, stream: Stream) -> SelfCheck | None:
        """How far our gradients are from plain ones, on a few rows; None where the model draws at random, and
        can't be asked twice.
        """
        if draws_at_random(self.first_output, self.model):
            return None
        return self_check(self.objective, stream, len(self.samples), self.config.engine.verify)


def set_up(
    config: Config,
    *,
    trainable: Sequence[str] | None = None,
    trainable_key: str = "privacy.trainable",
    unit: str | None = None,
    built: Callable[[nn.Module, Criterion], None] = lambda model, criterion: None,
) -> Setup:
    """Load all that a config names. Of the parameters only those that fit a pattern in `trainable` are
    trained; None for those that the factory left trainable; `trainable_key` is the config's name for them.
    `unit` is the column of the data that says whom each row belongs to. `built` is called with the model and
    the loss before any row goes through them.

    Raises PsgradError for everything that can be wrong with the config, the model or the data.
    """
    device = pick_device(config.engine.device)
    use_machine(config, device)
    dtype, autocast = pick_precision(config.engine.dtype)
    loaded = load_model(config.model, config.base, trainable, trainable_key)
    identity = identify(loaded.model)  # now: a pass forward may change buffers and attributes
    criterion = resolve_loss(config.loss, config.base)
    samples = load_data(config.data, config.base, unit)
    model = loaded.model.to(device, dtype)
    built(model, criterion)
    summary = summary_for(criterion.kind, criterion.ignore_index)
    objective = Objective(model, criterion.function, summary, autocast=autocast)
    first_output = partial(output_of_first_row, model, samples, device, dtype)
    reader = CheckedReader(samples, criterion, class_count(first_output, criterion))
    return Setup(
        config, device, dtype, loaded, criterion, samples, model, objective, reader, first_output, identity
    )


def pick_device(name: str) -> torch.device:
    """The device of a config; 'auto' is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"engine.device: {name!r} can't be used: {str(error).splitlines()[0]}",
            expected="auto, cpu, cuda or cuda:N",
            next_step="set engine.device: auto, or install a PyTorch build for this device",
        ) from error
    return device


def use_machine(config: Config, device: torch.device) -> None:
    """Have the machine's constants that the config names in force, if it names any. Raises ConfigError where
    they can't be used.
    """
    machine.use(None if config.engine.machine is None else config.base / config.engine.machine)
    machine.machine(device)


def pick_precision(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    """(the type of parameters and inputs, the type that autocast computes in) of a config's dtype; None
    without autocast.

    A checkpoint in bfloat16 is loaded as float32 just the same, which holds each of its numbers exactly.
    """
    kind: torch.dtype = getattr(torch, name)
    return (torch.float32, kind) if kind == torch.bfloat16 else (kind, None)


def output_of_first_row(model: nn.Module, samples: Samples, device: torch.device, dtype: torch.dtype) -> Any:
    """What the model says to the first row as a batch of one, without psgrad's transforms."""
    inputs = samples.read(0, 1).inputs
    with torch.no_grad():
        return model(*[x.to(device, dtype if x.is_floating_point() else None) for x in inputs])


class CheckedReader:
    """Reads blocks whose targets fit the loss. Where all targets are at hand they are checked at once, before
    any work.

    `targets` are those of one number per row, for the table: [n], None where there are none. For a dataset
    that yields its targets with its rows only, they are noted as the rows pass by, and are zero until then.
    So are `contents`, [n] digests of what each row holds, empty until then, and `lengths`, [n] how many
    positions of each row count, zero until then, where they are asked for.
    """

    contents: np.ndarray[Any, Any] | None = None
    lengths: np.ndarray[Any, Any] | None = None

    def __init__(self, samples: Samples, criterion: Criterion, classes: int | None) -> None:
        self.samples, self.criterion, self.classes = samples, criterion, classes
        self.targets = samples.targets
        self._known = samples.targets is not None
        self._noted = np.zeros(len(samples), bool)
        if samples.targets is not None:
            check_targets(criterion, torch.as_tensor(samples.targets), classes)

    def __call__(self, start: int, stop: int) -> Block:
        with self.samples.reading:
            block = self.samples.read(start, stop)
        if not self._known:
            check_targets(self.criterion, block.target, self.classes, first_row=start)
            self._note(slice(start, stop), block.target)
        if self.contents is not None:
            self.contents[start:stop] = digests(block)
        if self.lengths is not None and block.target is not None:
            self.lengths[start:stop] = (block.target != self.criterion.ignore_index).flatten(1).sum(1).numpy()
        return block

    def take(self, rows: np.ndarray[Any, Any]) -> Block:
        """These rows, in this order."""
        with self.samples.reading:
            block = self.samples.take(rows)
        if not self._known and block.target is not None:
            for place, row in enumerate(rows):  # one by one: a message names the row
                check_targets(
                    self.criterion, block.target[place : place + 1], self.classes, first_row=int(row)
                )
            self._note(rows, block.target)
        elif not self._known:
            check_targets(self.criterion, None, self.classes)
        return block

    def targets_at(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        """The targets of these rows; None where there are none, or not all of the rows have been read."""
        if self.targets is None or not (self._known or self._noted[rows].all()):
            return None
        found: np.ndarray[Any, Any] = self.targets[rows]
        return found

    def _note(self, rows: slice | np.ndarray[Any, Any], target: torch.Tensor | None) -> None:
        if target is None or target.dim() != 1:
            return
        if self.targets is None:
            self.targets = np.zeros(len(self.samples), target.numpy().dtype)
        self.targets[rows], self._noted[rows] = target.numpy(), True


def digests(block: Block) -> list[str]:
    """For each row 32 hexadecimal digits of its inputs and its target: types, shapes and values."""
    tensors = [x.numpy() for x in (*block.inputs, *([] if block.target is None else [block.target]))]
    found = []
    for row in range(len(tensors[0])):
        digest = hashlib.blake2b(digest_size=16)
        for values in tensors:
            digest.update(f"{values.dtype.str}{values.shape[1:]}".encode())
            digest.update(np.ascontiguousarray(values[row]).data)
        found.append(digest.hexdigest())
    return found


def digest_of(identifier: object) -> str:
    """32 hexadecimal digits of a sample's id."""
    return hashlib.blake2b(
        f"id {identifier!r}".encode("utf-8", "backslashreplace"), digest_size=16
    ).hexdigest()


def class_count(first_output: Callable[[], Any], criterion: Criterion) -> int | None:
    """The size of the output's class axis, from one sample; None where the loss knows no classes, or the
    model fails (told later).
    """
    if criterion.kind not in ("class", "token"):
        return None
    try:
        output = first_output()
    except Exception:
        return None
    if not isinstance(output, torch.Tensor) or output.dim() < 2:
        return None
    return int(output.shape[-1 if criterion.kind == "token" else 1])


def draws_at_random(first_output: Callable[[], Any], model: nn.Module) -> bool:
    """Whether the model draws random numbers: then a plain gradient is no witness, as it draws anew."""
    if not model.training:
        return False  # psgrad's own pass refuses random operators there
    before = random_draws.everywhere()
    try:
        first_output()
    except Exception:
        return False
    return random_draws.everywhere() != before


@contextmanager
def held() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the block is done, and are then handled as they would have been. Of each
    the second waits no longer.

    Outside of the main thread, which alone hears signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before: dict[int, Any] = {}

    def wait(signum: int, frame: FrameType | None) -> None:
        waiting.append((signum, frame))
        signal.signal(signum, before[signum])

    for signum in (int(signal.SIGINT), int(signal.SIGTERM)):
        before[signum] = signal.getsignal(signum)
        if callable(before[signum]):
            signal.signal(signum, wait)
    try:
        yield
    finally:
        for signum, handler in before.items():
            if callable(handler):
                signal.signal(signum, handler)
    for arrived, frame in waiting:
        before[arrived](arrived, frame)
