"""What a run will take, as a table with its totals, or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TextIO

from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.terminal import print_table, write_json
from psgrad.reports.words import amount, count, duration, number, printable
from psgrad.results import PlanResult, ProcessesPlan
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
        TableColumn("us a sample", lambda pair: number(pair[1].microseconds), True),
        TableColumn("bytes a sample", lambda pair: f"{pair[1].bytes:,}", True),
    ]
    return table("", "Parameters", columns, zip(names, result.parameters, strict=True))


def totals(result: PlanResult) -> list[str]:
    """The run as a whole, a line for each question."""
    seconds, of_chunk = duration(result.seconds), duration(result.chunk_seconds)
    chunks = count(-(-result.rows // result.chunk_size), "chunk")
    materialised = listed_names([each.parameter for each in result.parameters if not each.factored])
    over = "" if result.shard_ranks == 1 else f" over {result.shard_ranks:,} ranks"
    lines = [
        f"chunk size   {result.chunk_size:,}, {chunks} for {count(result.rows)}",
        f"time         {seconds} for the gradients, {of_chunk} a chunk",
        f"memory       {amount(result.total_bytes)} at its highest: a pass {amount(result.peak_bytes)},"
        f" a chunk's inputs {amount(result.input_bytes)}, the parameters {amount(result.parameter_bytes)}",
        f"weights      {result.parameters_live}{over}: {result.parameters_reason}" + _moved(result),
        *(
            [f"recompute    {len(result.recomputed)} blocks run again: {listed_names(result.recomputed)}"]
            if result.recomputed
            else []
        ),
        f"replay       {'yes' if result.replayed else 'no'}: {printable(result.replay_reason)}",
        f"materialised {materialised or 'no parameter'}",
        f"machine      {printable(result.machine)}",
    ]
    if result.obstacle is not None:
        why = printable(result.obstacle)
        lines.append(f"note         the pass was followed while the first rows ran: {why}")
    if result.processes is not None:
        lines += processes_lines(result.processes, result.total_bytes)
    return lines


def _moved(result: PlanResult) -> str:
    """What of the weights comes to the device for a chunk, with what other ranks send."""
    if not result.moved_bytes:
        return ""
    moved, ranks = result.moved_bytes, result.shard_ranks
    sent = "" if ranks == 1 else f", {amount(moved - moved // ranks)} of them from other ranks"
    return f"; {amount(moved)} come to the device a chunk{sent}"


def processes_lines(plan: ProcessesPlan, bytes_each: int) -> list[str]:
    """The run on several processes. bytes_each: memory of each."""
    held_up = duration(plan.spent[plan.bottleneck])
    on = plan.assumed
    return [
        f"processes    {plan.processes:,}: {duration(plan.seconds)} in all, efficiency {plan.efficiency:.2f};"
        f" the most that is not computing: {plan.bottleneck}, {held_up}",
        f"             {amount(bytes_each)} in each; {amount(plan.network_bytes)} over the network,"
        f" {amount(plan.storage_bytes)} from and to the storage",
        _weights_line(plan),
        f"assumed      machines like this one, {amount(int(on['network']))}/s between two processes,"
        f" {amount(int(on['storage']))}/s of storage for all, {on['ranks_per_host']:.0f} processes a host",
    ]


def _weights_line(plan: ProcessesPlan) -> str:
    """Where the weights of each process live."""
    over = f" over {plan.group} processes" if plan.group > 1 else ""
    moved = f"; {amount(plan.moved_bytes)} come to each a chunk" if plan.moved_bytes else ""
    return f"             weights {plan.parameters_live}{over}, {amount(plan.held_bytes)} in each{moved}"
