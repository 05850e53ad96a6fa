"""The plugin of pytest: a fixture that fails a test where the gate of a config is not passed. Nothing here is
imported before a test asks for the fixture, as pytest loads the plugin in every environment that has psgrad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from psgrad.api import AnyConfig
    from psgrad.run.results import AnalyzeResult, CheckResult

SHOWN = 20


@pytest.fixture
def psgrad_gate(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., AnalyzeResult]:
    """A function that runs `psgrad.analyze` in a temporary folder, and fails the test where a rule of the
    gate failed or could not be evaluated.

    psgrad_gate(config, settings=(), **objects): the config's path, relative to pytest's root folder, plain
    values or a `Config`; `settings` are changes as `--set` takes them; objects are those of `psgrad.analyze`.
    Returns the run.
    """

    def gate(config: AnyConfig | None = None, settings: Sequence[str] = (), **objects: Any) -> AnalyzeResult:
        from psgrad.api import PsgradError, analyze, load_config

        if isinstance(config, str | Path):
            config = request.config.rootpath / config
        output = tmp_path / f"psgrad-{sum(1 for _ in tmp_path.glob('psgrad-*'))}"
        try:
            if settings:
                config = load_config({} if config is None else config, settings)
            run = analyze(config, output=output, report=False, **objects)
        except PsgradError as error:
            pytest.fail(f"psgrad: {error}", pytrace=False)
        assert run.check is not None, "analyze evaluates the gate of each run"
        if run.check.exit_code:
            pytest.fail(failure(run.check), pytrace=False)
        return run

    return gate


def failure(result: CheckResult) -> str:
    """The verdict, and the samples that the missed rules count: the first SHOWN, with reasons."""
    from psgrad.reports.ci import more, sentence, verdict_lines

    missed = [each for each in result.outcomes if each.outcome != "passed"]
    prints = {fingerprint for outcome in missed for fingerprint in outcome.findings}
    counted = [finding for finding in result.findings if finding.fingerprint in prints]
    lines = [*verdict_lines(result), *(f"  {sentence(finding)}" for finding in counted[:SHOWN])]
    # Both limits on outliers count the same findings.
    found = {outcome.rule == "nonfinite": int(outcome.found or 0) for outcome in missed}
    if (left := sum(found.values()) - SHOWN) > 0:
        lines.append(f"  {more(left, f'findings.jsonl in {result.run}')}")
    return "\n".join(lines)
