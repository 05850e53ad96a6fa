"""The registry of plugins: those of psgrad, of other packages, and of a config's own files."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from psgrad.config import config_from, plugin_options
from psgrad.config.plugin_options import own_plugins
from psgrad.errors import ConfigError, MeasureError
from psgrad.plugins import KINDS, MEASURES, SOURCES, PluginKind, configured, find, options_of, own_classes
from tests.workplace import Workplace
from tools import plugin_options as generator

OTHER_PACKAGE = """
from dataclasses import dataclass
from psgrad.engine.measures.measure import Measure
from psgrad.data.losses.value_losses import MSE
from psgrad.data.sources.formats.arrays import NPZ

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

class Zipped(NPZ):
    name = "zipped"

class Nothing:
    pass
"""
INSTALLED = {
    "psgrad.measures": {"halved": "Halved", "nothing": "Nothing", "gone": "Gone"},
    "psgrad.losses": {"first_output": "FirstOutput"},
    "psgrad.sources": {"zipped": "Zipped"},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.group)
def test_plugin_options_json_names_and_options_are_those_of_the_classes(kind: PluginKind) -> None:
    ours = {name: (each.location, list(each.options)) for name, each in own_plugins(kind.group).items()}
    assert ours == {
        name: (f"{plugin.__module__}:{plugin.__qualname__}", options_of(plugin))
        for name, plugin in own_classes(kind).items()
    }


def test_plugin_options_json_is_up_to_date() -> None:
    text = generator.PAGE.read_text(encoding="utf-8")
    assert generator.page(text) == text


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of someone else with a measure, a loss and a source, as if it were installed."""
    (tmp_path / "other_package.py").write_text(OTHER_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def entry_points(group: str) -> list[EntryPoint]:
        names = INSTALLED.get(group, {})
        return [EntryPoint(name, f"other_package:{kind}", group) for name, kind in names.items()]

    monkeypatch.setattr(plugin_options, "entry_points", entry_points)
    plugin_options.installed_plugins.cache_clear()
    yield
    plugin_options.installed_plugins.cache_clear()


@pytest.mark.long
@pytest.mark.usefixtures("other_package")
def test_entry_point_measure_in_a_run(workplace: Workplace) -> None:
    workplace.config["analyze"] = {"measures": [{"name": "halved", "by": 4.0}]}
    workplace.succeeded()
    samples = workplace.samples()
    assert samples["halved"].tolist() == pytest.approx((samples["loss"] / 4).tolist())


@pytest.mark.long
@pytest.mark.usefixtures("other_package")
def test_entry_point_loss_in_a_run(workplace: Workplace) -> None:
    assert config_from({**workplace.config, "loss": "first_output"}).loss.name == "first_output"
    workplace.config["loss"] = "first_output"
    workplace.succeeded()


@pytest.mark.long
@pytest.mark.usefixtures("other_package")
def test_entry_point_source_in_a_run(workplace: Workplace) -> None:
    (workplace.folder / "data.npz").rename(workplace.folder / "data.zipped")
    workplace.config["data"]["path"] = "data.zipped"
    workplace.succeeded()


@pytest.mark.usefixtures("other_package")
def test_entry_point_that_is_no_measure() -> None:
    with pytest.raises(ConfigError, match=r"analyze\.measures: nothing is no measure"):
        find(MEASURES, "nothing", Path())
    with pytest.raises(ConfigError, match="other_package has no 'Gone'"):
        find(MEASURES, "gone", Path())


@pytest.mark.usefixtures("other_package")
def test_entry_point_with_wrong_options() -> None:
    with pytest.raises(ConfigError, match=r"bye: unknown option of halved; did you mean by\? it takes by"):
        configured(MEASURES, "halved", {"bye": 1}, Path())
    with pytest.raises(ConfigError, match=r"analyze\.measures: halved\.by: got 'x', expected a number"):
        configured(MEASURES, "halved", {"by": "x"}, Path())


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
    with pytest.raises(ConfigError, match="there is no source 'orc'"):
        find(SOURCES, "orc", Path())
