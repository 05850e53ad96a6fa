"""The section of a private run: what it accepts, what it fills in, and that every mistake is told with its
reason.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import yaml

from psgrad.config import RELATIONS, PrivacyConfig, load_config
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import FIELDS, Sampling
from psgrad.errors import ConfigError
from tests.config.test_config import MINIMAL, PRIVATE, error_of

TEXT = MINIMAL + PRIVATE
SAMPLINGS = {
    "poisson": "{scheme: poisson, sample_rate: 0.1}",
    "fixed": "{scheme: fixed, batch_size: 128}",
}


def load(folder: Path, *overrides: str) -> PrivacyConfig:
    """The section above, with some values set otherwise: `clipping={...}`."""
    path = folder / "config.yaml"
    path.write_text(TEXT, encoding="utf-8")
    found = load_config(path, [f"privacy.{override}" for override in overrides]).privacy
    assert found is not None
    return found


# -- What is accepted ----------------------------------------------------------------------------------------


def test_without_the_section_nothing_is_private(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(MINIMAL)
    assert load_config(tmp_path / "config.yaml").privacy is None


def test_all_of_it(tmp_path: Path) -> None:
    privacy = load(
        tmp_path,
        "unit={column: user, max_rows: 16}",
        "clipping={groups: {'encoder.*': 0.5, '*': 1}}",
        "noise={target_epsilon: 3, seed: 0}",
        "trainable=head.*",
        "checkpoint_every=20",
    )
    assert privacy.clipping.groups == {"encoder.*": 0.5, "*": 1.0}
    assert privacy.noise.target_epsilon == 3.0
    assert privacy.trainable == ["head.*"]
    assert (privacy.checkpoint_seconds, privacy.checkpoint_steps) == (None, 20)


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30.0), ("1.5min", 90.0), ("2 h", 7200.0)])
def test_times_between_checkpoints(tmp_path: Path, text: str, seconds: float) -> None:
    assert load(tmp_path, f"checkpoint_every={text}").checkpoint_seconds == seconds


@pytest.mark.parametrize("scheme", SAMPLINGS)
def test_the_relation_is_by_default_the_schemes(tmp_path: Path, scheme: str) -> None:
    assert load(tmp_path, f"sampling={SAMPLINGS[scheme]}").relation == RELATIONS[scheme][0]  # type: ignore[index]
    assert load(tmp_path, f"sampling={SAMPLINGS[scheme]}", "relation=").relation == RELATIONS[scheme][0]  # type: ignore[index]


@pytest.mark.parametrize("scheme", SAMPLINGS)
@pytest.mark.parametrize("relation", get_args(Relation))
def test_relations_that_a_scheme_is_accounted_under(tmp_path: Path, scheme: str, relation: str) -> None:
    overrides = f"sampling={SAMPLINGS[scheme]}", f"relation={relation}"
    if relation in RELATIONS[scheme]:  # type: ignore[index]
        assert load(tmp_path, *overrides).relation == relation
        return
    assert (
        f"relation: no accountant covers {scheme} sampling under {relation}; under {scheme} it is one of "
        in error_of(tmp_path, TEXT, *(f"privacy.{each}" for each in overrides))
    )


def test_the_names_are_those_of_the_engine() -> None:
    assert set(RELATIONS) == set(FIELDS)
    assert {relation for known in RELATIONS.values() for relation in known} == set(get_args(Relation))


@pytest.mark.parametrize("scheme", SAMPLINGS)
def test_what_the_config_accepts_the_sampler_does(tmp_path: Path, scheme: str) -> None:
    given_fields = load(tmp_path, f"sampling={SAMPLINGS[scheme]}").sampling.model_dump()
    assert set(given_fields) == {field.name for field in dataclasses.fields(Sampling)}
    assert Sampling(**given_fields).scheme == scheme


# -- What is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["expected_batch_size", "delta", "steps", "sampling", "clipping", "noise", "optimizer"]
)
def test_what_must_be_said(tmp_path: Path, key: str) -> None:
    content = yaml.safe_load(PRIVATE)
    del content["privacy"][key]
    (tmp_path / "config.yaml").write_text(MINIMAL + yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=rf"privacy\.{key}: missing; it is required"):
        load_config(tmp_path / "config.yaml")


def test_what_the_divisor_is_for_is_reported_where_it_is_missing(tmp_path: Path) -> None:
    text = MINIMAL + PRIVATE.replace("  expected_batch_size: 128\n", "")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml")
    assert "config.yaml:6: privacy.expected_batch_size: missing; it is required" in str(caught.value)
    assert "the size of the batch that was drawn is private" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # another sampler
        ("shuffle=true", "privacy.shuffle: not a key here: batches are drawn at random by privacy.sampling"),
        ("sampler=x", "privacy.sampler: not a key here: batches are drawn at random by privacy.sampling"),
        ("sampling.drop_last=true", "no accountant holds for another sampler"),
        ("sampling.scheme=shuffle", "got 'shuffle', expected one of poisson, fixed"),
        ("sampling.scheme=poison", "expected one of poisson, fixed; did you mean"),
        # keys that were dropped
        ("batch_size=64", "privacy.batch_size: not a key here: set expected_batch_size and"),
        ("epochs=3", "privacy.epochs: not a key here: set steps: epochs / sampling.sample_rate"),
        ("augmentation={copies: 4}", "privacy.augmentation: not a key here: let the dataset change each row"),
        ("sampling.max_batch_size=64", "not a key here: a batch of any size is computed in chunks"),
        ("clipping.adaptive={}", "privacy.clipping.adaptive: not a key here: the bound stays"),
        ("noise.schedule={kind: step}", "privacy.noise.schedule: not a key here: every step has the same"),
        # fields of a scheme
        ("sampling.batch_size=64", "privacy.sampling: batch_size: a Poisson batch has no fixed size, as"),
        ("sampling={scheme: poisson}", "poisson sampling needs sample_rate"),
        ("sampling={scheme: fixed}", "fixed sampling needs batch_size"),
        (
            "sampling={scheme: fixed, batch_size: 8, sample_rate: 0.1}",
            "sample_rate: fixed batches have a batch_size, and are accounted as if",
        ),
        ("sampling.sample_rate=0", "privacy.sampling.sample_rate: got 0, expected more than 0"),
        ("sampling.sample_rate=1.5", "privacy.sampling.sample_rate: got 1.5, expected at most 1"),
        ("relation=add_or_remove", "got 'add_or_remove', expected one of add_or_remove_one, replace_one"),
        # the divisor
        ("expected_batch_size=0", "privacy.expected_batch_size: got 0, expected more than 0"),
        ("sampling={scheme: fixed, batch_size: 64}", "expected_batch_size is 128, and every batch has 64"),
        # numbers
        ("steps=0", "privacy.steps: got 0, expected at least 1"),
        ("steps=2.5", "privacy.steps: got 2.5, expected a whole number"),
        ("delta=0", "privacy.delta: got 0, expected more than 0"),
        ("delta=1", "privacy.delta: got 1, expected less than 1"),
        ("delta=.nan", "privacy.delta: got nan, expected"),
        # clipping
        ("clipping={}", "privacy.clipping: norm is missing: the bound on one record's gradient, from which"),
        ("clipping.max_grad_norm=1", "privacy.clipping.max_grad_norm: not a key here: the bound is called"),
        ("clipping.norm=0", "privacy.clipping.norm: got 0, expected more than 0"),
        ("clipping.groups=layers", "privacy.clipping.groups: got 'layers', expected flat, layer, parameter"),
        ("clipping={groups: {}}", "privacy.clipping.groups: got a group of keys, expected flat"),
        ("clipping={groups: {'a.*': 0}}", "privacy.clipping.groups: the bound of 'a.*' is 0, expected"),
        ("clipping={groups: {'a.*': true}}", "the bound of 'a.*' is true, expected a number above 0"),
        ("clipping.groups={'*': 1}", "privacy.clipping: norm and groups both give bounds"),
        ("clipping.rule=auto", "privacy.clipping.rule: got 'auto', expected one of clip, automatic"),
        # noise
        ("noise={}", "missing or given twice: give exactly one of multiplier and target_epsilon"),
        ("noise.target_epsilon=3", "privacy.noise: the amount of noise is missing or given twice"),
        ("noise.multiplier=-1", "privacy.noise.multiplier: got -1, expected at least 0"),
        ("noise.multiplier=.inf", "privacy.noise.multiplier: got inf, expected a finite number"),
        ("noise.mechanism=discrete_gaussian", "privacy.noise.mechanism: not a key here: the only mechanism"),
        ("noise.seed=-1", "privacy.noise.seed: got -1, expected at least 0"),
        # optimiser and the rest
        ("optimizer.lr=0.1", "privacy.optimizer.lr: not a key here: an optimiser's arguments go"),
        ("optimizer.name=LBFGS", "privacy.optimizer.name: LBFGS asks for several gradients and losses"),
        ("optimizer.name=SparseAdam", "privacy.optimizer.name: SparseAdam takes sparse gradients"),
        ("loss_scaling=dynamic", "privacy.loss_scaling: not a key here: gradients in float32 and bfloat16"),
        ("checkpoint_every=0s", "privacy.checkpoint_every: got '0s', expected a number of steps, or a time"),
        ("checkpoint_every=0", "privacy.checkpoint_every: got 0, expected a number of steps"),
        ("trainable=[]", "privacy.trainable: got an empty list, expected one pattern of parameter names or"),
        ("unit={column: user, max_rows: 0}", "privacy.unit.max_rows: got 0, expected at least 1"),
        ("trainble=[a]", "privacy.trainble: unknown key; did you mean trainable?"),
    ],
)
def test_each_mistake_is_reported(tmp_path: Path, override: str, expected: str) -> None:
    message = error_of(tmp_path, TEXT, f"privacy.{override}")
    assert expected in message
    assert "has 1 problem:" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.shuffle=true", "data.shuffle: not a key here: rows are read in the order of the dataset"),
        ("data.batch_size=8", "data.batch_size: not a key here: rows that are computed together are"),
        ("data.user=uid", "data.user: not a key here: the column of a private run's users"),
        ("engine.sample_rate=1", "engine.sample_rate: unknown key; did you mean"),
        ("target_epsilon=1", "target_epsilon: unknown key; did you mean privacy.noise.target_epsilon?"),
    ],
)
def test_keys_in_other_sections(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in error_of(tmp_path, TEXT, override)


def test_several_problems_at_once(tmp_path: Path) -> None:
    overrides = ("delta=2", "noise.seed=-1", "clipping.groups=3", "sampling.rate=0.1")
    message = error_of(tmp_path, TEXT, *(f"privacy.{each}" for each in overrides))
    assert "has 4 problems:" in message
