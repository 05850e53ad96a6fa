"""Run folders: a file is there whole or not at all, and finished work survives a crash or a full disk."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from psgrad.errors import OutputExistsError
from psgrad.run import durable_files
from psgrad.run.ledger_lines import has_begun
from psgrad.run.marked_folders import MarkedFolder

if TYPE_CHECKING:
    import pandas as pd

    from psgrad.run.results import MeasureResult, TopSample


MANIFEST = "manifest.json"
SHARDS = "parts"
MEASURES = "measures"
PUBLIC, PRIVATE = "public", "private"  # of a private run: public files, and private ones
LEDGER = f"{PUBLIC}/ledger.jsonl"
CHECKPOINT = "checkpoint.pt"

# The files of psgrad at the top of a run folder: replacing a run removes only these. Other files stay.
OWN_ENTRIES = (
    *(SHARDS, "plots", "report.html", "identity.json", "logs"),
    *(
        "samples.parquet",
        "samples.csv",
        "parameters.parquet",
        "measures",
        "measures.json",
        "findings.jsonl",
        "issues.parquet",
        "issue_summary.parquet",
        "check.json",
        "inputs",
    ),
    *("scores.parquet", "scores.csv", "self_influence.parquet", "queries.parquet", "matrix.safetensors"),
    *("harmful.csv", "groups.parquet", "contrasts.parquet", "tokens.parquet"),
    *("review.json", "review.parquet", "changes.parquet"),
    *("evaluation.json", "evaluation.csv", "evaluation_details.parquet", "evaluation_points.parquet"),
    *(PUBLIC, PRIVATE, CHECKPOINT),
    *("steps", "rows", "layers", "sources", "spikes"),  # of a monitor
)

# The characters with which a spreadsheet begins a formula, also in full width, and behind characters that it
# trims or does not show.
_FORMULA = re.compile(
    "[\\s\\x00-\\x20\ufeff\u200b-\u200f\u202a-\u202e\u2060-\u2069]*[-=+@\uff0d\uff1d\uff0b\uff20]|[\\t\\r\\n]"
)


class RunFolder(MarkedFolder):
    """The folder of one run. Every write is atomic: temporary file, fsync, rename, fsync of the folder."""

    top, mark = MANIFEST, "psgrad"
    noun, holds, option = "output", "run", "--output"
    if_taken = "choose another --output, or replace the earlier run with --overwrite"
    after_more_space = "free some space, or choose an --output on another disk, and run again"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.rows = 0  # finished samples in shards

    @classmethod
    def create(cls, path: Path, overwrite: bool = False, about: Mapping[str, Any] | None = None) -> Self:
        """The folder of a new run; see `take`. To be called late, when model and data are known to be good:
        an earlier run is gone afterwards. A run with a ledger is never replaced: that says what privacy was
        spent. about: the first manifest.
        """
        return cls(path).take({"state": "running"} if about is None else about, overwrite)

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """The folder of a run that is resumed: its finished parts stay."""
        run = cls(path)
        run.remove_leftovers()
        return run

    def remove_leftovers(self) -> None:
        """Remove temporary files of processes that were killed; to be called where no other process writes.
        Raises OutputError.
        """
        try:
            for entry in (self.path / name for name in (*OWN_ENTRIES, MANIFEST)):
                own = entry.is_dir() and not entry.is_symlink()
                for leftover in [*durable_files.leftovers_of(entry), *(entry.rglob(".*.tmp") if own else ())]:
                    leftover.unlink(missing_ok=True)
        except OSError as error:
            raise self._unusable(self.path, error) from error

    @classmethod
    def _require_replaceable(cls, path: Path) -> None:
        if ledger_lost(path):
            raise OutputExistsError(
                f"the output folder {path} holds a checkpoint of a private run, and the ledger that paid"
                " for it is gone; expected a new or empty folder",
                hint=(
                    f"{LEDGER} was removed or emptied: a checkpoint is written after the ledger has"
                    " begun, so something may be spent; put the ledger back, or choose another"
                    " --output, or delete the folder by hand"
                ),
            )
        if has_begun(path / LEDGER):
            raise OutputExistsError(
                f"the output folder {path} holds the ledger of a private run; expected a new or empty"
                " folder, or --resume to go on with that run",
                hint=(
                    "a ledger is the only record of the privacy that was spent on these data, and"
                    " --overwrite never removes one; choose another --output, or go on with --resume,"
                    " or delete the folder by hand"
                ),
            )

    def _clear(self) -> None:
        for name in OWN_ENTRIES:
            _remove(self.path / name)
        self.remove_leftovers()

    def finish_samples(self, frame: pd.DataFrame) -> None:
        """Write all rows as samples.parquet and samples.csv."""
        self.write_table("samples.parquet", frame)
        self.write_csv("samples.csv", frame)

    def drop_shards(self) -> None:
        """Remove the shards: everything that follows from them is written."""
        _remove(self.path / SHARDS)

    @property
    def finished(self) -> bool:
        """Whether the run in the folder came to its end."""
        return self.manifest().get("state") == "finished"

    def write_measures(self, results: Mapping[str, MeasureResult]) -> None:
        """Write measures.json (what each is, and its numbers), measures/<measure>.<table>.parquet and
        measures/<measure>.safetensors.
        """
        about = {}
        for name, result in results.items():
            stem = f"{MEASURES}/{file_name(name)}"
            for table, frame in result.tables.items():
                self.write_table(f"{stem}.{file_name(table)}.parquet", frame)
            if result.arrays:
                self.write_bytes(f"{stem}.safetensors", packed(result.arrays))
            keys = ("title", "formula", "unit", "source", "meanings", "numbers")
            words = {key: getattr(result, key) for key in keys}
            about[name] = {**words, "tables": list(result.tables), "arrays": list(result.arrays)}
        self.write_json(f"{MEASURES}.json", about)

    def write_inputs(
        self,
        inputs: Sequence[TopSample],
        vocabulary: Mapping[int, str] | None = None,
        special_tokens: AbstractSet[int] = frozenset(),
    ) -> None:
        """Write what is shown of samples: inputs/inputs.json (ids, texts and values),
        inputs/images.safetensors, by place in the list (`original.<place>` as in the dataset),
        inputs/vocabulary.json, the texts of ids, and inputs/special_tokens.json, the ids that are not part of
        a text.
        """
        if vocabulary:
            self.write_json("inputs/vocabulary.json", vocabulary)
            self.write_json("inputs/special_tokens.json", sorted(special_tokens & vocabulary.keys()))
        if not inputs:
            return
        listed = [{"id": each.id, "text": each.text, "values": each.values} for each in inputs]
        self.write_json("inputs/inputs.json", listed)
        images = {str(place): each.image for place, each in enumerate(inputs) if each.image is not None}
        originals = ((place, each.original) for place, each in enumerate(inputs))
        images |= {f"original.{place}": each for place, each in originals if each is not None}
        if images:
            self.write_bytes("inputs/images.safetensors", packed(images))

    def write_table(self, name: str, frame: pd.DataFrame) -> None:
        """Write a frame as parquet, without its index."""
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        self.write_bytes(name, buffer.getbuffer())

    def write_csv(self, name: str, frame: pd.DataFrame) -> None:
        """Write a frame as CSV that a spreadsheet may open: nothing in it is run as a formula."""
        harmless = _harmless(frame)
        text = harmless.to_csv(index=False)
        if "\r" in text:
            # pandas leaves a cell with a carriage return bare, and readers would begin a new row inside it.
            text = harmless.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC)
        self.write_bytes(name, text.encode("utf-8", "backslashreplace"))

    def manifest(self) -> dict[str, Any]:
        """The present content of manifest.json; empty if there is none."""
        return self.manifest_of(self.path) or {}

    def _kept(self) -> str:
        """Which samples are there after a write that failed, in words."""
        return f"{self.rows:,} finished samples stay in {self.path / SHARDS}" if self.rows else ""


def packed(arrays: Mapping[str, np.ndarray[Any, Any]], about: Mapping[str, str] | None = None) -> bytes:
    """Arrays as the bytes of a safetensors file."""
    from safetensors.numpy import save

    # A tensor that is not contiguous would be read back with other numbers.
    content: bytes = save(
        {name: np.asarray(array, order="C") for name, array in arrays.items()}, dict(about) if about else None
    )
    return content


def file_name(name: str) -> str:
    return re.sub(r"[^\w-]", "_", name)


def ledger_lost(folder: Path) -> bool:
    """Whether a private run's checkpoint, which is written when a ledger has begun, has no ledger."""
    checkpoint = folder / CHECKPOINT
    return (checkpoint.exists() or checkpoint.is_symlink()) and not has_begun(folder / LEDGER)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame for a spreadsheet: text that would be run as a formula starts with an apostrophe."""
    text_columns = frame.select_dtypes(exclude=["number", "bool", "datetime"]).columns
    return frame.assign(**{column: frame[column].map(_without_formula) for column in text_columns})


def _without_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell
