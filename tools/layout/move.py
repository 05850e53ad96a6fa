"""Moves and merges modules by a map and rewrites imports, paths and names: `move.py ROOT MAP [--check]`."""

# ruff: noqa

import ast, builtins, re, subprocess, sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(sys.argv[1])
CHECK = "--check" in sys.argv
sys.path.insert(0, str(Path(__file__).parent))
import importlib.util

spec = importlib.util.spec_from_file_location("themap", sys.argv[2])
themap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(themap)


def modname(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


files = {modname(p): p for p in sorted((ROOT / "psgrad").rglob("*.py"))}
is_pkg = {m for m, p in files.items() if p.name == "__init__.py"}

# new -> [old]; names are without 'psgrad.'
merge = {}
for new, olds in themap.MAP.items():
    merge["psgrad." + new] = ["psgrad." + o for o in olds]
target = {}
for new, olds in merge.items():
    for o in olds:
        assert o in files, o
        assert o not in target, ("twice", o)
        target[o] = new
for m in files:
    target.setdefault(m, m)
members = defaultdict(list)
for o, n in target.items():
    members[n].append(o)
for n in merge:
    members[n] = merge[n]
NEWPKG = {"psgrad." + x for x in themap.PACKAGES}  # packages that get an __init__ of their own
RENAME = {}  # (oldmodule, name) -> newname
for k, v in themap.RENAME.items():
    mod, name = k.split(":")
    RENAME["psgrad." + mod, name] = v

src = {m: p.read_text() for m, p in files.items()}


def toplevel(tree):
    """names bound at module level: name -> kind ('def', 'import', origin)"""
    out = {}

    def bind(node):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            out[node.name] = ("def", None)
        elif isinstance(node, ast.Import):
            for a in node.names:
                out[(a.asname or a.name).split(".")[0]] = ("import", (None, a.name, a.asname))
        elif isinstance(node, ast.ImportFrom):
            for a in node.names:
                out[a.asname or a.name] = ("import", (node.module, a.name, None))
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            ts = node.targets if isinstance(node, ast.Assign) else [node.target]
            for t in ts:
                for s in ast.walk(t):
                    if isinstance(s, ast.Name) and isinstance(s.ctx, ast.Store):
                        out[s.id] = ("def", None)
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            for c in ast.iter_child_nodes(node):
                if isinstance(c, ast.stmt):
                    bind(c)
            if isinstance(node, ast.For):
                for s in ast.walk(node.target):
                    if isinstance(s, ast.Name):
                        out[s.id] = ("def", None)

    for n in tree.body:
        bind(n)
    return out


class Edits:
    def __init__(self, text):
        self.lines = [l.encode() for l in text.splitlines(keepends=True)]
        self.starts = [0]
        for l in self.lines:
            self.starts.append(self.starts[-1] + len(l))
        self.data = text.encode()
        self.edits = []

    def pos(self, line, col):
        return self.starts[line - 1] + col

    def replace(self, node, new):
        self.edits.append(
            (
                self.pos(node.lineno, node.col_offset),
                self.pos(node.end_lineno, node.end_col_offset),
                new.encode(),
            )
        )

    def span(self, a, b, new):
        self.edits.append((a, b, new.encode()))

    def result(self):
        out = self.data
        for a, b, new in sorted(set(self.edits), reverse=True):
            out = out[:a] + new + out[b:]
        return out.decode()


def rename_in(text, old, new):
    """rename a module level name in one module's text"""
    e = Edits(text)
    tree = ast.parse(text)

    def params_bind(fn):
        a = fn.args
        return any(
            x.arg == old
            for x in a.args + a.kwonlyargs + a.posonlyargs + [y for y in (a.vararg, a.kwarg) if y]
        )

    def local_bind(fn):
        if params_bind(fn):
            return True
        if isinstance(fn, ast.Lambda):
            return False
        for n in ast.walk(fn):
            if isinstance(n, ast.Global) and old in n.names:
                return False
        for n in ast.walk(fn):
            if isinstance(n, ast.Name) and n.id == old and isinstance(n.ctx, ast.Store):
                return True
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n is not fn and n.name == old:
                return True
            if isinstance(n, (ast.Import, ast.ImportFrom)) and any(
                (a.asname or a.name) == old for a in n.names
            ):
                return True
        return False

    def walk(node, incls=False):
        for c in ast.iter_child_nodes(node):
            if isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                if not isinstance(c, ast.Lambda):
                    for d in c.decorator_list:
                        visit(d)
                for d in c.args.defaults + [k for k in c.args.kw_defaults if k]:
                    visit(d)
                for a in ast.walk(c.args):
                    if isinstance(a, ast.arg) and a.annotation:
                        visit(a.annotation)
                if not isinstance(c, ast.Lambda) and c.returns:
                    visit(c.returns)
                if (
                    not isinstance(c, ast.Lambda)
                    and c.name == old
                    and isinstance(node, (ast.Module, ast.If, ast.Try))
                ):
                    fix_def(c)
                if local_bind(c):
                    continue
                for s in c.body if isinstance(c.body, list) else [c.body]:
                    visit(s)
            elif isinstance(c, ast.ClassDef):
                if c.name == old and isinstance(node, (ast.Module, ast.If, ast.Try)):
                    fix_def(c)
                walk(c)
            else:
                visit_one(c)
                walk(c)

    def fix_def(c):
        line = e.lines[c.lineno - 1]
        m = re.search(rb"(def|class)\s+" + old.encode() + rb"\b", line)
        s = e.starts[c.lineno - 1] + m.end() - len(old.encode())
        e.span(s, s + len(old.encode()), new)

    def visit_one(n):
        if isinstance(n, ast.Name) and n.id == old:
            e.replace(n, new)
        if isinstance(n, ast.Global) and old in n.names:
            raise SystemExit("global " + old)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value == old:
            pass

    def visit(n):
        visit_one(n)
        w = (
            ast.Module(body=[n], type_ignores=[])
            if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Lambda))
            else None
        )
        walk(w if w is not None else n)

    walk(tree)
    # duplicates are possible through decorators: set() in result handles
    return e.result()


