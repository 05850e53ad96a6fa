"""What holds for every test: the device, the seeds, a precision at which a difference means a mistake, and
who runs it.
"""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import register_random, settings

from tests.device.checked import CHECKED, checked_device
from tests.device.factories import made_on
from tests.device.strict_or_gpu import NAMED, named_device
from tests.seeds import set_seed

if TYPE_CHECKING:
    from tests.influence_workplace import InfluenceWorkplace
    from tests.workplace import Outcome, Workplace

# The same examples in every run: a test that fails does so for everybody. The first call on a device is slow,
# so no deadline.
settings.register_profile("psgrad", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("psgrad")


class TorchRandom:
    """torch's generator in the form that hypothesis asks for, so that an example always draws the same
    tensors.
    """

    seed = staticmethod(set_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


torch_random = TorchRandom()  # hypothesis keeps a weak reference only
register_random(torch_random)

# A test with more cases runs every second one by default, and the others in the sweep; one that is marked
# `every(n)` each n-th, and all of them with `every(1)`.
MANY_CASES = 12
# On a named device of those that are marked each fourth at most: their numbers are judged without it.
EVERY_ON_A_DEVICE = 4

# The part of the sweep that runs, such as 2/4; None for all of it.
SWEEP_PART = os.environ.get("PSGRAD_SWEEP_PART")

if NAMED == CHECKED:
    checked_device()  # now, as PyTorch's autograd counts devices when it first runs

torch.set_num_threads(min(2, torch.get_num_threads()))

# A shell that starts the tests in the background has them ignore Ctrl-C, and their children, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes share the tests: for the whole suite one a core, at most four; what is named on the
    command line runs in this one.

    `--dist worksteal` gives each at first a run of neighbouring files, so that what a module sets up is set
    up once, or twice.
    """
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(
            variable, "1"
        )  # the workers load their libraries with it, and hand it on to what they start
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 4)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put cases into the sweep: for `every`, and without it every second one of many. Of the sweep leave the
    part that PSGRAD_SWEEP_PART names, "2/4" being the second of four. Where PSGRAD_TEST_DEVICE names a
    device, leave only tests that have one, and those of tests/device.
    """
    unmarked = defaultdict[str, list[pytest.Item]](list)
    cases = Counter[str]()
    for item in items:
        if item.get_closest_marker("sweep") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        every = item.get_closest_marker("every")
        if every is None:
            unmarked[test].append(item)
        elif cases[test] % (every.args[0] if NAMED is None else max(every.args[0], EVERY_ON_A_DEVICE)):
            item.add_marker(pytest.mark.sweep)
        cases[test] += 1
    for some in unmarked.values():
        for item in some[1::2] if len(some) > MANY_CASES else ():
            item.add_marker(pytest.mark.sweep)
    if SWEEP_PART is not None:
        number, count = map(int, SWEEP_PART.split("/"))
        _leave_out(
            config,
            items,
            lambda item: (
                item.get_closest_marker("sweep") is not None
                and zlib.crc32(item.nodeid.encode()) % count != number % count
            ),
        )
    if NAMED is not None:
        _leave_out(
            config,
            items,
            lambda item: (
                "device" not in getattr(item, "fixturenames", ()) and item.path.parent.name != "device"
            ),
        )


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], is_out: Callable[[pytest.Item], bool]
) -> None:
    others = {item for item in items if is_out(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    """What was imported and collected stays, so that the garbage collections that tests and engine ask for
    need not look through it.
    """
    gc.collect()
    gc.freeze()


# TF32 keeps 10 bits of mantissa, less than any tolerance below.
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session")
def device() -> torch.device:
    return named_device()


def _where_tests_make_tensors() -> AbstractContextManager[None]:
    device = named_device()
    return nullcontext() if device.type == "cpu" else made_on(device)


@pytest.fixture(scope="module")
def on_device(device: torch.device) -> Iterator[None]:
    """The tests of a file that uses it make their tensors on the device without naming one (factories.py);
    on the CPU nothing changes.
    """
    with _where_tests_make_tensors():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """The constants of such a file are made on the device, too, when it is imported."""
    of_a_file = isinstance(collector, pytest.Module)
    with (
        _where_tests_make_tensors()
        if of_a_file and '"on_device"' in collector.path.read_text()
        else nullcontext()
    ):
        return (yield)


@pytest.fixture
def device_with_autocast(device: torch.device) -> torch.device:
    """The device of the run, if PyTorch's autocast knows it."""
    if device.type == CHECKED:
        pytest.skip("autocast does not know the device of tests/device")
    return device


@pytest.fixture(autouse=True)
def _seeded() -> None:
    set_seed(0)


@pytest.fixture
def workplace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Workplace:
    """A folder with a config that works, to be changed by the test."""
    from tests.workplace import Workplace  # it needs more than torch, which the engine's tests do not

    return Workplace(tmp_path, monkeypatch, capfd)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """run(*words) is `psgrad` with these words."""
    from tests.workplace import run_command

    return lambda *words: run_command(monkeypatch, capfd, *map(str, words))


@pytest.fixture
def influence_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> InfluenceWorkplace:
    """A folder with a config of influence that works, and its queries, to be changed by the test."""
    from tests.influence_workplace import InfluenceWorkplace

    place = InfluenceWorkplace(tmp_path, monkeypatch, capfd)
    place.prepare()
    return place
