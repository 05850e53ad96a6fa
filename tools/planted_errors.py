"""Plants errors in a copy of the code, one at a time, and runs the tests that should notice.

    python -m tools.planted_errors                  # all of them, about ten minutes
    python -m tools.planted_errors clipping csv     # those whose description has one of the words

Prints for each error whether a test failed. A line of code that is not there any more is reported, too: then the
table below has to follow the code. Leaves with 1 unless every error turned a test red. To be run before tests are
removed and after it: as many have to be red.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Planted(NamedTuple):
    """An error: in a file of psgrad/, `right` (which is there once or more) becomes `wrong` where it is first.

    tests: paths under tests/ of which one has to fail.
    """

    what: str
    file: str
    right: str
    wrong: str
    tests: str


T, G, E = "engine/transforms/", "engine/gradients/", "engine/execution/"
M, I, P = "engine/measures/", "engine/influence/", "engine/privacy/"

ERRORS = (
    # the transforms
    Planted(
        "relu6's derivative",
        T + "rules/activations.py",
        "g, x, 0, 6))",
        "g, x, 0, 7))",
        "engine/transforms/test_coverage.py engine/transforms/test_operators.py",
    ),
    Planted(
        "the logarithm's derivative",
        T + "rules/elementwise.py",
        "lambda g: g / conj(x))",
        "lambda g: g / conj(x) * 1.001)",
        "engine/transforms/test_operators.py engine/transforms/test_composition.py",
    ),
    Planted(
        "the derivative of 2 ** x",
        T + "rules/elementwise.py",
        "conj(out) * math.log(2))",
        "conj(out))",
        "engine/transforms/test_operators.py",
    ),
    Planted(
        "a guard that does not hold",
        T + "capture.py",
        "        if values is None:\n            random_state",
        "        if False:\n            random_state",
        "engine/transforms/test_capture.py engine/transforms/test_recorded_programs.py engine/execution/test_chunk_replay.py",
    ),
    Planted(
        "weights that changed since a recording",
        T + "capture.py",
        "            entry.program.refresh()\n",
        "",
        "engine/transforms/test_capture.py engine/transforms/test_recorded_programs.py engine/execution/test_replayed_weights.py",
    ),
    # deferred gradients
    Planted(
        "a table's weighted sum",
        G + "terms/table_rows.py",
        "scaled = rows * weights.reshape(-1, 1, 1).to(rows.dtype)",
        "scaled = rows * weights.reshape(-1, 1, 1).to(rows.dtype).abs()",
        "engine/gradients",
    ),
    Planted(
        "rows of a table that a sample uses twice",
        G + "terms/table_rows.py",
        "return square_norm(merged.index_add_(0, places.reshape(-1), rows.flatten(0, 1)).reshape(rows.shape))",
        "return square_norm(rows)",
        "engine/gradients/test_terms.py engine/gradients/test_queries.py engine/gradients/test_layers.py",
    ),
    Planted(
        "cross terms of a shared weight",
        G + "square_norms.py",
        "total = alone + 2 * _pairs(terms)",
        "total = alone + _pairs(terms)",
        "engine/gradients/test_terms.py engine/gradients/test_queries.py engine/gradients/test_layers.py",
    ),
    Planted(
        "cancellation that is not seen",
        G + "square_norms.py",
        "(total < CANCELLATION * alone)",
        "(total < 0 * alone)",
        "engine/gradients/test_accuracy.py engine/gradients/test_cancelling_terms.py engine/gradients/test_queries.py",
    ),
    Planted(
        "a product's weighted sum on the wider side",
        G + "terms/product.py",
        "            right = right * scale\n",
        "",
        "engine/gradients/test_terms.py engine/gradients/test_weighted_sums.py",
    ),
    Planted(
        "inner products of one side",
        G + "inner/inner_products.py",
        "return out.triu() + out.triu(1).t()",
        "return out.triu() + out.triu(0).t()",
        "engine/gradients/test_inner.py",
    ),
    Planted(
        "signs of a random projection",
        G + "projections/projection.py",
        "31 - number, 95 - number",
        "31 - number, 63 - number",
        "engine/gradients/test_projections.py engine/gradients/test_projections_in_one_pass.py",
    ),
    # chunks
    Planted(
        "the loss's scale in half precision",
        E + "loss_scaling.py",
        "2.0**exponent), *result[1:]",
        "2.0**exponent * 1.01), *result[1:]",
        "engine/execution/test_loss_scaling.py engine/execution/test_mixed_precision.py",
    ),
    Planted(
        "a self-check without a tolerance",
        E + "self_check.py",
        "not error <= tolerance",
        "not error <= 1e9",
        "engine/execution/test_self_check.py",
    ),
    Planted(
        "a bucket's pieces",
        E + "bucket_plan.py",
        "pieces = 1 if most is None else -(-len(places) //",
        "pieces = 1 if most is None else (len(places) //",
        "engine/execution/test_buckets.py engine/execution/test_ladder.py",
    ),
    # measures
    Planted(
        "a norm over parameters",
        M + "builtin/norms.py",
        "stacked.sum(0).sqrt_()",
        "stacked.amax(0).sqrt_()",
        "engine/measures/test_norms.py",
    ),
    Planted(
        "the variance of gradients",
        M + "builtin/vog.py",
        "squares = squares + change * (step - mean)",
        "squares = squares + change * change",
        "engine/measures/test_vog.py",
    ),
    Planted(
        "the distance that leaving one out moves the mean",
        M + "builtin/directions.py",
        "distances = parts - 2 * self._sums.dot(gradients)",
        "distances = parts - self._sums.dot(gradients)",
        "engine/measures",
    ),
    Planted(
        "the error of the trace",
        M + "builtin/curvature.py",
        "estimates.std(1) / math.sqrt(self.probes)",
        "estimates.std(1)",
        "engine/measures/test_hessians.py",
    ),
    Planted(
        "the rank of the tangent kernel",
        M + "builtin/ntk.py",
        "(values > len(values) * epsilon * values[0].clamp_min(0)).sum()",
        "(values > 0).sum()",
        "engine/measures/test_ntk.py",
    ),
    # influence
    Planted(
        "DataInf's correction",
        I + "methods/datainf.py",
        "(squares[name] + self.added[name])",
        "(squares[name] - self.added[name])",
        "engine/influence/test_datainf.py",
    ),
    Planted(
        "the number of examples in EK-FAC",
        I + "methods/ekfac.py",
        "return 1 / (values * len(self.training))",
        "return 1 / values",
        "engine/influence/test_ekfac.py engine/influence/test_kronecker.py",
    ),
    Planted(
        "SOURCE's momentum",
        I + "methods/source.py",
        "[time / (1 - self.momentum) for",
        "[time * (1 - self.momentum) for",
        "engine/influence/test_source.py",
    ),
    Planted(
        "Adam's second moment",
        I + "methods/gradient_products.py",
        "rate / (squares[name].to(device).double().sqrt() + _EPSILON)",
        "rate / (squares[name].to(device).double() + _EPSILON)",
        "engine/influence/test_first_order.py",
    ),
    Planted(
        "weight decay in the curvature",
        I + "inverses.py",
        "matrix.diagonal().add_(len(self.training) * self.problem.weight_decay)",
        "matrix.diagonal().add_(self.problem.weight_decay)",
        "engine/influence/test_weight_decay.py engine/influence/test_exact.py engine/influence/test_dense.py",
    ),
    Planted(
        "the sign of an LDS",
        I + "evaluation/metrics.py",
        "spearman(subset_sums(scores, subsets), -outcomes.mean(1))",
        "spearman(subset_sums(scores, subsets), outcomes.mean(1))",
        "engine/influence/evaluation",
    ),
    # privacy
    Planted(
        "clipping that is 0.1 % too large",
        P + "clipping.py",
        "* (1 - MARGIN)\n",
        "* (1 + 1e-3)\n",
        "engine/privacy/test_clipping.py engine/privacy/test_clip_bound.py engine/privacy/test_source.py",
    ),
    Planted(
        "a record whose norm is not finite",
        P + "clipping.py",
        "return torch.where(finite, factors, 0.0)",
        "return factors",
        "engine/privacy/test_clipping.py engine/privacy/test_source.py engine/privacy/test_clipped_sums.py",
    ),
    Planted(
        "the sensitivity where a record is replaced",
        P + "clipping.py",
        'return 2 * each if relation == "replace_one" else each',
        "return each",
        "engine/privacy/test_clipping.py engine/privacy/test_step.py engine/privacy/test_accounting_events.py",
    ),
    Planted(
        "the noise's deviation",
        P + "noise.py",
        "return self.multiplier * sensitivity",
        "return self.multiplier",
        "engine/privacy/test_noise.py engine/privacy/test_step.py",
    ),
    Planted(
        "a record drawn more often than is accounted",
        P + "sampling.py",
        "threshold = int(rate * 2.0**64)",
        "threshold = int(rate * 2.0**64 * 1.05)",
        "engine/privacy/test_sampling.py",
    ),
    Planted(
        "the search for the noise of an epsilon",
        P + "accounting/noise_calibration.py",
        "        if epsilon <= target:\n",
        "        if epsilon <= target * 1.01:\n",
        "engine/privacy/test_accounting_calibration.py",
    ),
    Planted(
        "a conformal p-value's own place",
        "quality/judging.py",
        "(1 + at_least) / (len(trusted) + 1)",
        "at_least / len(trusted)",
        "quality",
    ),
    Planted(
        "ties of a p-value",
        "quality/judging.py",
        'suspect, side="left")',
        'suspect, side="right")',
        "quality",
    ),
    Planted(
        "the number of tests of a false discovery rate",
        "quality/judging.py",
        "rates = p[order] * len(order) / np.arange(1, len(order) + 1)",
        "rates = p[order] * len(order) / np.arange(2, len(order) + 2)",
        "quality",
    ),
    Planted(
        "a gate's limit",
        "quality/gates.py",
        "        if count > limit:\n",
        "        if count > limit + 1:\n",
        "quality cli/test_check.py",
    ),
    Planted(
        "a gate without a reference",
        "quality/gates.py",
        "        if not self.facts.evaluable:\n",
        "        if False:\n",
        "quality cli/test_check.py",
    ),
    Planted(
        "a share of samples in floats",
        "quality/gates.py",
        "return Fraction(str(float(fraction))) * count",
        "return fraction * count",
        "quality",
    ),
    Planted(
        "a gate on samples that are not finite",
        "quality/gates.py",
        'if count and self.gate.nonfinite == "error":',
        "if False:",
        "quality cli/test_check.py",
    ),
    Planted(
        "nearest neighbours of a row, itself included",
        "quality/detectors/nearest_neighbours.py",
        "search.kneighbors(n_neighbors=min(self.neighbours, len(chosen) - 1))[0]",
        "search.kneighbors(rows[chosen], n_neighbors=min(self.neighbours, len(chosen) - 1))[0]",
        "quality/test_detectors.py",
    ),
    Planted(
        "the rank of a score in two runs",
        "quality/run_comparison.py",
        'both["percentile_b"] - both["percentile_a"]',
        'both["percentile_a"] - both["percentile_b"]',
        "quality/test_run_comparison.py",
    ),
    # run folders
    Planted(
        "a file that is renamed before it is on the disk",
        "run/durable_files.py",
        "            yield descriptor\n            sync(descriptor)\n",
        "            yield descriptor\n",
        "run/test_power_cut.py run/test_folders.py",
    ),
    Planted(
        "a folder's names that are not on the disk",
        "run/durable_files.py",
        "    sync_folder(target.parent)\n\n\ndef write_atomically",
        "\n\ndef write_atomically",
        "run/test_power_cut.py run/test_folders.py",
    ),
    Planted(
        "a file that was changed during a run",
        "run/input_files.py",
        "if Stamp.of(stamp.path) != stamp:",
        "if False:",
        "run data commands/test_analyze.py cli",
    ),
    Planted(
        "a git-lfs pointer read as a file",
        "run/input_files.py",
        "    if head == _LFS_POINTER:\n",
        "    if False:\n",
        "data models",
    ),
    # config
    Planted(
        "1e-3 read as text",
        "yaml12.py",
        '([eE][-+]?[0-9]+)?", list("-+.0123456789")',
        '", list("-+.0123456789")',
        "config cli/test_bad_input.py",
    ),
    Planted(
        "a key that is there twice",
        "yaml12.py",
        '                raise self._error(key_node, f"the key {key!r} is already given in line {lines[key]}")\n',
        "                pass\n",
        "config",
    ),
    Planted(
        "no as a truth value",
        "yaml12.py",
        'r"true|True|TRUE|false|False|FALSE", list("tTfF")',
        'r"true|True|TRUE|false|False|FALSE|no", list("tTfFn")',
        "config",
    ),
    # data and models
    Planted(
        "classes that are not numbered from 0",
        "data/targets.py",
        "        if (found < 0).any():\n",
        "        if False:\n",
        "data",
    ),
    Planted(
        "a loss's mean over tokens that count",
        "data/losses/class_losses.py",
        "(target != self._ignored).sum().clamp(min=1)",
        "target.numel()",
        "data/test_losses.py data/test_tasks.py",
    ),
    Planted(
        "an id of csv read as a number",
        "data/sources/formats/csv.py",
        "        **dict.fromkeys(wanted.ids, (pa.int64(), pa.string())),\n",
        "        **dict.fromkeys(wanted.ids, (pa.float64(), pa.string())),\n",
        "data",
    ),
    Planted(
        "a pickle that can run code",
        "models/torch_files.py",
        "weights_only=True)",
        "weights_only=False)",
        "models",
    ),
    Planted(
        "weights that do not fit",
        "models/checkpoints.py",
        "    if not fit.exact and (strict or not fit.matched - len(fit.mismatched)):\n",
        "    if False:\n",
        "models",
    ),
    Planted(
        "the next token as label",
        "data/tasks/language_models.py",
        "[*labels[1:], IGNORED]",
        "labels",
        "data/test_tasks.py data/test_text_samples.py",
    ),
    # commands and reports
    Planted("markup in a page", "reports/sections.py", "autoescape=True", "autoescape=False", "reports"),
    Planted(
        "a failed gate in junit",
        "reports/ci.py",
        'kind = "failure" if outcome.outcome == "failed" else "error"',
        'kind = "error"',
        "reports/test_ci_formats.py",
    ),
    Planted(
        "a finding's line in sarif",
        "reports/ci.py",
        '{"startLine": finding.location.line}',
        '{"startLine": finding.index}',
        "reports/test_ci_formats.py",
    ),
    Planted(
        "ignored findings in sarif",
        "reports/ci.py",
        '    if finding.state == "ignored":\n',
        "    if False:\n",
        "reports/test_ci_formats.py",
    ),
    Planted(
        "rows that select leaves out",
        "commands/select.py",
        "_write_list(_places(frame[chosen], data), output, file)",
        "_write_list(_places(frame, data), output, file)",
        "commands/test_select.py",
    ),
    Planted(
        "runs without a sample in common",
        "commands/diff.py",
        '    if not counts["common"]:\n',
        "    if False:\n",
        "commands cli/test_report.py",
    ),
)


def main(words: list[str]) -> int:
    chosen = [error for error in ERRORS if not words or any(word in error.what for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "psgrad"
        for name in subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        for error in chosen:
            found = outcome(error, copy)
            missed += found != "red"
            print(f"{found:8} {error.what} ({error.file})", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} planted errors turned a test red")
    return int(missed > 0)


def outcome(error: Planted, copy: Path) -> str:
    """`red` where a test notices the error, `green` where none does, `absent` where it can't be planted."""
    file = copy / "psgrad" / error.file
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    if error.right not in before:
        return "absent"
    file.write_text(before.replace(error.right, error.wrong, 1), encoding="utf-8")
    try:
        tests = [f"tests/{each}" for each in error.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not sweep", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    finally:
        file.write_text(before, encoding="utf-8")
    return {0: "green", 1: "red"}.get(done.returncode, f"rc {done.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