# packages that hold nothing any more
for m, p in list(files.items()):
    if m in is_pkg and target[m] == m and m not in merge and m != "psgrad":
        body = ast.parse(src[m]).body
        if all(isinstance(n, ast.Expr) for n in body) and not any(
            t.startswith(m + ".") for t in target.values() if t != m
        ):
            print("drop", m)
            p.unlink() if not CHECK else None
            del files[m], target[m], members[m]
# 1. renames inside the defining modules
for (m, name), new in RENAME.items():
    assert m in src, m
    assert name in toplevel(ast.parse(src[m])), ("no such name", m, name)
    src[m] = rename_in(src[m], name, new)

PRIVATE_EXPORTS = {}


def resolve(module, name):
    """from module import name -> (new module, new name, is_module)"""
    full = f"{module}.{name}"
    if full in target:
        return target[full], None, True
    return target.get(module, module), RENAME.get((module, name), name), False


def rewrite_imports(text, own_new=None, where=""):
    """rewrite psgrad imports; own_new: the new module that this text will be in (imports from it are dropped)"""
    tree = ast.parse(text)
    e = Edits(text)
    renames = {}
    attrs = {}
    used_in_doc = None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and (node.module == "psgrad" or node.module.startswith("psgrad."))
            and node.level == 0
        ):
            lines = []
            changed = False
            for a in node.names:
                n, nm, ismod = resolve(node.module, a.name)
                if ismod:
                    parent, leaf = n.rsplit(".", 1) if "." in n else ("", n)
                    bound = a.asname or a.name
                    if n == own_new:
                        attrs[bound] = True
                        changed = True
                        continue
                    if f"{node.module}.{a.name}" != n:
                        changed = True
                    if a.asname is None and leaf != a.name:
                        lines.append(f"from {parent} import {leaf} as {a.name}")
                    else:
                        lines.append(
                            f"from {parent} import {leaf}"
                            + (f" as {a.asname}" if a.asname and a.asname != leaf else "")
                        )
                else:
                    bound = a.asname or a.name
                    if n == own_new:
                        changed = True
                        if bound != nm:
                            renames[bound] = nm
                        continue
                    if nm != a.name or n != node.module:
                        changed = True
                    if nm != a.name and a.asname is None:
                        renames[a.name] = nm
                        lines.append(f"from {n} import {nm}")
                    elif a.asname and a.asname != nm or (a.asname == a.name == nm):
                        lines.append(f"from {n} import {nm} as {a.asname}")
                    else:
                        lines.append(f"from {n} import {nm}")
            if changed:
                indent = " " * node.col_offset
                e.replace(node, ("\n" + indent).join(lines) if lines else "pass")
        elif isinstance(node, ast.Import):
            for a in node.names:
                if a.name.startswith("psgrad") and target.get(a.name, a.name) != a.name:
                    if target[a.name] == own_new:
                        raise SystemExit(f"{where}: import of own {a.name}")
                    e.replace(node, f"import {target[a.name]}" + (f" as {a.asname}" if a.asname else ""))
    out = e.result()
    for old, new in renames.items():
        if old in toplevel(ast.parse(out)) and own_new is None:
            print("WARN", where, old, "bound otherwise")
        out = rename_in(out, old, new)
    if attrs:
        tree = ast.parse(out)
        e = Edits(out)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in attrs
            ):
                e.replace(node, node.attr)
        out = e.result()
    return out


