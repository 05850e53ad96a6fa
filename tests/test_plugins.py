"""The registry of plugins: those of psgrad, of other packages, and of a config's own files."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from psgrad.config import plugin_names
from psgrad.errors import ConfigError, MeasureError
from psgrad.plugins import (
    KINDS,
    LOSSES,
    MEASURES,
    PluginKind,
    configured,
    find,
    located,
    own_classes,
)
from tests.workplace import Workplace

BASES = {kind.group: located(kind.base) for kind in KINDS}
OTHER_PACKAGE = """
from dataclasses import dataclass
from psgrad.engine.measures.measure import Measure
from psgrad.data.losses.value_losses import MSE

@dataclass
class Halved(Measure):
    by: float = 2.0
    name = "halved"

    def columns(self, gradients):
        return {"halved": gradients.losses / self.by}

class FirstOutput(MSE):
    name = "first_output"

    def __call__(self, output, target):
        return output[0]

class Nothing:
    pass
"""
INSTALLED = {
    "psgrad.measures": {"halved": "Halved", "nothing": "Nothing", "gone": "Gone"},
    "psgrad.losses": {"first_output": "FirstOutput"},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.group)
def test_every_plugin_of_psgrad_is_registered_by_its_name(kind: PluginKind) -> None:
    registered = own_classes(kind)
    assert {name: each.name for name, each in registered.items()} == {name: name for name in registered}
    packages = {each.__module__.rpartition(".")[0] for each in registered.values()}
    found = {
        value.name
        for package in map(importlib.import_module, packages)
        for each in pkgutil.iter_modules(package.__path__)
        for value in vars(importlib.import_module(f"{package.__name__}.{each.name}")).values()
        if isinstance(value, type) and issubclass(value, BASES[kind.group]) and getattr(value, "name", "")
    }
    assert found == set(registered)


@pytest.mark.parametrize(
    ("kind", "name", "options", "words"),
    [
        (LOSSES, "mse", {"delta": 2.0}, "loss: delta: unknown option of mse; it takes none"),
        (LOSSES, "huber", {"beta": 2.0}, "loss: beta: unknown option of huber; .*it takes delta"),
        (LOSSES, "cross_entropy", {"weight": [1, -1]}, "loss: cross_entropy.weight.1: got -1, expected at"),
        (LOSSES, "cross_entropy", {"weight": [float("nan")]}, "loss: cross_entropy.weight.0: got nan, exp"),
        (MEASURES, "hessian_trace", {"probes": "3"}, "hessian_trace.probes: got '3', expected a whole"),
    ],
)
def test_options_that_a_plugin_does_not_take(
    kind: PluginKind, name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(kind, name, options, Path())


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of someone else with a measure and a loss, as if it were installed."""
    (tmp_path / "other_package.py").write_text(OTHER_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def entry_points(group: str) -> list[EntryPoint]:
        names = INSTALLED.get(group, {})
        return [EntryPoint(name, f"other_package:{kind}", group) for name, kind in names.items()]

    monkeypatch.setattr(plugin_names, "entry_points", entry_points)
    plugin_names.installed_plugins.cache_clear()
    yield
    plugin_names.installed_plugins.cache_clear()


@pytest.mark.long
@pytest.mark.usefixtures("other_package")
def test_entry_point_measure_in_a_run(workplace: Workplace) -> None:
    workplace.config["analyze"] = {"measures": [{"name": "halved", "by": 4.0}]}
    workplace.succeeded()
    samples = workplace.samples()
    assert samples["halved"].tolist() == pytest.approx((samples["loss"] / 4).tolist())


@pytest.mark.usefixtures("other_package")
def test_entry_point_that_is_no_measure() -> None:
    with pytest.raises(ConfigError, match=r"analyze\.measures: nothing is no measure"):
        find(MEASURES, "nothing", Path())
    with pytest.raises(ConfigError, match="other_package has no 'Gone'"):
        find(MEASURES, "gone", Path())


def test_plugin_that_fails_as_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from psgrad.engine.measures.measure import Measure\n\n\n"
        "class Broken(Measure):\n"
        "    def __init__(self):\n"
        "        1 / 0\n"
    )
    with pytest.raises(MeasureError, match=r"the measure own\.py:Broken raised ZeroDivisionError"):
        configured(MEASURES, "own.py:Broken", {}, tmp_path)


@pytest.mark.usefixtures("other_package")
def test_unknown_name_lists_installed_plugins_too() -> None:
    with pytest.raises(ConfigError, match=r"did you mean halved\?"):
        find(MEASURES, "halve", Path())
    with pytest.raises(ConfigError, match="there is no loss 'orc'"):
        find(LOSSES, "orc", Path())
