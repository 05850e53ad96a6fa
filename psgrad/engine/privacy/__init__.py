"""Differentially private updates from parts that compose: a clipping value, a noise value and a source of
gradients.

    clipping = Clipping.flat(params, 1.0)
    source = batch_source(loss, params, inputs, target)
    noisy = private_sum(source, clipping, Noise(1.1), "add_or_remove_one", make_generator())

What a step costs is in `accounting`, training in `step`, and docs/explanation/dp.md says what is guaranteed.
"""

from psgrad.engine.privacy.accounting import StepEvent, epsilon_pld, epsilon_rdp, noise_multiplier_for
from psgrad.engine.privacy.batches import (
    ClippedSum,
    GradientSource,
    RecordColumns,
    batch_source,
    stream_source,
)
from psgrad.engine.privacy.clipping import Clipping, Group
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.generators import Generator, make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import RecordReader, Records, Relation, record_loss
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.step import NoisySum, PrivateTraining, private_sum

__all__ = [
    "ClippedSum",
    "Clipping",
    "Coins",
    "Generator",
    "GradientSource",
    "Group",
    "Noise",
    "NoisySum",
    "PrivateTraining",
    "RecordColumns",
    "RecordReader",
    "Records",
    "Relation",
    "Sampling",
    "StepEvent",
    "batch_source",
    "epsilon_pld",
    "epsilon_rdp",
    "make_generator",
    "noise_multiplier_for",
    "private_sum",
    "record_loss",
    "stream_source",
]
