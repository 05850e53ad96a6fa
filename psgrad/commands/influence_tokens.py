"""`influence.level: token`: the ranked pairs of the queries that are shown, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.data.rows import Samples
from psgrad.engine.influence.method import Fitted, Preconditioned
from psgrad.engine.influence.token_scores import TokenTerms, token_scores
from psgrad.errors import ConfigError, InfluenceError
from psgrad.run.results.influence_details import TokenPair, TokenText


def require_tokens(setup: InfluenceSetup) -> None:
    """Raises ConfigError where scores of tokens are asked for, and the loss, the measurement or the processes
    have none.
    """
    wanted = setup.config.influence
    if wanted.level != "token":
        return
    if setup.common.criterion.kind != "token":
        problem = f"the loss {setup.common.criterion.name} has one value a sample"
    elif setup.measurement.name != "loss":
        problem = f"the measurement {setup.measurement.name} is not divided over tokens"
    elif setup.processes.size > 1:
        problem = f"{setup.processes.size} processes share this run"
    else:
        return
    raise ConfigError(f"influence.level: token: {problem}", hint="set influence.level: sample")


def token_pairs(
    setup: InfluenceSetup, fitted: Sequence[Fitted], scores: pd.DataFrame, shown: Sequence[int]
) -> list[TokenPair]:
    """The ranked pairs of these queries, token by token; none where the config asks for samples. scores: the
    table of ranked pairs.
    """
    if setup.config.influence.level != "token":
        return []
    solver, view = _solver(setup, fitted[-1]), setup.views[-1]
    ignored = setup.common.criterion.ignore_index
    ignored = -100 if ignored is None else ignored
    training_ids, query_ids = setup.common.samples.ids, setup.query_reader.samples.ids
    terms_of = cache(lambda place: TokenTerms.of(view.training, place, ignored))
    found = []
    for query in shown:
        pairs = scores[scores["query_index"] == query]
        rows = pairs["train_index"].drop_duplicates().tolist()
        terms = TokenTerms.of(view.queries, int(np.flatnonzero(setup.query_rows == query)[0]), ignored)
        places, text = _text(terms, setup.query_reader.samples, setup)
        if not len(places) or not rows:
            continue
        training = [terms_of(int(np.searchsorted(setup.training_rows, row))) for row in rows]
        matrices = token_scores(solver, terms, torch.from_numpy(places), training)
        for row, own, matrix in zip(rows, training, matrices, strict=True):
            counted, own_text = _text(own, setup.common.samples, setup)
            found.append(
                TokenPair(
                    *(str(query_ids[query]), int(query), str(training_ids[row]), int(row)),
                    *(text, own_text, matrix.numpy()[:, counted]),
                )
            )
    return found


def _solver(setup: InfluenceSetup, fitted: Fitted) -> Preconditioned:
    """What multiplies gradients by the inverse curvature. Raises InfluenceError for scores that are not such
    a product, and so have no parts that add up.
    """
    solver = fitted.solver()
    if solver is None or solver is not fitted:
        raise InfluenceError(
            f"influence.level: token: the scores of {setup.config.influence.method.name} with these"
            " options are not a sum over tokens",
            hint="choose ekfac, or influence with leverage: false and change: gradient",
        )
    return solver


def _text(terms: TokenTerms, samples: Samples, setup: InfluenceSetup) -> tuple[np.ndarray, TokenText]:
    """(the positions of the terms that count, the tokens of a sample)."""
    places = np.flatnonzero(terms.counted.cpu().numpy())
    ids, later = _tokens(tuple(x.cpu() for x in terms.inputs), terms.target.cpu(), terms.ignored)
    shown = samples.tokenizer if setup.config.report.include_inputs else None
    pieces = None if shown is None else shown.pieces(ids.tolist())
    return places, TokenText(ids.numpy(), places + later, pieces or ())


def _tokens(inputs: tuple[torch.Tensor, ...], target: torch.Tensor, ignored: int) -> tuple[torch.Tensor, int]:
    """(the ids of a sample's tokens, how many places behind its position the token is that is predicted
    there): 1 in a language model, whose targets are the next tokens of its input, else 0.
    """
    counted = target != ignored
    ids = next((x for x in inputs if x.shape == target.shape and not x.is_floating_point()), target)
    later = int(bool(((target[:-1] == ids[1:]) | ~counted[:-1]).all() and counted[:-1].any()))
    if later and counted[-1]:
        ids = torch.cat([ids, target[-1:]])
    return ids, later
