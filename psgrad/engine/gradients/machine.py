"""The machine constants that are used: an override, else constants that were measured on this machine and
stored in a file, else built-in ones.

Only `psgrad plan` measures constants (machine_calibration.py). Queries and imports do not.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from psgrad.engine.gradients.costs import Machine, machine_of
from psgrad.errors import ConfigError

# A path to a JSON file with a machine's constants, or "default" for the built-in ones.
VARIABLE = "PSGRAD_MACHINE"

_BUILT_IN = {
    # One core of a server of 2023. The rates of products and of memory grow with the threads.
    "cpu": Machine(
        name="some CPU",
        origin="built in",
        product={"float32": 8e10, "float64": 4e10, "bfloat16": 8e10},
        thin_rows=(0.24, 0.45, 0.77, 0.95, 1.0),
        thin_columns=(0.24, 0.25, 0.76, 0.95, 1.0),
        thin_inner=(0.2, 0.41, 0.78, 0.96, 1.0),
        matrix_seconds=2e-8,
        stream=(
            (1 << 10, 1e10),
            (1 << 14, 6e10),
            (1 << 18, 9e10),
            (1 << 22, 7e10),
            (3 << 23, 2.5e10),
            (5 << 23, 4e9),
        ),
        scattered=1.2e10,
        transcendental=1.2e9,
        pooling=2.5e8,
        convolution=0.8,
        grouped_convolution=0.7,
        attention=0.65,
        call_seconds=1e-6,
        operator_seconds=5e-5,
        kernel_seconds=5e-6,
    ),
    "cuda": Machine(
        name="some GPU",
        origin="built in",
        product={"float32": 4e13, "float64": 2e13, "bfloat16": 4e14, "float16": 4e14},
        thin_rows=(0.01, 0.04, 0.15, 0.5, 1.0),
        thin_columns=(0.01, 0.04, 0.15, 0.5, 1.0),
        thin_inner=(0.02, 0.08, 0.3, 0.7, 1.0),
        matrix_seconds=2e-9,
        stream=((1 << 16, 1e11), (1 << 20, 8e11), (1 << 26, 2e12)),
        scattered=5e11,
        transcendental=2e11,
        pooling=5e10,
        convolution=0.5,
        grouped_convolution=0.1,
        attention=0.4,
        call_seconds=3e-6,
        operator_seconds=6e-5,
        kernel_seconds=6e-6,
        asynchronous=True,
    ),
}

_chosen: Path | Machine | None = None  # by a config
_current: dict[tuple[str, int | None, int], Machine] = {}


def machine(device: torch.device) -> Machine:
    """The constants for a device.

    Raises ConfigError if an override is a file that can't be used. A cache file that can't be read is
    ignored.
    """
    key = device.type, device.index, torch.get_num_threads()
    constants = _current.get(key)
    if constants is None:
        constants = _current[key] = _overridden(device) or _cached(device) or built_in(device)
    return constants


def use(chosen: Path | Machine | None) -> None:
    """Use these constants, or those of a file, for all devices. None removes this override."""
    global _chosen
    _chosen = chosen
    _current.clear()


def keep(measured: Machine, device: torch.device) -> Path | None:
    """Use these constants, and store them for later runs. Returns the file; None if it can't be written,
    which is not an error.
    """
    if _overridden(device) is None:
        _current[device.type, device.index, torch.get_num_threads()] = measured
    text = json.dumps(measured.to_json(), indent=1) + "\n"
    try:
        path = cache_file(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        # renamed when complete, because another process may read at the same time
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(path)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return path


def is_known(device: torch.device) -> bool:
    """Whether constants of this device were measured or overridden."""
    return machine(device).origin != "built in" or os.environ.get(VARIABLE) == "default"


def built_in(device: torch.device) -> Machine:
    """Constants for a device that was not measured: those of a typical device."""
    constants = _BUILT_IN["cpu" if device.type == "cpu" else "cuda"]
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return replace(
        constants,
        product={dtype: rate * threads for dtype, rate in constants.product.items()},
        stream=tuple((size, rate * min(threads, 4)) for size, rate in constants.stream),
        scattered=constants.scattered * min(threads, 4),
        transcendental=constants.transcendental * threads,
        pooling=constants.pooling * threads,
    )


def cache_file(device: torch.device) -> Path:
    """The file of the constants of this device, number of threads and version of PyTorch."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{device_name(device)}-{torch.get_num_threads()}-threads-torch-{torch.__version__}"
    return base / "psgrad" / (re.sub(r"[^\w.+-]+", "-", name) + ".json")


def device_name(device: torch.device) -> str:
    """The manufacturer's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    models = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return models[0].strip() if models else "cpu"


def _overridden(device: torch.device) -> Machine | None:
    named = os.environ.get(VARIABLE)
    if isinstance(_chosen, Machine):
        return _chosen
    path = _chosen or (Path(named) if named else None)
    if path is None:
        return None
    if path is not _chosen and named == "default":
        return built_in(device)
    source = "engine.machine" if path is _chosen else VARIABLE
    try:
        return machine_of(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise ConfigError(
            f"{source}: {path} can't be read: {error.strerror}",
            expected="a JSON file of a machine's constants",
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{source}: {path} does not describe a machine: {error}",
            expected="a JSON file as `psgrad plan` writes it",
            next_step=(
                f"run `psgrad plan` without it to measure this machine, and start from {cache_file(device)}"
            ),
        ) from error


def _cached(device: torch.device) -> Machine | None:
    try:
        path = cache_file(device)
        return machine_of(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError):
        return None
