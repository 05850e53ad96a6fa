"""Mends what the map cannot say, after move.py: `after.py ROOT`."""

# ruff: noqa

import re, sys
from pathlib import Path

root = Path(sys.argv[1])
WHERE = {
    "analyze": "analyze",
    "check": "check",
    "diff": "diff",
    "dp_audit": "dp_audit",
    "dp_plan": "plan",
    "dp_step": "dp_step",
    "evaluate_influence": "influence_evaluate",
    "influence": "influence",
    "influence_index": "influence_index",
    "plan": "plan",
    "report": "diff",
    "save_baseline": "check",
}
(root / "psgrad/workflows/__init__.py").write_text(
    '"""The data flow of each command, from a config to a run folder: one module for each command, and what'
    ' they share."""\n'
)
for p in [root / "psgrad/api.py", *sorted((root / "psgrad/cli").glob("*.py"))]:
    t = p.read_text()
    out, lines, k = [], t.split("\n"), 0
    for k, line in enumerate(lines):
        m = re.match(r"(\s+)from psgrad import workflows$", line)
        if m:
            rest = "\n".join(lines[k:])
            f = re.search(r"workflows\.(\w+)\(", rest).group(1)
            out.append(f"{m.group(1)}from psgrad.workflows.{WHERE[f]} import {f} as run_{f}")
        else:
            out.append(re.sub(r"\bworkflows\.(\w+)\(", r"run_\1(", line))
    n = "\n".join(out)
    if n != t:
        p.write_text(n)


def sub(path, *pairs):
    p = root / path
    t = p.read_text()
    for a, b in pairs:
        if a not in t:
            print("MISSING", path, a)
        t = t.replace(a, b)
    p.write_text(t)


for p in sorted((root / "tests").rglob("*.py")) + sorted((root / "benchmarks").rglob("*.py")):
    t = p.read_text()
    n = t

    # functions that the facade gave
    def fix(m):
        names = [x.strip() for x in m.group(2).strip("()").split(",") if x.strip()]
        out = []
        for x in names:
            base = x.split(" as ")[0]
            out.append(
                f"{m.group(1)}from psgrad.workflows.{WHERE[base]} import {x}"
                if base in WHERE and " as " not in x
                else f"{m.group(1)}from psgrad.workflows import {x}"
            )
        return "\n".join(out)

    n = re.sub(r"(?m)^([ \t]*)from psgrad\.workflows import ([^\n(]+)$", fix, n)
    if re.search(r"(?m)^\s*from psgrad import workflows$", n):
        used = sorted(set(re.findall(r"\bworkflows\.(\w+)\(", n)))
        n = re.sub(
            r"(?m)^([ \t]*)from psgrad import workflows$",
            lambda m: "\n".join(f"{m.group(1)}from psgrad.workflows.{WHERE[f]} import {f}" for f in used),
            n,
        )
        n = re.sub(r"\bworkflows\.(\w+)\(", r"\1(", n)
    if n != t:
        p.write_text(n)
sub(
    "tests/test_workflows.py",
    ("import psgrad.workflows.analyze", "import psgrad.workflows.analyze"),
    ("psgrad.workflows.analyze(config", "psgrad.workflows.analyze.analyze(config"),
)
sub(
    "psgrad/engine/influence/methods/ekfac.py",
    (
        "from psgrad.engine.influence.curvature.kronecker_fitting import Block",
        "from psgrad.engine.influence.curvature.kronecker_blocks import Block",
    ),
)
# --- aliases of moved modules: the new name everywhere
import ast

for p in (
    sorted((root / "psgrad").rglob("*.py"))
    + sorted((root / "tests").rglob("*.py"))
    + sorted((root / "benchmarks").rglob("*.py"))
    + sorted((root / "tools").rglob("*.py"))
):
    t = p.read_text()
    n = t
    for m in re.finditer(r"(?m)^[ \t]*from (psgrad[\w.]*) import (\w+) as (\w+)$", t):
        pk, leaf, old = m.groups()
        if leaf == old or not ((root / (pk.replace(".", "/"))) / f"{leaf}.py").exists():
            continue
        names = (
            {x.id for x in ast.walk(ast.parse(t)) if isinstance(x, ast.Name)}
            | {a.arg for a in ast.walk(ast.parse(t)) if isinstance(a, ast.arg)}
            | {x.name for x in ast.walk(ast.parse(t)) if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
            | {
                al.asname or al.name
                for x in ast.walk(ast.parse(t))
                if isinstance(x, ast.ImportFrom)
                for al in x.names
                if (al.asname or al.name) != old
            }
        )
        if leaf in names:
            continue
        n = re.sub(
            rf'(?<![\w."\'`]){old}\b(?=[.,)\]])',
            leaf,
            n.replace(m.group(0), m.group(0).replace(f" as {old}", "")),
        )
        n = re.sub(rf"(?m)^([ \t]*from {re.escape(pk)} import )(.*)$", lambda x: x.group(0), n)
    if n != t:
        try:
            ast.parse(n)
        except SyntaxError:
            print("ALIAS", p)
            continue
        p.write_text(n)
t = (root / "psgrad/engine/transforms/__init__.py").read_text()
t = re.sub(
    r"from psgrad.engine.transforms import autograd_outside( as \w+)?\n",
    "from psgrad.engine.transforms import autograd_outside as autograd_outside\n",
    t,
)
t = re.sub(
    r"from psgrad.engine.transforms import private_torch( as \w+)?\n",
    "from psgrad.engine.transforms import private_torch as private_torch\n",
    t,
)
(root / "psgrad/engine/transforms/__init__.py").write_text(t)
p = root / "psgrad/engine/transforms/random_draws.py"
t = p.read_text()
t = t.replace(
    "for generator, state in saved:\n        generator.set_state(state)",
    "for generator, before in saved:\n        generator.set_state(before)",
)
t = t.replace("for generator, state in states():", "for generator, now in states():").replace(
    "if not torch.equal(state, seeded.get_state())", "if not torch.equal(now, seeded.get_state())"
)
p.write_text(t)
