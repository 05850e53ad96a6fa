"""psgrad from Python: the functions of the commands, whose names `import psgrad` has.

A config is the path of a YAML file, a mapping with the same keys (paths in it are relative to the current
directory), or a `Config`. Objects stand in place of its sections: `analyze(model=m, data=dataset, loss=f)`;
see psgrad.commands.config_objects.Objects. Everything that can be wrong raises a PsgradError
(psgrad.errors), whose text is what the command line prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from psgrad.commands.config_objects import Live, Objects, config_of
from psgrad.config import Config, config_from
from psgrad.config import load_config as _load
from psgrad.errors import PsgradError

if TYPE_CHECKING:
    from psgrad.commands.report import WrittenReport
    from psgrad.commands.select import Selection
    from psgrad.commands.validate import Validation
    from psgrad.config import EvaluationKind
    from psgrad.engine.gradients import per_sample_gradients as per_sample_gradients
    from psgrad.engine.privacy.loop import make_private as make_private
    from psgrad.models.run_checkpoints import RunCheckpoints as RunCheckpoints
    from psgrad.monitoring.lightning_callback import LightningMonitor as LightningMonitor
    from psgrad.monitoring.monitor import monitor as monitor
    from psgrad.monitoring.transformers_callback import GradientMonitor as GradientMonitor
    from psgrad.reports.notebook import AnalyzeRun, InfluenceRun
    from psgrad.run.results import CheckResult, Progress
    from psgrad.run.results.check import BaselineChange, Comparison
    from psgrad.run.results.influence import IndexResult
    from psgrad.run.results.influence_evaluation import EvaluationResult
    from psgrad.run.results.plan import PlanResult
    from psgrad.run.results.privacy import DPAuditResult, DPPlanResult, DPStepResult
    from psgrad.run.results.privacy_report import BudgetResult, DPReport
    from psgrad.run.results.review import ReviewResult

__all__ = [
    "Config",
    "GradientMonitor",
    "LightningMonitor",
    "PsgradError",
    "RunCheckpoints",
    "analyze",
    "check",
    "diff",
    "dp_audit",
    "dp_budget",
    "dp_plan",
    "dp_report",
    "dp_step",
    "evaluate_influence",
    "influence",
    "influence_index",
    "load_config",
    "load_run",
    "make_private",
    "monitor",
    "per_sample_gradients",
    "plan",
    "report",
    "review",
    "save_baseline",
    "select",
    "validate",
]

_WITH_TORCH = {
    "GradientMonitor": "psgrad.monitoring.transformers_callback",
    "LightningMonitor": "psgrad.monitoring.lightning_callback",
    "monitor": "psgrad.monitoring.monitor",
    "RunCheckpoints": "psgrad.models.run_checkpoints",
    "make_private": "psgrad.engine.privacy.loop",
    "per_sample_gradients": "psgrad.engine.gradients",
}


def __getattr__(name: str) -> Any:
    """Names of modules whose import takes torch."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH[name]), name)


AnyConfig = Config | Mapping[str, Any] | str | PathLike[str]
AnyPath = str | PathLike[str]
Result = TypeVar("Result")
ShowProgress = Callable[["Progress"], None]


def _whole(result: Result | None) -> Result:
    assert result is not None, "one process has the whole result"
    return result


def load_config(config: AnyConfig, settings: Sequence[str] = ()) -> Config:
    """The validated config. `settings` are changes as `--set` takes them, `engine.device=cpu`, of a file or
    of plain values; a `Config` is what it is. Raises ConfigError with all that is wrong.
    """
    if isinstance(config, Config):
        return config
    return config_from(config, settings) if isinstance(config, Mapping) else _load(Path(config), settings)


def validate(config: AnyPath, settings: Sequence[str] = ()) -> Validation:
    """Everything that is wrong with a config file and the files that it names; `psgrad validate`."""
    from psgrad.commands.validate import validate as found

    return found(Path(config), list(settings))


def analyze(
    config: AnyConfig | None = None,
    *,
    limit: int | float | None = None,
    sample: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    report: bool = True,
    progress: ShowProgress = lambda _: None,
    **objects: Unpack[Objects],
) -> AnalyzeRun:
    """Measure each sample by its own gradient; `psgrad analyze`. The run is in the config's output folder,
    and comes back: `samples` and `parameters` are pandas frames, `measures` what was measured of the whole
    dataset, `check` the gate's verdict, `plot` the figures.
    """
    from psgrad.commands.analyze import analyze as run_analyze
    from psgrad.reports.notebook import AnalyzeRun

    with config_of(config, objects, resume=resume) as found:
        result = run_analyze(
            found,
            limit=limit,
            sample=sample,
            resume=resume,
            overwrite=overwrite,
            report=report,
            progress=progress,
        )
        return AnalyzeRun.of(_whole(result))


def load_run(run: AnyPath) -> AnalyzeRun:
    """A finished run of `analyze`, from its folder, without torch."""
    from psgrad.reports.notebook import AnalyzeRun
    from psgrad.run.finished import load_run as loaded

    return AnalyzeRun.of(loaded(Path(run)))


def report(run: AnyPath, *, output: AnyPath | None = None) -> WrittenReport:
    """Make report.html of a finished run again; `psgrad report`."""
    from psgrad.commands.report import report as run_report

    return run_report(Path(run), output=None if output is None else Path(output))


def check(run: AnyPath, *, settings: Sequence[str] = (), baseline: AnyPath | None = None) -> CheckResult:
    """The gate's verdict on a finished run, without torch; `psgrad check`. `exit_code` is what the command
    leaves with.
    """
    from psgrad.commands.check import check as evaluated

    return evaluated(Path(run), settings=settings, baseline=None if baseline is None else Path(baseline))


