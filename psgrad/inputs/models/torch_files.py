"""Files of torch.save, read without running anything: what refers to code is not made."""

from __future__ import annotations

import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from psgrad.errors import CheckpointError
from psgrad.inputs.models.checkpoint_headers import SAVE_SAFELY, damaged, require_plain_archive
from psgrad.wording import first_line, first_of

# CVE-2025-32434 and CVE-2026-24747: before this version a file could run code or corrupt memory in spite of
# weights_only.
_SAFE_TORCH = (2, 10)
_SHOWN = 5


class Inert:
    """Stands for an object of code that is not imported, such as an argparse.Namespace beside the weights. It
    takes whatever the file would have given that object, and keeps nothing.
    """

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


@dataclass(frozen=True)
class TorchFile:
    """What torch.save wrote, with an Inert for each object of code, whose names are `left_out`."""

    content: object
    left_out: tuple[str, ...] = ()


def read_torch(path: Path, device: str = "cpu") -> TorchFile:
    """What is in a file of torch.save; on the device "meta" without memory. Raises CheckpointError."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _SAFE_TORCH:
        raise CheckpointError(
            f"the checkpoint {path} is a pickle inside, and torch {torch.__version__} reads those unsafely",
            expected="torch 2.10 or newer, or a .safetensors file",
        )
    require_plain_archive(path)
    try:
        # Warnings are about pickle protocols, which the error below tells better.
        with warnings.catch_warnings(action="ignore"):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            stubs: list[Any] = [(Inert, name) for name in names]  # their names mean nothing else in there
            with torch.serialization.safe_globals(stubs):
                loaded = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise holds_code(path, _refused_object(error)) from error
    except Exception as error:  # a damaged archive fails in as many ways as it has readers
        raise damaged(path, "torch.save archive", first_line(error)) from error
    return TorchFile(loaded, tuple(sorted(names)))


def holds_code(path: Path, cause: str) -> CheckpointError:
    """What is said of a checkpoint that can't be read without running code."""
    return CheckpointError(
        f"the checkpoint {path} holds more than tensors and plain values; nothing in it was executed",
        expected="a state dict, or a dict that contains one",
        cause=cause,
        next_step=SAVE_SAFELY,
    )


def refers_to(names: tuple[str, ...]) -> str:
    """The likely cause of a file whose objects are code."""
    return f"it refers to {first_of(names, _SHOWN)}, which is code"


def _refused_object(error: Exception) -> str:
    # torch's message is a page of advice on how to switch the safety off; the one fact in it is the object's
    # name.
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found:
        return refers_to((found[1],))
    return "a damaged file, or one saved with objects of the training program inside"
