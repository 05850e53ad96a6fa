"""The workplaces of these tests, without what takes longest: pages, figures and the slow accountant."""

from __future__ import annotations

import pytest

from tests.influence_workplace import InfluenceWorkplace
from tests.private_workplace import PrivateWorkplace, leave_out_slow_parts
from tests.workplace import Workplace


@pytest.fixture
def private(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> PrivateWorkplace:
    leave_out_slow_parts(monkeypatch)
    return PrivateWorkplace(workplace)


@pytest.fixture
def place(
    request: pytest.FixtureRequest, influence_place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> InfluenceWorkplace:
    """With a page where the test is marked `report`."""
    if "report" not in request.keywords:
        page = "psgrad.reports.influence_page.write_influence_report"
        monkeypatch.setattr(page, lambda result, write: None)
    return influence_place