def split(text):
    """(docstring node text or '', imports text list, type-checking imports, rest)"""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    doc = ""
    body = tree.body
    if (
        body
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        doc = body[0].value.value
        body_start = 1
    else:
        body_start = 0
    imports, tc, cut = [], [], []
    if body_start:
        cut.append((body[0].lineno, body[0].end_lineno))
    for n in body[body_start:]:
        seg = "".join(lines[n.lineno - 1 : n.end_lineno])
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            imports.append(seg.strip("\n"))
            cut.append((n.lineno, n.end_lineno))
        elif isinstance(n, ast.Pass):
            cut.append((n.lineno, n.end_lineno))
        elif (
            isinstance(n, ast.If)
            and "TYPE_CHECKING" in ast.unparse(n.test)
            and all(isinstance(x, (ast.Import, ast.ImportFrom, ast.Pass)) for x in n.body)
        ):
            tc += [
                "".join(lines[x.lineno - 1 : x.end_lineno]).strip("\n")
                for x in n.body
                if not isinstance(x, ast.Pass)
            ]
            cut.append((n.lineno, n.end_lineno))
    drop = set()
    for a, b in cut:
        drop.update(range(a, b + 1))
    rest = "".join(l for i, l in enumerate(lines, 1) if i not in drop).strip("\n")
    return doc, imports, tc, rest


def topo(olds):
    deps = {o: set() for o in olds}
    for o in olds:
        for node in ast.parse(src[o]).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for a in node.names:
                    for cand in (f"{node.module}.{a.name}", node.module):
                        if cand in deps and cand != o:
                            deps[o].add(cand)
                            break
    out = []

    def go(o, stack=()):
        if o in out:
            return
        for d in [x for x in olds if x in deps[o]]:
            if d in stack:
                continue
            go(d, (*stack, o))
        if o not in out:
            out.append(o)

    for o in olds:
        go(o)
    return out


def defsrc(text, name):
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    for n in tree.body:
        if isinstance(n, (ast.Assign, ast.AnnAssign)):
            ts = n.targets if isinstance(n, ast.Assign) else [n.target]
            names = [
                x.id
                for t in ts
                for x in ast.walk(t)
                if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
            ]
            if name in names:
                return "".join(lines[n.lineno - 1 : n.end_lineno]).strip(), (n.lineno, n.end_lineno)
    return None


REV = {}
for o, n in target.items():
    REV.setdefault(n, []).append(o)


def final(module, name):
    seen = 0
    while module and seen < 5:
        seen += 1
        nxt = None
        for o in REV.get(module, [module] if module in src else []):
            for n in ast.parse(src[o]).body:
                if isinstance(n, ast.ImportFrom) and n.module:
                    for a in n.names:
                        if (a.asname or a.name) == name:
                            nxt = (target.get(n.module, n.module), a.name)
            if name in toplevel(ast.parse(src[o])) and toplevel(ast.parse(src[o]))[name][0] == "def":
                return module, name
        if nxt is None:
            return module, name
        module, name = nxt
    return module, name


problems = 0
new_text = {}
for new, olds in members.items():
    if olds == [new]:
        new_text[new] = rewrite_imports(src[new], new, new)
        continue
    if len(olds) == 1:
        new_text[new] = rewrite_imports(src[olds[0]], new, new)
        continue
    order = topo(olds)
    texts = {o: rewrite_imports(src[o], new, o) for o in order}
    bound = {}
    drops = {}
    skip_imports = {}
    for o in order:
        for name, (kind, origin) in toplevel(ast.parse(texts[o])).items():
            if name in ("__all__", "TYPE_CHECKING", "annotations"):
                continue
            if name in bound:
                k2, or2, o2 = bound[name]
                if (
                    kind == "def"
                    and k2 == "def"
                    and defsrc(texts[o], name)
                    and defsrc(texts[o], name)[0] == defsrc(texts[o2], name)[0]
                ):
                    a, b = defsrc(texts[o], name)[1]
                    drops.setdefault(o, []).append((a, b))
                    continue
                if kind == "import" and k2 == "import" and final(*origin[:2]) == final(*or2[:2]):
                    skip_imports.setdefault(o, set()).add(name)
                    continue
                if (
                    kind == "import"
                    and origin[0] is None
                    and k2 == "import"
                    and or2[0] is None
                    and origin[2] is None
                    and or2[2] is None
                ):
                    continue
                if kind == "import" and k2 == "import" and origin == or2:
                    continue
                problems += 1
                print(f"CLASH {new}: {name}  {o2}({k2},{or2}) {o}({kind},{origin})")
            else:
                bound[name] = (kind, origin, o)
            if kind == "def" and hasattr(builtins, name):
                problems += 1
                print("BUILTIN", new, name, o)
    for o, spans in drops.items():
        ls = texts[o].splitlines(keepends=True)
        dead = {i for a, b in spans for i in range(a, b + 1)}
        texts[o] = "".join("" if i in dead else l for i, l in enumerate(ls, 1))
    for o, names in skip_imports.items():
        t = ast.parse(texts[o])
        e = Edits(texts[o])
        for n in t.body:
            if isinstance(n, ast.ImportFrom) and any((a.asname or a.name) in names for a in n.names):
                keep = [a for a in n.names if (a.asname or a.name) not in names]
                e.replace(
                    n,
                    (
                        f"from {n.module} import "
                        + ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in keep)
                        if keep
                        else "pass"
                    ),
                )
        texts[o] = e.result()
    docs, imports, tcs, rests = [], [], [], []
    for o in olds:
        d, i, t, r = split(texts[o])
        docs.append(d.strip())
    for o in order:
        d, i, t, r = split(texts[o])
        for x in i:
            if x not in imports:
                imports.append(x)
        for x in t:
            if x not in tcs:
                tcs.append(x)
        if r.strip():
            rests.append(r)
    tcs = [t for t in tcs if t.strip() not in {i.strip() for i in imports}]
    fut = [i for i in imports if "__future__" in i]
    imports = [i for i in imports if "__future__" not in i]
    ty = [i for i in imports if i.startswith("from typing import")]
    doc = "\n\n".join(d for d in docs if d)
    out = (
        '"""'
        + doc
        + ("\n" if "\n" in doc else "")
        + '"""\n\n'
        + "from __future__ import annotations\n\n"
        + "\n".join(imports)
        + "\n"
    )
    if tcs:
        out += (
            "\nif TYPE_CHECKING:\n" + "\n".join(t if t.startswith("    ") else "    " + t for t in tcs) + "\n"
        )
    out += "\n\n" + "\n\n\n".join(rests) + "\n"
    try:
        ast.parse(out)
    except SyntaxError as x:
        print("SYNTAX", new, x)
        problems += 1
        Path("/tmp/bad_" + new + ".py").write_text(out)
    new_text[new] = out
