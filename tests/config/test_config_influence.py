"""The section of an influence run: what it accepts, what it fills in, and that every mistake is told with its
reason.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from psgrad.commands.influence_setup import method_from
from psgrad.config import IndexConfig, InfluenceConfig, MethodConfig, load_config
from psgrad.engine.influence.index.stored_index import IndexSpec
from psgrad.errors import ConfigError
from psgrad.plugins import METHODS, own_classes
from tests.config.test_config import MINIMAL, error_of

QUERIES = "{path: queries.npz, inputs: x, target: y}"


def load(folder: Path, *overrides: str) -> InfluenceConfig:
    path = folder / "config.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return load_config(path, [f"influence.{override}" for override in overrides]).influence


# -- What is accepted ----------------------------------------------------------------------------------------


def test_names_stand_for_groups(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        "method=trak",
        "measurement=margin",
        "checkpoints=[a.pt, {path: b.pt, learning_rate: 0.1}]",
        "index=there",
    )
    assert found.method == MethodConfig(name="trak")
    assert found.measurement.name == "margin"
    assert [(str(each.path), each.learning_rate) for each in found.checkpoints or []] == [
        ("a.pt", None),
        ("b.pt", 0.1),
    ]
    assert found.index == IndexConfig(path=Path("there"))


def test_an_option_may_be_set_beside_a_bare_name(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL + "influence: {method: influence}\n", encoding="utf-8")
    assert load_config(path, ["influence.method.damping=0.5"]).influence.method.options == {"damping": 0.5}


def test_options_without_a_name_are_those_of_the_default(tmp_path: Path) -> None:
    assert load(tmp_path, "method.damping=0.5").method == MethodConfig(name="influence", damping=0.5)  # type: ignore[call-arg]


def test_queries_may_be_a_dataset_of_their_own_or_rows(tmp_path: Path) -> None:
    own = load(tmp_path, f"queries={QUERIES}").queries
    assert own is not None
    assert own.own_data is not None
    assert (str(own.own_data.path), own.own_data.target, own.rows) == ("queries.npz", "y", None)
    rows = load(tmp_path, "queries.rows=[3, 1]").queries
    assert rows is not None
    assert (rows.own_data, rows.rows) == (None, [3, 1])


def test_an_index_has_the_options_of_the_engine_and_its_defaults() -> None:
    """They are written twice, because reading a config must not import torch."""
    of_engine = {field.name: field.default for field in dataclasses.fields(IndexSpec)}
    of_config = {name: info.default for name, info in IndexConfig.model_fields.items() if name != "path"}
    assert of_config | {"seed": 0} == of_engine
    for projection in ("sparse", "two-sided", "none"):
        for dtype in ("float64", "float32", "float16", "bfloat16"):
            options = {"projection": projection, "dtype": dtype}
            IndexSpec(**IndexConfig(path=Path("there"), **options).model_dump(exclude={"path"}))  # type: ignore[arg-type]


# -- What is told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("top=0", "influence.top: got 0, expected at least 1"),
        ("layers=module", "influence.layers: not a key here: scores are of all parameters together"),
        ("methods=trak", "influence.methods: unknown key; did you mean method?"),
        ("damping=1", "influence.damping: not a key here: damping is an option of the method"),
        ("learning_rate=1", "influence.learning_rate: not a key here: learning rates go with checkpoints"),
        ("measurement=margn", "influence.measurement.name: there is no measurement 'margn'; did you mean"),
        ("measurement=mine.py:own", "larger_is is missing: better, or worse as a loss has it"),
        ("measurement={name: loss, larger_is: better}", "larger_is goes with a callable of your own"),
        ("parameters=[]", "influence.parameters: got an empty list, expected one pattern of parameter names"),
        ("checkpoints=[]", "checkpoints is an empty list; leave it out to use model.checkpoint"),
        ("checkpoints=[a.pt, a.pt]", "the checkpoint a.pt is listed twice; it would count double"),
        ("checkpoints=[{path: a.pt, learning_rat: 1.0}]", "influence.checkpoints.0.learning_rat: unknown"),
        ("checkpoints=[{path: a.pt, learning_rate: 0}]", "influence.checkpoints.0.learning_rate: got 0"),
        (
            "queries={path: q.npz, inputs: x, target: null}",
            "influence.queries.target is missing: the measurement 'loss' compares a query's output",
        ),
        ("queries={path: q.npz, inputs: null}", "inputs is missing: the name of the column that the model"),
        ("queries={path: q.npz, factory: 'a:b'}", "give one of path, factory, not several"),
        ("queries={target: y}", "neither path, dataset, images, factory nor rows, ids, where, worst says"),
        ("evaluate={ks: []}", "influence.evaluate.ks: got an empty list, expected at least 1 of them"),
        ("queries.rows=[]", "rows is an empty list; name at least one row"),
        ("queries.rows=[1, 1]", "a row is listed twice in rows"),
        ("queries.rows=[-1]", "influence.queries.rows.0: got -1, expected at least 0"),
        ("method=tracin", "tracin sums over checkpoints of one training run"),
        ("learning_rates=[0.1, 0.2]", "each learning rate goes with its checkpoint, so that no list can"),
        ("index={}", "influence.index.path: missing; it is required"),
        ("index={path: there, dtype: int4}", "influence.index.dtype: got 'int4', expected one of float64"),
        ("index_search=approximate", "influence.index_search: not a key here: an index is read whole"),
        ("checkpoints=[{path: a.pt, step: 3}]", "step: not a key here: scores are averaged over checkpoints"),
        ("queries={path: q.npz, contrast: b}", "contrast: not a key here: give each completion a row"),
        ("index={path: there, seed: 1}", "influence.index.seed: not a key here"),
        ("average=plain", "influence.average: not a key here: scores of several checkpoints are put on one"),
        ("over_queries=max", "influence.over_queries: not a key here: all queries together are ranked by"),
        ("query_tokens=[1]", "influence.query_tokens: not a key here: tokens.parquet has all tokens"),
    ],
)
def test_mistakes_are_reported(tmp_path: Path, override: str, words: str) -> None:
    assert words in error_of(tmp_path, MINIMAL, f"influence.{override}")


def test_tracin_names_the_checkpoints_without_a_learning_rate(tmp_path: Path) -> None:
    checkpoints = "influence.checkpoints=[{path: a.pt, learning_rate: 0.1}, b.pt, c.pt]"
    told = error_of(tmp_path, MINIMAL, "influence.method=tracin", checkpoints)
    assert "tracin weighs each checkpoint by its learning rate, and there is none for b.pt, c.pt" in told


# -- Methods -------------------------------------------------------------------------------------------------


def test_each_method_is_found_by_its_name_with_its_defaults() -> None:
    for name, kind in own_classes(METHODS).items():
        assert method_from(MethodConfig(name=name), Path()) == kind()
        assert kind.unit.format(change="rise of the query's loss")


def test_an_unknown_method_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="there is no method 'gradient_dt'; did you mean gradient_dot"):
        MethodConfig(name="gradient_dt")


def test_a_method_of_ones_own_is_a_class(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n"
        "from psgrad.engine.influence.methods.gradient_products import GradientDot\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Twice(GradientDot):\n    factor: float = 2.0\n\n\n"
        "class Half(GradientDot.__base__):\n    pass\n\n\n"
        "number = print\n"
    )
    method: Any = method_from(MethodConfig(name="own.py:Twice", factor=3.0), tmp_path)  # type: ignore[call-arg]
    assert method.factor == 3.0
    with pytest.raises(ConfigError, match=r"influence.method: own.py:number is no method"):
        method_from(MethodConfig(name="own.py:number"), tmp_path)
    with pytest.raises(ConfigError, match=r"influence.method: own.py:Half does not define fit"):
        method_from(MethodConfig(name="own.py:Half"), tmp_path)
