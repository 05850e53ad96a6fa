"""Where evaluations of an influence run are, and what those found that are there already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from psgrad.config import Config, EvaluationKind
from psgrad.results.influence import EVALUATION_FILE
from psgrad.results.manifest import InfluenceFacts, read_manifest
from psgrad.storage.folders import manifest_of


def evaluation_folder(config: Config, kind: EvaluationKind, output: Path | None = None) -> Path:
    """The folder of an evaluation, beside that of the config's scores where no other one is named."""
    return output if output is not None else config.output.with_name(f"{config.output.name}-{kind}")


def earlier_evaluations(config: Config, facts: InfluenceFacts) -> dict[str, dict[str, Any]]:
    """kind -> its part of evaluation.json, of finished evaluations of the same method, measurement,
    checkpoints and queries beside the config's output.
    """
    found = {}
    for kind in get_args(EvaluationKind):
        folder = evaluation_folder(config, kind)
        manifest = manifest_of(folder)
        if manifest is None or not (folder / EVALUATION_FILE).is_file():
            continue
        if _about(read_manifest(manifest).influence) != _about(facts):
            continue
        try:
            content = json.loads((folder / EVALUATION_FILE).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content.get(kind), dict):
            found[kind] = content[kind]
    return found


def _about(facts: InfluenceFacts) -> tuple[Any, ...]:
    """What scores and evaluations of the same thing agree in."""
    hashes = [each.get("sha256") for each in facts.checkpoints]
    return facts.method, facts.measurement, facts.normalize, hashes, facts.queries.get("fingerprint")
