"""The JSON Schema of configs: it takes every config that psgrad takes, and knows each key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from psgrad.config import Config, config_from
from psgrad.config.schema import schema, sections
from psgrad.config.values import ConfigSection, meaning
from psgrad.errors import ConfigError
from psgrad.yaml12 import parse

ROOT = Path(__file__).parents[2]
SCHEMA = schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
LEAST: dict[str, Any] = {
    "version": 1,
    "model": {"factory": "model.py:build"},
    "loss": "mse",
    "data": {"path": "rows.csv", "inputs": ["a", "b"], "target": "y"},
    "output": "out",
}


def whole_configs() -> dict[str, Any]:
    """Every config in configs/, and every whole one that a page shows."""
    found = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "configs").rglob("*.yaml"))
    }
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, block in enumerate(
            re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        ):
            if re.search(r"^version: 1$", block, flags=re.MULTILINE):
                found[f"{page.relative_to(ROOT)}, block {number}"] = block
    return {name: parse(text, name).content for name, text in found.items()}


@pytest.mark.parametrize("name", whole_configs())
def test_every_config_that_is_shown_fits(name: str) -> None:
    content = whole_configs()[name]
    assert [error.message for error in VALIDATOR.iter_errors(content)] == []
    config_from(content)


def own_keys(section: type[ConfigSection]) -> set[str]:
    """The keys that a section declares, and those that it inherits only where it says more of them."""
    inherited = {key for base in section.__mro__[1:] for key in getattr(base, "model_fields", {})}
    return set(vars(section).get("__annotations__", {})) & set(section.model_fields) - inherited


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_key_says_what_it_means(section: type[Any]) -> None:
    for info in section.model_fields.values():
        assert re.fullmatch(r"[^ a-z].{3,}\.", meaning(info)), meaning(info)


def test_there_are_few_enough_keys() -> None:
    """Keys that several sections inherit from one count once."""
    bases = {base for section in sections() for base in section.__mro__ if issubclass(base, ConfigSection)}
    keys = [f"{base.__name__}.{key}" for base in bases for key in own_keys(base)]
    assert len(keys) <= 225, len(keys)


def test_defaults_are_those_of_the_models() -> None:
    engine = SCHEMA["$defs"]["EngineConfig"]["properties"]
    defaults = Config.model_validate({**LEAST, "output": "out"}).engine.model_dump(mode="json")
    assert {key: value["default"] for key, value in engine.items()} == defaults


SAME = [
    {},
    {"loss": {"name": "cross_entropy", "label_smoothing": 0.1}},
    {"loss": {"label_smoothing": 0.1}},
    {"engine": {"chunk_size": 3, "memory": "auto"}},
    {"engine": {"memory": "2 GiB"}},
    {"engine": {"memory": 123}},
    {"engine": {"chunk_size": "some"}},
    {"engine": {"chunk_size": 0}},
    {"engine": {"dtype": "float8"}},
    {"engine": {"chunksize": 3}},
    {"analyze": {"measures": ["el2n", {"name": "hessian_trace", "probes": 3}]}},
    {"analyze": {"measures": [3]}},
    {"analyze": {"outliers": {"reference": "baseline.json"}}},
    {"analyze": {"outliers": {"fdr": 2}}},
    {"gate": {"max_outliers": -1}},
    {"influence": {"method": "trak", "measurement": "margin", "index": "folder"}},
    {"influence": {"parameters": "head.*"}},
    {"influence": {"level": "all"}},
    {"influence": {"evaluate": {"train": "train.py:train", "methods": ["trak"]}}},
    {"version": 2},
    {"output": None},
    {"privacy": None},
    {"privacy": {"steps": 3}},
    {
        "privacy": {
            "steps": 3,
            "delta": 1e-5,
            "expected_batch_size": 10,
            "sampling": {"scheme": "poisson", "sample_rate": 0.1},
            "clipping": {"norm": 1, "groups": "flat"},
            "noise": {"multiplier": 1.0},
            "optimizer": {"name": "SGD"},
        }
    },
]


@pytest.mark.parametrize("change", SAME, ids=[json.dumps(change)[:60] for change in SAME])
def test_it_takes_what_psgrad_takes_and_refuses_what_psgrad_refuses(change: dict[str, Any]) -> None:
    content = {**LEAST, **change}
    try:
        config_from(content)
        taken = True
    except ConfigError:
        taken = False
    assert VALIDATOR.is_valid(content) == taken
