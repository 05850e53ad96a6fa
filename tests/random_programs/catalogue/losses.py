# ruff: noqa: E501 -- tables, a row as wide as it is
"""Every loss of torch.nn.functional."""

from __future__ import annotations

from tests.random_programs.catalogue.elementwise import entries
from tests.random_programs.writer import Line, Operator, Writer

OF_TWO = """
F.mse_loss({x}, {y}{r}) | F.l1_loss({x}, {y}{r}) | F.smooth_l1_loss({x}, {y}{r}, beta=0.7) | F.huber_loss({x}, {y}{r}, delta=0.6)
F.binary_cross_entropy({x}.sigmoid(), {y}.sigmoid(){r}) | F.binary_cross_entropy_with_logits({x}, {y}.sigmoid(){r}) | F.soft_margin_loss({x}, {y}.sign(){r})
F.binary_cross_entropy_with_logits({x}, {y}.sigmoid(), {z}{r}, pos_weight={z}.abs()) | F.kl_div({x}.log_softmax(-1), {y}.softmax(-1){r}) | F.smooth_l1_loss({x}, {y}{r})
F.kl_div({x}, {y}{r}, log_target=True) | F.poisson_nll_loss({x}, {y}.abs(){r}) | F.poisson_nll_loss({x}, {y}.abs(), log_input=False, full=True{r})
F.gaussian_nll_loss({x}, {y}, {z}.square() + 0.1{r}) | F.hinge_embedding_loss({x}, {y}.sign(){r}) | F.margin_ranking_loss({x}, {y}, {z}.sign(){r})
F.cross_entropy({x}, {y}.softmax(0)) | F.margin_ranking_loss({x}, {y}, {z}.sign(), 0.3{r}) | F.mse_loss({x}, {y}.detach()){r2}
"""


def _reduction(w: Writer) -> str:
    return w.random.choice(("", ", reduction='sum'", ", reduction='none'", ", reduction='mean'"))


def _of_two(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() >= 1)
    shape = w.shape(x)
    text = w.random.choice(entries(OF_TWO))
    return Line(
        text.format(x=x, y=w.other(shape), z=w.other(shape) if "{z}" in text else "", r=_reduction(w), r2="")
    )


def _of_classes(w: Writer) -> Line:
    x = w.tensor(lambda t: 1 <= t.dim() <= 3 and t.shape[min(1, t.dim() - 1)] >= 2)
    shape = w.shape(x)
    classes = shape[min(1, len(shape) - 1)]
    target = w.integers((shape[:1] + shape[2:]) if len(shape) > 1 else (), classes)
    weights, r = w.argument((classes,), "torch.rand({shape}) + 0.1", keep=True), _reduction(w)
    ways = [
        f"F.cross_entropy({x}, {target}{r})",
        f"F.cross_entropy({x}, {target}, {weights}{r})",
        f"F.cross_entropy({x}, {target}{r}, label_smoothing=0.1)",
        f"F.cross_entropy({x}, {target}{r}, ignore_index=0)",
        f"F.nll_loss({x}.log_softmax({min(1, len(shape) - 1)}), {target}{r})",
        f"F.nll_loss({x}, {target}, {weights}{r}, ignore_index=1)",
    ]
    if len(shape) <= 2:
        ways += [
            f"F.multi_margin_loss({x}, {target}{r})",
            f"F.multi_margin_loss({x}, {target}, 2, 0.7, {weights}{r})",
        ]
        ways += [f"F.multilabel_margin_loss({x}, {w.integers(shape, classes)}{r})"]
        ways += [f"F.multilabel_soft_margin_loss({x}, ({w.other(shape)} > 0).to({x}.dtype){r})"]
    return Line(w.random.choice(ways))


def _of_rows(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() == 2)
    shape = w.shape(x)
    y, z, r = w.other(shape), w.other(shape), _reduction(w)
    signs = w.other(shape[:1])
    ways = (
        f"F.cosine_embedding_loss({x}, {y}, {signs}.sign(){r})",
        f"F.triplet_margin_loss({x}, {y}, {z}{r})",
        f"F.triplet_margin_with_distance_loss({x}, {y}, {z}{r})",
        f"F.triplet_margin_loss({x}, {y}, {z}, swap=True{r})",
    )
    return Line(w.random.choice(ways))


def _ctc(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() == 2 and t.shape[0] >= 3 and t.shape[1] >= 2)
    steps, classes = w.shape(x)
    targets = w.integers((1, 1), classes, 1)
    return Line(f"F.ctc_loss({x}.log_softmax(-1)[:, None], {targets}, ({steps},), (1,){_reduction(w)})")


LOSSES: tuple[Operator, ...] = (*[_of_two] * 5, *[_of_classes] * 4, *[_of_rows] * 2, _ctc)
