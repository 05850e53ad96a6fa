"""Individual accounting of records, against closed forms: a record of constant norm c has the epsilon of
steps with noise sigma C / c.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from psgrad.engine.privacy.accounting import StepEvent, epsilon_rdp
from psgrad.engine.privacy.accounting.epsilon import ORDERS, epsilon_of
from psgrad.engine.privacy.clipped_sums import RecordColumns
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.individual import IndividualAccount, shares_of
from psgrad.engine.privacy.sampling import Sampling

POISSON = Sampling("poisson", sample_rate=0.1)
FIXED = Sampling("fixed", batch_size=10)


def test_individual_epsilon_of_a_constant_norm_is_that_of_more_noise() -> None:
    event, shares = StepEvent(1.2, POISSON, "add_or_remove_one"), np.array([0.01, 0.25, 0.5, 0.77, 1.0])
    account = IndividualAccount(len(shares))
    for _ in range(30):
        account.measure(shares)
        account.count(event)
    expected = [
        epsilon_rdp([(StepEvent(1.2 / share, POISSON, "add_or_remove_one"), 30)], 1e-5).value
        for share in shares.tolist()
    ]
    assert account.epsilons(1e-5) == pytest.approx(expected, rel=1e-9)


def test_individual_epsilon_of_full_batches_is_that_of_one_gaussian() -> None:
    """Steps with all records and norms c_t are one Gaussian of precision sum (c_t / (z C))^2."""
    event, norms = StepEvent(5.0, Sampling("poisson", sample_rate=1.0), "zero_out"), [0.1, 0.9, 0.33, 0.6]
    account = IndividualAccount(1)
    for norm in norms:
        account.measure(np.array([norm]))
        account.count(event)
    one = StepEvent(5.0 / math.sqrt(sum(norm**2 for norm in norms)), event.sampling, "zero_out")
    assert account.epsilons(1e-6)[0] == pytest.approx(epsilon_rdp([(one, 1)], 1e-6).value, rel=1e-9)


def test_individual_epsilon_of_a_replaced_record_counts_the_other_with_the_bound() -> None:
    event = StepEvent(2.0, FIXED, "replace_one")  # noise 2 * 2 C
    account = IndividualAccount(2)
    account.measure(np.array([0.5, 1.0]))
    account.count(event, 4)
    other = epsilon_rdp([(StepEvent(2.0 * 2 / 1.5, FIXED, "replace_one"), 4)], 1e-5).value
    whole = epsilon_rdp([(event, 4)], 1e-5).value
    assert account.epsilons(1e-5) == pytest.approx([other, whole], rel=1e-9)


def test_individual_epsilon_is_never_below_that_of_its_norm_and_grows_with_it() -> None:
    event, shares = StepEvent(1.0, POISSON, "add_or_remove_one"), np.random.default_rng(0).random(40)
    account = IndividualAccount(40)
    account.measure(shares)
    account.count(event, 10)
    found = account.epsilons(1e-5)
    for share, epsilon in zip(shares.tolist(), found.tolist(), strict=True):
        exact = epsilon_rdp([(StepEvent(1.0 / share, POISSON, "add_or_remove_one"), 10)], 1e-5).value
        assert exact is not None
        assert exact * (1 - 1e-12) <= epsilon
    assert np.all(np.diff(found[np.argsort(shares)]) >= 0)


def test_individual_steps_before_the_first_norm_count_with_the_bound() -> None:
    event = StepEvent(1.0, POISSON, "add_or_remove_one")
    account = IndividualAccount(1)
    account.count(event, 5)
    account.measure(np.array([0.0]))
    account.count(event, 100)
    assert account.epsilons(1e-5)[0] == pytest.approx(epsilon_rdp([(event, 5)], 1e-5).value, rel=1e-12)
    assert account.steps == 105


def test_individual_conversion_is_that_of_the_accountant() -> None:
    account = IndividualAccount(200)
    account.moments = np.random.default_rng(1).exponential(0.1, (200, 1)) * ORDERS
    for delta in (0.3, 1e-3, 1e-9):
        expected = [epsilon_of(rates, delta).value for rates in account.moments]
        assert account.epsilons(delta) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_individual_shares_of_clipped_records() -> None:
    params = {"a": torch.zeros(2)}
    columns = RecordColumns(
        torch.tensor([0.5, 4.0, math.nan, 0.0], dtype=torch.float64),
        torch.zeros(4),
        torch.tensor([[1.0], [0.5], [0.0], [1.0]], dtype=torch.float64),
        torch.tensor([True, False, False, True]),
    )
    assert shares_of(columns, Clipping.flat(params, 2.0)).tolist() == [0.25, 1.0, 0.0, 0.0]