print(len(members), "modules,", problems, "problems")
if CHECK:
    sys.exit()

# 2. write
for m, p in files.items():
    p.unlink()
newfiles = set()
allpk = set()
for n in new_text:
    parts = n.split(".")
    for k in range(1, len(parts)):
        allpk.add(".".join(parts[:k]))
for n, text in new_text.items():
    pkg = n in allpk
    p = ROOT / (n.replace(".", "/") + ("/__init__.py" if pkg else ".py"))
    p.parent.mkdir(parents=True, exist_ok=True)
    p.write_text(text)
    newfiles.add(p)
for pk in allpk:
    p = ROOT / pk.replace(".", "/") / "__init__.py"
    if not p.exists():
        p.write_text(f'"""{themap.PACKAGE_DOCS.get(pk.removeprefix("psgrad."), "TODO " + pk)}"""\n')
# 3. the other Python files
others = [
    Path(x)
    for x in subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "*.py"], capture_output=True, text=True
    ).stdout.split()
]
for rel in others:
    p = ROOT / rel
    if rel.parts[0] == "psgrad" or not p.exists():
        continue
    t = p.read_text()
    if "psgrad" not in t:
        continue
    try:
        n = rewrite_imports(t, None, str(rel))
    except SyntaxError:
        continue
    if n != t:
        p.write_text(n)
