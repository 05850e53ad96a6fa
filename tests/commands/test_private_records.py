"""`psgrad dp-step` with records of several rows, from the config to the weights: what is clipped is the
record.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.privacy.clipping import MARGIN
from tests.oracles import one_sample_gradients
from tests.private_workplace import EXACT, PrivateWorkplace
from tests.workplace import ROWS

BOUND = 0.5
USERS = np.array([0] * 9 + [1] + [2] * (ROWS - 12) + [1, 1])


@pytest.fixture
def private(private: PrivateWorkplace) -> PrivateWorkplace:
    """A run without noise on all records."""
    private.privacy.update(EXACT)
    private.workplace.save(user=np.array([f"user-{user}" for user in USERS]))
    return private


def gradients(
    private: PrivateWorkplace, change: Callable[[Tensor], Tensor] = lambda x: x
) -> dict[str, Tensor]:
    """name -> [rows, *shape], in float64, one row after another."""
    x, y = (
        torch.from_numpy(private.workplace.arrays["x"]).double(),
        torch.from_numpy(private.workplace.arrays["y"]),
    )
    return one_sample_gradients(private.workplace.model.double(), F.cross_entropy, (change(x),), y)


def require_step(private: PrivateWorkplace, records: list[dict[str, Tensor]]) -> None:
    """The weights are those after a step on these records, each clipped by itself."""
    expected_batch_size = private.privacy["expected_batch_size"]
    before = private.workplace.model.state_dict()
    norms = [torch.cat([value.flatten() for value in record.values()]).norm() for record in records]
    for name, after in private.weights().items():
        moved = sum(
            record[name] * min(1.0, BOUND * (1 - MARGIN) / float(norm))
            for record, norm in zip(records, norms, strict=True)
        )
        torch.testing.assert_close(
            after, before[name].double() - moved / expected_batch_size, rtol=1e-6, atol=1e-9
        )


def test_rows_of_a_user_are_averaged_and_the_first_ones_count(private: PrivateWorkplace) -> None:
    private.privacy.update(unit={"column": "user", "max_rows": 4}, expected_batch_size=3)
    private.succeeded()
    assert private.step()["unit"] == "all rows with one user, at most 4 of them, averaged inside it"
    rows, of_users = gradients(private), [np.flatnonzero(np.equal(USERS, user))[:4] for user in range(3)]
    require_step(private, [{name: value[own].mean(0) for name, value in rows.items()} for own in of_users])


def test_a_user_of_many_rows_is_refused_without_a_cap(private: PrivateWorkplace) -> None:
    rows = 1002
    private.workplace.save(
        x=np.zeros((rows, 4), np.float32),
        y=np.zeros(rows, int),
        uid=np.arange(rows),
        user=np.array([0] * (rows - 1) + [1]),
    )
    private.privacy.update(unit={"column": "user"}, expected_batch_size=2)
    private.refused(3, "the unit 0 has 1001 rows", "hint: set privacy.unit.max_rows")
    private.privacy["unit"]["max_rows"] = 8
    private.succeeded()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return self.net(x) - self.net(x).mean(0)", "what the model makes of a row changes with the other"),
        ("self.seen += x.mean().detach()\n        return self.net(x)", "a forward pass changes seen"),
        (
            "self.last, x = x.detach(), x + self.last\n        return self.net(x)",
            "wrote into last while records were computed",
        ),
    ],
)
def test_a_model_whose_records_are_not_apart_stops_the_run(
    private: PrivateWorkplace, body: str, words: str
) -> None:
    private.workplace.use_model(
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = nn.Linear(4, 3)\n"
        "        self.last = torch.zeros(1, 4)\n"
        "        self.register_buffer('seen', torch.zeros(()))\n"
        "    def forward(self, x):\n"
        f"        {body}\n"
    )
    private.refused(3, words)
    assert not private.run_folder.exists()


# -- what other records may not decide or show ---------------------------------------------------------------


def test_labels_that_are_numbered_by_the_names_of_all_records_are_refused(private: PrivateWorkplace) -> None:
    """A record with a name before the others' would give each of them another label."""
    names = ["cat", "dog", "emu"]
    private.workplace.save(y=np.array(names)[private.workplace.arrays["y"]])
    private.refused(2, "data.target: y are names", "data.class_names")
    private.config["data"]["class_names"] = names
    private.succeeded()


def test_what_was_done_to_rows_is_not_published(private: PrivateWorkplace) -> None:
    private.workplace.save(y=private.workplace.arrays["y"].astype(float))
    private.succeeded()
    done = "fractions that are whole are labels"
    assert done not in (private.run_folder / "manifest.json").read_text()
    assert done in (private.run_folder / "private" / "NOT_PRIVATE_manifest.json").read_text()
