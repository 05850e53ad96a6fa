"""What a private step says: the guarantee with all that belongs to it, bounds never rounded down, and nothing
private on stdout.
"""

from __future__ import annotations

import io
import json
import math
import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psgrad.reports.privacy import (
    epsilon,
    guarantee,
    spent_words,
    write_plan_of_noise,
    write_step,
)
from tests.reports import private_runs


def written(style: str = "terminal", **changes: object) -> str:
    stream = io.StringIO()
    write_step(private_runs.result(**changes), style, stream)  # type: ignore[arg-type]
    return stream.getvalue()


def answers(text: str) -> dict[str, str]:
    """What stands behind each question of the table."""
    rows = (re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


@given(st.floats(1e-9, 1e9))
def test_an_upper_bound_is_never_rounded_down(value: float) -> None:
    shown = float(epsilon(value))
    assert value <= shown <= value * (1 + 1.001e-3)


def test_the_table_has_both_accountants_and_what_belongs_to_them() -> None:
    told = answers(written())
    assert told["privacy spent"] == "epsilon 1.101 (PLD), 1.235 (RDP) at delta 1e-5"
    assert told["after"] == "120 of 300 planned steps, which together cost epsilon 1.8 (PLD)"
    assert told["protects"].startswith(
        "one row; neighbouring datasets differ by one record that is added or removed"
    )
    assert told["sampling"] == "Poisson sampling, each record by itself with probability 0.0712 (poisson)"
    assert told["clipping"] == "each record's gradient clipped to norm 2"
    assert told["noise"] == "gaussian, standard deviation 2.2 on the sum = 1.1 x sensitivity 2"
    assert told["generator"].startswith("AES-256-CTR")
    assert (
        told["update"] == "SGD of the noisy sum / 128, 490 of 30,000 parameters; the others stay as they were"
    )
    assert told["private"].startswith("runs/private/private: NOT PRIVATE")
    assert "warning" not in told


def test_an_accountant_without_an_answer_says_why() -> None:
    why = {"epsilon_pld": "delta is too small for loss distributions of so many steps"}
    told = answers(written(epsilon_pld=None, why_not=why))
    assert told["privacy spent"] == f"epsilon 1.235 (RDP) at delta 1e-5; no PLD: {why['epsilon_pld']}"
    assert spent_words(private_runs.step(epsilon_pld=None, epsilon_rdp=None)) == "no epsilon at delta 1e-5"


def test_no_noise_is_reported_as_no_privacy() -> None:
    step = private_runs.step(epsilon_pld=math.inf, epsilon_rdp=math.inf, noise_multiplier=0.0, noise_std=0.0)
    assert spent_words(step) == "epsilon infinite (PLD), infinite (RDP) at delta 1e-5"
    assert guarantee(step).startswith("no privacy is promised: epsilon is infinite, after 120 steps")


def test_the_guarantee_is_one_sentence_with_everything_in_it() -> None:
    assert (
        guarantee(private_runs.step())
        == "(epsilon 1.101, delta 1e-5)-differential privacy by PLD, after 120 steps, for one row;"
        " neighbouring datasets differ by one record that is added or removed; Poisson sampling, each"
        " record by itself with probability 0.0712; no seed; released numbers are rounded to a public"
        " grid, and what is left of floating point adds at most 2e-6 to epsilon; not covered: how long"
        " steps take and how much memory they need, a kernel that rounds a record differently beside other"
        " records (privacy.records: alone has none beside it), and what"
        " the model's code keeps outside of the model and the loss (global variables, files)"
    )


def test_a_seed_is_reported_as_the_hole_that_it_is() -> None:
    told = answers(written(insecure_deterministic=True))
    assert told["warning"].startswith("--insecure-deterministic")
    assert "no guarantee holds" in guarantee(private_runs.step(insecure_deterministic=True))


def test_groups_are_counted() -> None:
    groups = [{"name": str(k), "parameters": [str(k)], "bound": 0.5 + k} for k in range(3)]
    told = answers(written(clipping={"groups": groups, "rule": "automatic", "stability": 0.01}))
    assert (
        told["clipping"]
        == "each record's gradient normalised to below norms 0.5 to 2.5 in each of 3 groups of parameters"
    )


def test_json_takes_numbers_of_numpy_and_has_no_infinity() -> None:
    told = json.loads(
        written("json", epsilon_pld=math.inf, sensitivity=np.float64(2.5), planned_steps=np.int64(7))
    )
    assert (told["epsilon_pld"], told["sensitivity"], told["planned_steps"]) == (None, 2.5, 7)


def test_what_is_public_says_nothing_of_the_records() -> None:
    """Two runs that differ in all that is private print the same."""
    one, other = private_runs.result(), private_runs.result()
    object.__setattr__(other, "steps", other.steps.assign(batch_size=3, mean_loss=77.7, max_norm=88.8))
    texts = [(io.StringIO(), io.StringIO()) for _ in range(2)]
    for result, (table, plain) in zip((one, other), texts, strict=True):
        write_step(result, "terminal", table)
        write_step(result, "json", plain)
    assert [stream.getvalue() for stream in texts[0]] == [stream.getvalue() for stream in texts[1]]


def test_a_plan_has_a_row_a_multiplier_and_marks_the_configured_one() -> None:
    stream = io.StringIO()
    write_plan_of_noise(private_runs.plan(target_epsilon=3.0), "terminal", stream)
    lines = stream.getvalue().splitlines()
    table = lines[lines.index("") + 1 :]
    assert table[0].split("  ")[0].strip() == "noise multiplier"
    assert [line.split()[0] for line in table[1:6]] == ["0.55", "0.8", "1.1", "1.5", "2.2"]
    assert [line.endswith("* configured") for line in table[1:6]] == [False, False, True, False, False]
    assert table[3].split()[1:5] == ["2.2", "2.728", "2.455", "300"]
    assert answers(stream.getvalue())["target"] == "epsilon 3, which the row marked * meets"
