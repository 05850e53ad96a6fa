"""Completes a config once, before anything that it names is loaded: the names of classes that a stored
reference or an index has, and the method of influence. A file that lacks a class is numbered as that one was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psgrad.config import Config, MethodConfig
from psgrad.quality.references import CLASSES, measured_as
from psgrad.run.finished import finished_manifest


def completed_for_analyze(config: Config) -> Config:
    """The config with the names of the stored run, or the baseline, that samples are compared with, where it
    has none.
    """
    source = config.analyze.outliers.reference
    if config.data.class_names is not None or source is None:
        return config
    path = config.base / source
    if path.suffix == ".json":
        from psgrad.quality.baselines import read_baseline

        stored = (read_baseline(path).reference or {}).get("measured_as", {})
    else:
        stored = measured_as(finished_manifest(path))
    return _with_names(config, stored.get(CLASSES))


def completed_for_influence(
    config: Config, say: Callable[[str], None], *, replaces_index: bool = False
) -> Config:
    """The config with the first of its checkpoints as the model's; with the names of the index in its folder,
    where it has none and does not replace that index; and with EK-FAC as its method, where it names none and
    the loss is one of tokens: a solve for each query, and the Gauss-Newton matrix of outputs as large as a
    vocabulary, take minutes there.
    """
    influence, index = config.influence, config.influence.index
    if influence.checkpoints:
        config = config.changed("model", checkpoint=influence.checkpoints[0].path)
    if config.data.class_names is None and index is not None and not replaces_index:
        from psgrad.run.gradient_index import GradientIndex

        stored: Any = GradientIndex.begun(index.path)
        names = None if stored is None else stored.description.get("fingerprint", {}).get(CLASSES)
        config = _with_names(config, names)
    named = "method" in influence.model_fields_set
    if named or config.loss.name != "token_cross_entropy" or index is not None:
        return config
    say("influence.method: ekfac, the default where the loss is one of tokens")
    return config.changed("influence", method=MethodConfig(name="ekfac"))


def _with_names(config: Config, names: list[str] | None) -> Config:
    return config if names is None else config.changed("data", class_names=names)
