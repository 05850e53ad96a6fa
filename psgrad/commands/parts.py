"""A run in parts that do not know of each other, for job arrays: `psgrad analyze --part 3/64`, `psgrad
influence --part 3/64`, then `psgrad merge`.

A part of an influence run has the scores of a share of the queries. Each part fits the method anew, unless
the config has an index. What all queries have in common is added up: the sums over the queries of each
training example's scores.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.numpy import load_file

from psgrad.commands.analyze import analyze, load_analysis
from psgrad.commands.influence import (
    Scored,
    finished,
    loaded,
    manifest_for,
    scored_by_all,
    with_tables_written,
)
from psgrad.commands.influence_questions import require_room
from psgrad.commands.influence_ranking import QueryRankings, with_all_queries
from psgrad.commands.influence_search import require_searchable
from psgrad.commands.influence_setup import InfluenceSetup, identity_at_first, identity_of_asked
from psgrad.commands.influence_tables import Warnings, with_agreement, with_overall, without_nonfinite
from psgrad.commands.measure_setup import require_mergeable
from psgrad.commands.run_identity import NAMES, NUMBER_OF_PARTS, reopen
from psgrad.commands.setup import Setup
from psgrad.config import Config
from psgrad.config.reading import config_from
from psgrad.engine.execution.ranks import MergingParts, OneProcess, Processes, RowPart
from psgrad.engine.influence.ranking import joined_over
from psgrad.errors import ConfigError, DataError, OutputError, OutputExistsError, one_line
from psgrad.run import RunFolder
from psgrad.run.folders import SHARDS, manifest_of, packed
from psgrad.run.identity import digest
from psgrad.run.input_files import require_unchanged
from psgrad.run.progress import LOADING
from psgrad.run.results import AnalyzeResult, InfluenceResult, Progress, Say
from psgrad.run.results.manifest import RunManifest, read_manifest
from psgrad.run.run import Run
from psgrad.run.shards import part_of_another_run
from psgrad.user_code import with_code_beside

# A part that begins makes the folder within this time, and others wait for it.
_SECONDS_TO_MAKE_FOLDER = 60.0


@with_code_beside
def measure_part(
    config: Config,
    number: int,
    count: int,
    *,
    limit: int | float | None = None,
    sample: bool = False,
    progress: Say = lambda _: None,
) -> Path:
    """Measure the part `number` of `count` of a dataset's rows; returns the run folder, which the
    parts share.

    A part that is run again goes on where it ended. Raises PsgradError.
    """
    run = Run[Processes](config.output, OneProcess(), progress)
    analysis = load_analysis(config, limit, sample, run)
    require_mergeable(analysis.every)
    size = config.engine.chunk_size
    rows = len(analysis.setting)
    part = RowPart.of(number, count, rows, size if isinstance(size, int) else 1)
    run = Run[Processes](config.output, part, progress)
    run.folder = shared_folder(config.output, analysis.setup, analysis.manifest(analysis.identity(count)))
    progress(Progress(0, 0, "samples", f"rows {part.rows.start:,} to {part.rows.stop - 1:,} of {rows:,}"))
    analysis.measure(run)
    return run.path


def merge(output: Path, *, report: bool = True, progress: Say = lambda _: None) -> AnalyzeResult:
    """Judge and report a run whose parts have measured all rows.

    Raises ConfigError for a folder that is not one of a run in parts, and DataError for rows that are missing
    or there twice.
    """
    manifest = manifest_of_parts(output, "analyze")
    result = analyze(
        config_of(manifest, output),
        resume=True,
        limit=manifest.get("limit"),
        sample=manifest.get("sampled_by") is not None,
        report=report,
        progress=progress,
        processes=MergingParts(manifest["identity"][NUMBER_OF_PARTS]),
    )
    assert result is not None, "the merging process leads"
    return result


def manifest_of_parts(output: Path, command: str) -> dict[str, Any]:
    """The manifest of a run in parts. Raises ConfigError for another folder."""
    manifest = manifest_of(output) or {}
    if manifest.get("command") != command or NUMBER_OF_PARTS not in (manifest.get("identity") or {}):
        raise ConfigError(
            f"{output} is not the folder of a run in parts; expected the output folder of psgrad analyze"
            " --part K/N, or of psgrad influence --part K/N",
        )
    return manifest


def config_of(manifest: dict[str, Any], output: Path) -> Config:
    """The config that a run was begun with. output: its folder, wherever that lies now."""
    base = Path(str(manifest.get("config_folder") or "."))
    return config_from({**manifest["config"], "output": str(output.resolve())}, base=base)


def shared_folder(output: Path, run: Setup, manifest: RunManifest) -> RunFolder:
    """The folder of a run, which the first of its parts makes. manifest: at the run's beginning.

    Raises ConfigError where the folder is that of another run, and OutputExistsError where it is of none, or
    of a run that is merged.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        output.mkdir(0o700)
    except FileExistsError:
        return _existing_folder(output, run, manifest)
    except OSError as error:
        raise OutputError(f"the output folder {output} can't be made: {error.strerror or error}") from error
    folder = RunFolder.create(output)
    folder.write_json(NAMES, run.identity.names)
    folder.write_manifest(replace(manifest, state="running").content())
    return folder


