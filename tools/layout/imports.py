"""Lists the modules that import each other in a circle: `imports.py ROOT`."""

# ruff: noqa

import ast, sys
from pathlib import Path
from collections import defaultdict

root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
mods = {}
for p in sorted((root / "psgrad").rglob("*.py")):
    name = ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    mods[name] = ast.parse(p.read_text())


def imports(tree):
    out = []

    def walk(node, lazy, tc):
        for c in ast.iter_child_nodes(node):
            l = lazy or isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            t = tc or (isinstance(c, ast.If) and "TYPE_CHECKING" in ast.dump(c.test))
            if isinstance(c, ast.ImportFrom) and c.module and c.module.startswith("psgrad"):
                for a in c.names:
                    full = f"{c.module}.{a.name}"
                    out.append((full if full in mods else c.module, l, t))
            elif isinstance(c, ast.Import):
                for a in c.names:
                    if a.name.startswith("psgrad"):
                        out.append((a.name, l, t))
            walk(c, l, t)

    walk(tree, False, False)
    return out


def sccs(edges):
    idx = {}
    low = {}
    st = []
    on = set()
    res = []
    n = [0]
    sys.setrecursionlimit(10000)

    def go(v):
        idx[v] = low[v] = n[0]
        n[0] += 1
        st.append(v)
        on.add(v)
        for w in edges[v]:
            if w not in idx:
                go(w)
                low[v] = min(low[v], low[w])
            elif w in on:
                low[v] = min(low[v], idx[w])
        if low[v] == idx[v]:
            c = []
            while True:
                w = st.pop()
                on.discard(w)
                c.append(w)
                if w == v:
                    break
            if len(c) > 1:
                res.append(c)

    for v in list(mods):
        if v not in idx:
            go(v)
    return res


if __name__ == "__main__":
    for label, f in (
        ("top-level", lambda l, t: not l and not t),
        ("with lazy", lambda l, t: not t),
        ("with TYPE_CHECKING", lambda l, t: True),
    ):
        e = defaultdict(set)
        for m, tr in mods.items():
            for d, l, t in imports(tr):
                if f(l, t) and d in mods and d != m:
                    e[m].add(d)
        print("##", label, sum(map(len, e.values())), "edges")
        for c in sccs(e):
            print(len(c), sorted(c))
