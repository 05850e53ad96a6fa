"""The names of the plugins that a config can name, and where each class is, without importing it.

Those of other packages are entry points, with the groups `psgrad.measures`, `psgrad.methods` and
`psgrad.losses`. The name of an entry point is the name in a config.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Literal

Group = Literal["measures", "methods", "losses"]

OWN: dict[Group, dict[str, str]] = {
    "measures": {
        "confidence": "psgrad.engine.measures.builtin.outputs:Confidence",
        "cosine_to_class_mean": "psgrad.engine.measures.builtin.directions:CosineToClassMean",
        "cosine_to_mean": "psgrad.engine.measures.builtin.directions:CosineToMean",
        "el2n": "psgrad.engine.measures.builtin.outputs:EL2N",
        "el2n_over_checkpoints": "psgrad.engine.measures.builtin.over_checkpoints:EL2NOverCheckpoints",
        "forgetting": "psgrad.engine.measures.builtin.over_checkpoints:Forgetting",
        "gradient_x_input": "psgrad.engine.measures.builtin.input_attribution:GradientXInput",
        "grand": "psgrad.engine.measures.builtin.over_checkpoints:GraNd",
        "hessian_top_eigenvalue": "psgrad.engine.measures.builtin.curvature:HessianTopEigenvalue",
        "hessian_trace": "psgrad.engine.measures.builtin.curvature:HessianTrace",
        "input_gradient": "psgrad.engine.measures.builtin.input_attribution:InputGradient",
        "integrated_gradients": "psgrad.engine.measures.builtin.input_attribution:IntegratedGradients",
        "layer_norms": "psgrad.engine.measures.builtin.norms:LayerNorms",
        "margin": "psgrad.engine.measures.builtin.outputs:Margin",
        "mean_gradient": "psgrad.engine.measures.mean_gradient:MeanGradient",
        "moments": "psgrad.engine.measures.builtin.over_checkpoints:CheckpointOutputs",
        "neighbour_distance": "psgrad.engine.measures.builtin.projected_gradients:NeighbourDistance",
        "noise_scale": "psgrad.engine.measures.builtin.dataset:NoiseScale",
        "ntk": "psgrad.engine.measures.builtin.ntk:NTK",
        "projected_gradients": "psgrad.engine.measures.builtin.projected_gradients:GradientProjection",
        "relative_norm": "psgrad.engine.measures.builtin.norms:RelativeNorm",
        "signal_to_noise": "psgrad.engine.measures.builtin.directions:SignalToNoise",
        "token_loss": "psgrad.engine.measures.builtin.token_losses:TokenLoss",
        "trajectory": "psgrad.engine.measures.builtin.over_checkpoints:Trajectory",
        "vog": "psgrad.engine.measures.builtin.vog:VoG",
    },
    "methods": {
        "ekfac": "psgrad.engine.influence.methods.ekfac:EKFAC",
        "gradient_cosine": "psgrad.engine.influence.methods.gradient_products:GradientCosine",
        "gradient_dot": "psgrad.engine.influence.methods.gradient_products:GradientDot",
        "influence": "psgrad.engine.influence.methods.influence:Influence",
        "projected_influence": "psgrad.engine.influence.methods.projected:ProjectedInfluence",
        "tracin": "psgrad.engine.influence.methods.gradient_products:TracIn",
        "trak": "psgrad.engine.influence.methods.projected:TRAK",
    },
    "losses": {
        "bce_with_logits": "psgrad.data.losses.value_losses:BCEWithLogits",
        "cross_entropy": "psgrad.data.losses.class_losses:CrossEntropy",
        "huber": "psgrad.data.losses.value_losses:Huber",
        "l1": "psgrad.data.losses.value_losses:L1",
        "mse": "psgrad.data.losses.value_losses:MSE",
        "nll": "psgrad.data.losses.class_losses:NLL",
        "token_cross_entropy": "psgrad.data.losses.class_losses:TokenCrossEntropy",
    },
}
"""kind -> name -> `module:Class`, of psgrad's own plugins."""


@cache
def installed_plugins(group: Group) -> dict[str, str]:
    """name -> `module:Class`, of all plugins of a kind that other packages have."""
    return {each.name: each.value for each in entry_points(group=f"psgrad.{group}")}


def plugin_names(group: Group) -> list[str]:
    """All names of a kind: those of psgrad first."""
    return list(dict.fromkeys([*OWN[group], *installed_plugins(group)]))
