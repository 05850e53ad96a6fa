"""`psgrad dp-step` with a model that draws at random: its draws are secret, and the same again for whoever
sets an insecure seed.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from psgrad.commands.private_setup import set_up_privately
from psgrad.config import load_config
from psgrad.engine.privacy import coins
from psgrad.engine.privacy.batches import RecordStreams
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.step import private_sum
from tests.private_workplace import EXACT, PrivateWorkplace

# As our own examples do it: whoever reads the factory knows the state of PyTorch's generator when the first
# step begins.
SEEDING = """\
def Model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Dropout(0.5), nn.Linear(40, 3))
"""


@pytest.fixture
def private(private: PrivateWorkplace) -> PrivateWorkplace:
    private.workplace.use_model(SEEDING)
    private.config["model"]["mode"] = "train"
    private.config["engine"] |= {"chunk_size": 100}
    return private


def as_the_factory_leaves_it() -> None:
    """PyTorch's generator."""
    torch.manual_seed(0)
    nn.Linear(4, 40), nn.Linear(40, 3)


@pytest.mark.sweep
def test_dp_step_does_not_reveal_a_member_to_one_with_the_seed_of_the_factory(
    private: PrivateWorkplace,
) -> None:
    """At noise 4, and a sum that one record moves by its bound, the best guess is right 55 times of 100."""
    rows, random = 400, np.random.default_rng(0)
    private.workplace.save(
        x=random.normal(size=(rows, 4)).astype(np.float32), y=random.integers(0, 3, rows), uid=np.arange(rows)
    )
    private.privacy.update(
        clipping={"norm": 0.1}, noise={"multiplier": 4.0, "seed": 1}, expected_batch_size=200, delta=1e-3
    )
    (private.folder / "config.yaml").write_text(yaml.safe_dump(private.config))
    setup = set_up_privately(load_config(private.folder / "config.yaml"))
    objective, run = setup.common.objective, setup.common

    def as_read_in_the_code(records: np.ndarray) -> torch.Tensor:
        """The clipped sum, if PyTorch's generator goes on where the factory left it."""
        streams = RecordStreams(
            setup.records,
            run.reader,
            objective.loss,
            objective.params,
            lambda loss, read: run.stream(lambda _: None, loss, read),
            randomness="different",
        )
        with pytest.MonkeyPatch.context() as patch:  # not seeded from the secret stream
            patch.setattr(Coins, "seed", lambda self, seeds: as_the_factory_leaves_it())
            patch.setattr(coins, "_seeds_watched", lambda *_: nullcontext())
            patch.setattr(Coins, "shared", lambda *_: False)
            sums = streams.source(records)(setup.clipping).sums
        return torch.cat([sums[name].flatten() for name in objective.params])

    worlds = {True: np.arange(rows), False: np.arange(1, rows)}
    expected = {member: as_read_in_the_code(records) for member, records in worlds.items()}
    generator, right = make_generator(seed=1), 0
    for trial in range(40):
        member = trial % 2 == 0
        as_the_factory_leaves_it()
        noisy = private_sum(
            setup.source(worlds[member]), setup.clipping, Noise(4.0), "add_or_remove_one", generator
        )
        seen = torch.cat([noisy.sums[name].flatten() for name in objective.params])
        guess = (seen - expected[True]).norm() < (seen - expected[False]).norm()
        right += bool(guess) == member
    assert right <= 30  # 22 are to be expected, give or take 3


@pytest.mark.long
def test_seeded_draws_are_the_same_in_another_run_and_after_a_resume(private: PrivateWorkplace) -> None:
    """Without noise: what differs between runs is what the model draws."""
    private.privacy.update(EXACT, noise={"multiplier": 0.0, "seed": 4})
    private.succeeded("--insecure-deterministic", "--steps", "2")
    whole = private.weights()
    private.config["output"] = "parts"
    private.succeeded("--insecure-deterministic", "--steps", "1")
    first = private.weights()
    private.succeeded("--insecure-deterministic", "--steps", "1", "--resume")
    for name, value in private.weights().items():
        assert torch.equal(value, whole[name])
        assert not torch.equal(value, first[name])


@pytest.mark.long
def test_a_model_that_draws_by_numpy_is_run_with_records_alone(private: PrivateWorkplace) -> None:
    private.workplace.use_model(
        "import numpy as np\n\n\n"
        "class Model(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n"
        "    def forward(self, x):\n        return super().forward(x) * np.random.rand()\n"
    )
    private.config["model"]["mode"] = "train"
    private.refused(3, "the records of a chunk share such a number", "privacy.records: alone")
    assert private.ledger("step") == []
    private.privacy["records"] = "alone"
    private.config["output"] = "alone"
    private.succeeded("--steps", "1")


@pytest.mark.long
def test_secret_draws_differ_from_run_to_run(private: PrivateWorkplace) -> None:
    private.privacy.update(EXACT)
    private.succeeded()
    first = private.weights()
    private.config["output"] = "again"
    private.succeeded()
    assert not torch.equal(private.weights()["0.weight"], first["0.weight"])


# -- Generators that the code keeps to itself ----------------------------------------------------------------

ROWS = """\
import numpy as np

{top}


class Rows:
    def __init__(self):
        data = np.load("data.npz")
        self.x, self.y, self.rng, self.reads = data["x"], data["y"], np.random.default_rng(0), 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        self.reads += 1
        return self.x[row] + {drawn}, self.y[row]
"""


def own(private: PrivateWorkplace, drawn: str, top: str = "") -> None:
    (private.folder / "rows.py").write_text(ROWS.format(drawn=drawn, top=top))
    private.config["data"] = {"factory": "rows.py:Rows"}


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("drawn", ["np.random.rand()", "random.random()", "self.rng.random()"])
def test_a_dataset_that_draws_is_the_same_when_a_run_goes_on(private: PrivateWorkplace, drawn: str) -> None:
    own(private, drawn, "import random")
    private.succeeded()
    np.random.seed()
    private.succeeded("--resume")
    (private.folder / "rows.py").write_text((private.folder / "rows.py").read_text() + "\n# edited\n")
    private.refused(2, "rows.py", options=("--resume",))