def _existing_folder(output: Path, run: Setup, manifest: RunManifest) -> RunFolder:
    """The folder that another part has made, or makes now."""
    end, command = time.monotonic() + _SECONDS_TO_MAKE_FOLDER, str(manifest.command)
    now = manifest.identity or {}
    while (folder := reopen(output, now, run, alone=False, command=command)) is None:
        if time.monotonic() > end:
            raise OutputExistsError(
                f"the output folder {output} exists, and holds no run; expected a new or empty folder, or"
                " that of other parts of this run",
                hint="choose another --output",
            )
        time.sleep(0.2)
    require_unmerged(folder)
    folder.hold()
    return folder


def require_unmerged(folder: RunFolder) -> None:
    """Raises OutputExistsError for a run that came to its end."""
    if folder.finished:
        raise OutputExistsError(
            f"the parts in {folder.path} are merged already",
            hint="choose another --output for a new run",
        )


_ABOUT = "part.json"  # written last: a part with it is finished
_TABLES = ("pairs", "queries", "training")
_MATRIX = "--matrix"  # a line of the identity


@with_code_beside
def influence_part(
    config: Config, number: int, count: int, *, matrix: bool = False, progress: Say = lambda _: None
) -> Path:
    """Score the part `number` of `count` of the queries; returns the run folder, which the parts share.

    A part that is finished is not computed again. No removal is tried by training on, as that needs the
    scores of all queries. Raises PsgradError.
    """
    require_searchable(config, matrix=matrix, part=True, processes=OneProcess())
    run, warnings = Run(config.output, OneProcess(), progress), Warnings(progress)
    progress(LOADING)
    setup, store = loaded(config, run, warnings)
    if config.influence.level == "token":
        raise ConfigError(
            "influence.level: token: the parts of a run store scores of samples",
            hint="leave --part out, or set influence.level: sample",
        )
    now = _identity(setup, count, matrix)
    manifest = replace(manifest_for(setup), identity=now, run=digest(now))
    folder = shared_folder(config.output, setup.run, manifest)
    place = f"{SHARDS}/{_name(number, count)}"
    if (folder.path / place / _ABOUT).exists():
        return folder.path
    setup, screening = without_nonfinite(setup, store, warnings)
    rows = RowPart.of(number, count, len(setup.query_rows), 1).rows
    progress(Progress(0, 0, "scores", f"{len(rows):,} of {len(setup.query_rows):,} queries"))
    found = None
    if rows:
        found = scored_by_all(_with_queries(setup, rows), screening, matrix, run, warnings)
        require_unchanged(setup.run.samples.stamps)
    _store(folder, place, found, warnings.messages)
    return folder.path


def merge_influence(output: Path, *, report: bool = True, progress: Say = lambda _: None) -> InfluenceResult:
    """Write the tables and the report of a run whose parts have scored all queries.

    Raises ConfigError for a folder that is not one of a run in parts, or whose model or data are others now,
    and DataError for a part that is missing.
    """
    manifest = manifest_of_parts(output, "influence")
    require_unmerged(RunFolder(output))
    return _merged(config_of(manifest, output), manifest, report, progress)


@with_code_beside
def _merged(config: Config, manifest: dict[str, Any], report: bool, progress: Say) -> InfluenceResult:
    run, warnings = Run(config.output, OneProcess(), progress), Warnings(progress)
    progress(LOADING)
    with run.clock("load"):
        setup, _ = loaded(config, run, warnings)
        then = manifest["identity"]
        require_room(setup, then[_MATRIX])
        now = _identity(setup, then[NUMBER_OF_PARTS], then[_MATRIX])
        folder = reopen(config.output, now, setup.run, alone=False, command="influence")
    assert folder is not None, "the folder has a manifest"
    parts = _stored(folder, then[NUMBER_OF_PARTS], warnings)
    with run.begin(read_manifest(manifest), folder):
        joined = replace(_joined(setup, parts), matrix=then[_MATRIX])
        result = finished(with_tables_written(joined, run, warnings), run, report)
    folder.drop_shards()
    return result


def _identity(setup: InfluenceSetup, parts: int, matrix: bool) -> dict[str, Any]:
    """All that the scores depend on; see `psgrad.commands.run_identity`."""
    return {
        **identity_at_first(setup.run),
        **identity_of_asked(setup.query_reader, setup.query_rows, setup.views),
        _MATRIX: matrix,
        NUMBER_OF_PARTS: parts,
    }


