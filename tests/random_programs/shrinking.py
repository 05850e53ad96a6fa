"""Makes a failing program small: drops statements, outputs, arguments' oddities and samples while it still
fails alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.random_programs.checking import Outcome, check, quiet
from tests.random_programs.programs import Argument, Program

# A failing program is printed even where making it small would take longer.
_SECONDS = 60


def shrunk(program: Program, judge: Callable[[Program], Outcome] = check) -> Program:
    """The smallest program that comes to the same kind of outcome, of those found in a minute."""
    kind = judge(program).kind
    found, end = True, time.monotonic() + _SECONDS
    while found:
        found = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                return program
            try:
                alike = judge(smaller).kind == kind
            except Exception:  # not a program any more
                continue
            if alike and _runs(smaller):
                program, found = smaller, True
                break
    return program


def _runs(program: Program) -> bool:
    """Whether no statement lacks a name that another one made."""
    try:
        values = program.values()
        with quiet():
            program.function(plain=True)(
                *[x[0] if a.batched else x for a, x in zip(program.arguments, values, strict=True)]
            )
    except NameError:
        return False
    except Exception:
        return True
    return True


def _smaller(program: Program) -> Iterator[Program]:
    for place in reversed(range(len(program.statements))):
        statement = program.statements[place]
        rest = program.statements[:place] + program.statements[place + 1 :]
        outputs = tuple(name for name in program.outputs if statement.writes or name != statement.target)
        if outputs:
            yield replace(program, statements=rest, outputs=outputs)
    for name in program.outputs:
        if len(program.outputs) > 1:
            yield replace(program, outputs=tuple(other for other in program.outputs if other != name))
    made = [s.target for s in program.statements if not s.writes]
    for name in made[:-1]:
        if name not in program.outputs and len(program.outputs) == 1:
            yield replace(program, outputs=(name,))
    used = " ".join([s.text for s in program.statements]) + " " + " ".join(program.outputs)
    for place, argument in enumerate(program.arguments):
        if not _mentions(used, argument.name) and len(program.arguments) > 1:
            rest = program.arguments[:place] + program.arguments[place + 1 :]
            if any(a.batched for a in rest) and any(a.differentiated for a in rest):
                yield replace(program, arguments=rest)
        for simpler in _simpler(argument, program):
            yield replace(
                program, arguments=(*program.arguments[:place], simpler, *program.arguments[place + 1 :])
            )
    if program.samples > 1:
        yield replace(program, samples=program.samples - 1)


def _mentions(text: str, name: str) -> bool:
    return any(word == name for word in "".join(c if c.isalnum() or c == "_" else " " for c in text).split())


def _simpler(argument: Argument, program: Program) -> Iterator[Argument]:
    for place in range(len(argument.edits)):
        yield replace(argument, edits=argument.edits[:place] + argument.edits[place + 1 :])
    if argument.dim:
        yield replace(argument, dim=0)
    if argument.differentiated and sum(a.differentiated for a in program.arguments) > 1:
        yield replace(argument, differentiated=False)
    if argument.batched and sum(a.batched for a in program.arguments) > 1 and not argument.edits:
        yield replace(argument, batched=False)
