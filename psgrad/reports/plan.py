"""What a run will take, as a table with its totals, or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TextIO

from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.terminal import print_table, write_json
from psgrad.reports.words import amount, count, duration, printable
from psgrad.run.results.plan import PlanResult
from psgrad.wording import common_prefix, listed_names, parameter_names, prefix_note


def write_plan(result: PlanResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', a table and its totals, or 'json', one object."""
    if style == "json":
        write_json(asdict(result) | {"total_bytes": result.total_bytes}, stream)
        return
    if prefix := common_prefix([row.parameter for row in result.parameters]):
        stream.write(f"{prefix_note(prefix)}\n\n")
    print_table(plan_table(result), stream)
    stream.write("\n" + "\n".join(totals(result)) + "\n")


def plan_table(result: PlanResult) -> Table:
    """One row for each parameter: its shape, terms, order of contraction, and the costs for a sample."""
    names = parameter_names([row.parameter for row in result.parameters], 60)
    columns = [
        TableColumn("parameter", lambda pair: pair[0]),
        TableColumn("shape", lambda pair: pair[1].shape, True),
        TableColumn("terms", lambda pair: pair[1].terms),
        TableColumn("order", lambda pair: pair[1].way),
        TableColumn("bytes a sample", lambda pair: f"{pair[1].bytes:,}", True),
    ]
    return table("", "Parameters", columns, zip(names, result.parameters, strict=True))


def totals(result: PlanResult) -> list[str]:
    """The run as a whole, a line for each question."""
    seconds, of_chunk = duration(result.seconds), duration(result.chunk_seconds)
    chunks = count(-(-result.rows // result.chunk_size), "chunk")
    materialised = listed_names([each.parameter for each in result.parameters if not each.factored])
    return [
        f"chunk size   {result.chunk_size:,}, {chunks} for {count(result.rows)}",
        f"time         {seconds} for the gradients, {of_chunk} a chunk, by two chunks that were run",
        f"memory       {amount(result.total_bytes)} at its highest: a pass {amount(result.peak_bytes)},"
        f" a chunk's inputs {amount(result.input_bytes)}, the parameters {amount(result.parameter_bytes)}",
        f"weights      {result.parameters_live}: {result.parameters_reason}",
        *(
            [f"recompute    {len(result.recomputed)} blocks run again: {listed_names(result.recomputed)}"]
            if result.recomputed
            else []
        ),
        f"replay       {'yes' if result.replayed else 'no'}: {printable(result.replay_reason)}",
        f"materialised {materialised or 'no parameter'}",
    ]