# 4. text: dotted names and paths
dotted = {o: n for o, n in target.items() if o != n}
pat = (
    re.compile(r"\b(" + "|".join(sorted(map(re.escape, dotted), key=len, reverse=True)) + r")\b(?!\.py\b)")
    if dotted
    else None
)
paths = {}
for o, n in dotted.items():
    oldp = files[o].relative_to(ROOT).as_posix()
    newp = n.replace(".", "/") + ("/__init__.py" if n in allpk else ".py")
    paths[oldp] = newp
    paths[oldp.removeprefix("psgrad/")] = newp.removeprefix("psgrad/")
    paths[oldp.removeprefix("psgrad/engine/")] = newp.removeprefix("psgrad/engine/")
ppat = re.compile(
    r"(?<![\w/])("
    + "|".join(sorted((re.escape(x) for x in paths if "/" in x), key=len, reverse=True))
    + r")(?!\w)"
)
names = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True).stdout.split()
for rel in set(names) | {str(p.relative_to(ROOT)) for p in newfiles}:
    p = ROOT / rel
    if (
        not p.exists()
        or p.suffix not in {".py", ".md", ".yaml", ".yml", ".toml", ".html", ".txt", ".json", ".sh", ""}
        or not p.is_file()
    ):
        continue
    try:
        t = p.read_text()
    except UnicodeDecodeError:
        continue
    if p.suffix == ".json" and len(t) > 300_000:
        continue
    n = t

    # dotted names only outside of import statements that were handled (they hold new names by now)
    def sub(m):
        return dotted[m.group(1)]

    n = "\n".join(
        line if re.match(r"\s*(from|import) psgrad", line) else pat.sub(sub, line) for line in n.split("\n")
    )
    n = ppat.sub(lambda m: paths[m.group(1)], n)
    if n != t:
        p.write_text(n)