def _with_queries(setup: InfluenceSetup, part: range) -> InfluenceSetup:
    """The setup of a part of the queries. The first one alone has self-influence, which is the same in all;
    none has amounts checked.
    """
    rows = setup.query_rows[part.start : part.stop]
    wanted = setup.run.config.influence
    changed = {"check": "never", "self_influence": wanted.self_influence if part.start == 0 else "never"}
    config = setup.run.config.model_copy(update={"influence": wanted.model_copy(update=changed)})
    setup = setup.with_queries(rows)
    views = [replace(view, checkpoint=replace(view.checkpoint, queries=len(rows))) for view in setup.views]
    return replace(setup, run=replace(setup.run, config=config), views=views)


# -- what is stored of a part --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StoredPart:
    """What a part of at least one query has stored.

    tables: by name, see _TABLES. arrays: `training_rows`, `sums.<label>`, `shown.<row>`, and of a matrix
    `matrix.<name>`. labels: of the sums, in order.
    """

    tables: Mapping[str, pd.DataFrame]
    arrays: Mapping[str, np.ndarray]
    fit: list[dict[str, Any]]
    unit: str
    labels: list[str]


def _name(number: int, count: int) -> str:
    return RowPart(number, count, range(0)).part_of(0)


def _store(folder: RunFolder, place: str, scored: Scored | None, warnings: list[str]) -> None:
    """scored: None of a part without queries."""
    about: dict[str, Any] = {"run": folder.manifest().get("run"), "warnings": warnings, "fit": None}
    if scored is not None:
        rankings = scored.rankings
        for name, table in zip(_TABLES, (rankings.pairs, scored.queries, scored.training), strict=True):
            folder.write_table(f"{place}/{name}.parquet", table)
        arrays = {"training_rows": scored.setup.training_rows, "agreement": rankings.agreement}
        arrays |= {f"sums.{label}": value.numpy() for label, value in rankings.sums.items()}
        arrays |= {f"shown.{row}": column for row, column in rankings.shown.items()}
        arrays |= {f"matrix.{name}": value for name, value in (rankings.matrix or {}).items()}
        folder.write_bytes(f"{place}/arrays.safetensors", packed(arrays))
        about |= {"fit": scored.fit, "unit": scored.unit, "labels": list(rankings.sums)}
    folder.write_json(f"{place}/{_ABOUT}", about)


def _stored(folder: RunFolder, count: int, say: Callable[[str], None]) -> list[_StoredPart]:
    """All parts with queries, in order; their warnings are said again. Raises DataError where one is missing,
    or is of another run.
    """
    places = [folder.path / SHARDS / _name(number, count) for number in range(1, count + 1)]
    missing = [number for number, place in enumerate(places, 1) if not (place / _ABOUT).exists()]
    if missing:
        raise DataError(
            one_line(
                f"{len(missing):,} of {count:,} parts are missing: {', '.join(map(str, missing[:5]))}"
                + (f", and {len(missing) - 5} more" if len(missing) > 5 else ""),
                "expected all parts",
            ),
            hint=(
                "a part has not run, or has not come to its end; run it again: psgrad influence CONFIG"
                f" --part {missing[0]}/{count}"
            ),
        )
    found = []
    for place in places:
        about = json.loads((place / _ABOUT).read_bytes())
        if about.pop("run", None) != folder.manifest().get("run"):
            raise part_of_another_run(place / _ABOUT)
        for message in about.pop("warnings"):
            say(message)
        if about["fit"] is not None:
            tables = {name: pd.read_parquet(place / f"{name}.parquet") for name in _TABLES}
            found.append(_StoredPart(tables, load_file(place / "arrays.safetensors"), **about))
    return found


def _joined(setup: InfluenceSetup, parts: Sequence[_StoredPart]) -> Scored:
    """What all parts have found together."""
    first = parts[0]
    queries, training = first.tables["queries"], first.tables["training"]
    pairs = pd.concat([part.tables["pairs"] for part in parts], ignore_index=True)
    setup = replace(
        setup,
        query_rows=queries["index"][queries["status"] == "ok"].to_numpy(),
        training_rows=first.arrays["training_rows"],
    )
    sums = {
        label: joined_over(
            [torch.from_numpy(part.arrays[f"sums.{label}"]) for part in parts],
            setup.run.config.influence.over_queries,
        )
        for label in first.labels
    }
    scores, overall = with_all_queries(setup, pairs, sums)
    shown = {
        int(name.removeprefix("shown.")): column
        for part in parts
        for name, column in part.arrays.items()
        if name.startswith("shown.")
    }
    training = with_overall(training, setup.training_rows, overall)
    agreement = np.concatenate([part.arrays["agreement"] for part in parts])
    queries = with_agreement(queries, setup.query_rows, agreement)
    matrix = None
    if "matrix.scores" in first.arrays:
        matrix = {
            "scores": np.concatenate([part.arrays["matrix.scores"] for part in parts], axis=1),
            "train_index": first.arrays["matrix.train_index"],
            "query_index": np.concatenate([part.arrays["matrix.query_index"] for part in parts]),
        }
    # Each part has said of its own plain mean.
    rankings = QueryRankings(pairs, sums, scores, overall, shown, matrix, agreement, np.empty(0))
    return Scored(setup, queries, training, rankings, first.fit, first.unit)