def save_baseline(run: AnyPath, output: AnyPath, *, grow: bool = False) -> BaselineChange:
    """Accept what a finished run has found; `psgrad baseline save`."""
    from psgrad.commands.check import save_baseline as saved

    return saved(Path(run), output=Path(output), grow=grow)


def diff(a: AnyPath, b: AnyPath, *, top: int = 20) -> Comparison:
    """Which samples rose, fell, came and went between two finished runs; `psgrad diff`."""
    from psgrad.commands.diff import diff as run_diff

    return run_diff(Path(a), Path(b), top=top)


def select(
    run: AnyPath,
    where: str | None = None,
    *,
    output: AnyPath,
    by: str | None = None,
    top: str | None = None,
    drop: bool = False,
    rejected: AnyPath | None = None,
    overwrite: bool = False,
) -> Selection:
    """Write the rows of a finished run's dataset that are chosen; `psgrad select`."""
    from psgrad.commands.select import Choice
    from psgrad.commands.select import select as run_select

    others = None if rejected is None else Path(rejected)
    choice = Choice(where, by, top, drop)
    return run_select(Path(run), choice, output=Path(output), rejected=others, overwrite=overwrite)


def plan(config: AnyConfig | None = None, **objects: Unpack[Objects]) -> PlanResult:
    """What `analyze` would take: time, memory, orders of contraction; `psgrad plan`."""
    from psgrad.commands.plan import plan as run_plan

    with config_of(config, objects) as found:
        return run_plan(found)


def influence(
    config: AnyConfig | None = None,
    *,
    overwrite: bool = False,
    matrix: bool = False,
    report: bool = True,
    progress: ShowProgress = lambda _: None,
    **objects: Unpack[Objects],
) -> InfluenceRun:
    """Which training examples made the model do this; `psgrad influence`. `plot` has the figures."""
    from psgrad.commands.influence import influence as run_influence
    from psgrad.reports.notebook import InfluenceRun

    with config_of(config, objects) as found:
        result = run_influence(found, overwrite=overwrite, matrix=matrix, report=report, progress=progress)
        return InfluenceRun.of(_whole(result))


def review(
    config: AnyConfig,
    base: AnyPath,
    head: AnyPath | None = None,
    *,
    overwrite: bool = False,
    report: bool = True,
    progress: ShowProgress = lambda _: None,
    **objects: Unpack[Objects],
) -> ReviewResult:
    """What a change of the training data will do, before anybody trains on it; `psgrad review`."""
    from psgrad.commands.review import review as run_review

    with config_of(config, objects) as found:
        return run_review(
            found,
            str(base),
            None if head is None else str(head),
            overwrite=overwrite,
            report=report,
            progress=progress,
        )


def influence_index(
    config: AnyConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    update: bool = False,
    progress: ShowProgress = lambda _: None,
    **objects: Unpack[Objects],
) -> IndexResult:
    """Build the config's index of training gradients; `psgrad influence index`. update: let a finished one
    follow its data.
    """
    from psgrad.commands.influence_index import influence_index as run_influence_index

    with config_of(config, objects, resume=resume) as found:
        return _whole(
            run_influence_index(found, resume=resume, overwrite=overwrite, update=update, progress=progress)
        )


def evaluate_influence(
    config: AnyConfig | None,
    kind: EvaluationKind,
    *,
    output: AnyPath | None = None,
    overwrite: bool = False,
    progress: ShowProgress = lambda _: None,
    **objects: Unpack[Live],
) -> EvaluationResult:
    """Retrain, and see whether the scores are true; `psgrad influence --evaluate`. kind: 'lds', 'loo' or
    'removal'.
    """
    from psgrad.commands.influence_evaluate import evaluate_influence as run_evaluate_influence

    folder = None if output is None else Path(output)
    with config_of(config, objects) as found:
        return _whole(
            run_evaluate_influence(found, kind, output=folder, overwrite=overwrite, progress=progress)
        )


def dp_step(
    config: AnyConfig | None = None,
    *,
    steps: int | Literal["all"] = 1,
    resume: bool = False,
    overwrite: bool = False,
    progress: ShowProgress = lambda _: None,
    **objects: Unpack[Objects],
) -> DPStepResult:
    """Take differentially private steps; `psgrad dp-step`."""
    from psgrad.commands.dp_step import dp_step as run_dp_step

    with config_of(config, objects, resume=resume) as found:
        return _whole(run_dp_step(found, steps=steps, resume=resume, overwrite=overwrite, progress=progress))


def dp_plan(config: AnyConfig | None = None, **objects: Unpack[Objects]) -> DPPlanResult:
    """What the planned private steps would cost; `psgrad dp-step --plan`."""
    from psgrad.commands.dp_plan import dp_plan as run_dp_plan

    with config_of(config, objects) as found:
        return run_dp_plan(found)


def dp_audit(
    config: AnyConfig | None = None,
    *,
    overwrite: bool = False,
    progress: ShowProgress = lambda _: None,
    **objects: Unpack[Objects],
) -> DPAuditResult:
    """Attack the private steps that a config describes; `psgrad dp-audit`."""
    from psgrad.commands.dp_audit import dp_audit as run_dp_audit

    with config_of(config, objects) as found:
        return _whole(run_dp_audit(found, overwrite=overwrite, progress=progress))


def dp_budget(file: AnyPath) -> BudgetResult:
    """What all private runs on a dataset spent together; `psgrad dp-budget`."""
    from psgrad.commands.dp_budget import dp_budget as run_dp_budget

    return run_dp_budget(Path(file))


def dp_report(folder: AnyPath) -> DPReport:
    """What a private run guarantees, of its public files; `psgrad dp-report`."""
    from psgrad.commands.dp_report import dp_report as run_dp_report

    return run_dp_report(Path(folder))
