"""Wraps docstrings and comments at 110 characters: `rewrap.py FILE...`."""

# ruff: noqa

import ast, io, re, sys, textwrap, tokenize

W = 110


def wrap(words, first, rest):
    return textwrap.wrap(
        words, W, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


BUL = re.compile(r"(\s*)([-*] |\d+\. |[`\w, ]{1,40}: {2,})")


def wrap_lines(lines, room=0):
    """lines of prose, with indentation; room: extra characters on the last line"""
    out, k = [], 0
    while k < len(lines):
        line = lines[k]
        if not line.strip():
            out.append(line)
            k += 1
            continue
        ind = len(line) - len(line.lstrip())
        m = re.match(r"\s*([-*] |\d+\. )", line)
        hang = len(m.group(0)) if m else ind
        j = k + 1
        while (
            j < len(lines)
            and lines[j].strip()
            and (len(lines[j]) - len(lines[j].lstrip())) == hang
            and not re.match(r"\s*([-*] |\d+\. |>>>|\|)", lines[j])
        ):
            j += 1
        para = lines[k:j]
        if any(len(p) > W for p in para) and not re.match(r"\s*(>>>|\|)", line):
            text = " ".join(p.strip() for p in para)
            out += wrap(text, " " * ind, " " * hang)
        else:
            out += para
        k = j
    return out


def docstrings(tree):
    for n in ast.walk(tree):
        if (
            isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            or hasattr(n, "body")
            and isinstance(n.body, list)
        ):
            for b in n.body:
                if (
                    isinstance(b, ast.Expr)
                    and isinstance(b.value, ast.Constant)
                    and isinstance(b.value.value, str)
                ):
                    yield b


def do(path):
    text = open(path).read()
    lines = text.split("\n")
    if all(len(l) <= W for l in lines):
        return
    # trailing comments to the line above
    toks = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    ins = {}
    for t in toks:
        r, c = t.start
        if (
            len(lines[r - 1]) > W
            and lines[r - 1][:c].strip()
            and not re.search(r"noqa|type: ignore|fmt:", t.string)
        ):
            ins[r] = t.string
            lines[r - 1] = lines[r - 1][:c].rstrip()
    out = []
    for i, l in enumerate(lines, 1):
        if i in ins:
            out.append(" " * (len(l) - len(l.lstrip())) + ins[i])
        out.append(l)
    text = "\n".join(out)
    # docstrings, last first
    lines = text.split("\n")
    tree = ast.parse(text)
    for b in sorted(docstrings(tree), key=lambda b: -b.lineno):
        a, z = b.lineno - 1, b.end_lineno
        seg = lines[a:z]
        if all(len(s) <= W for s in seg):
            continue
        ind = len(seg[0]) - len(seg[0].lstrip())
        m = re.match(r'\s*([rRbBuU]?)"""', seg[0])
        if not m:
            continue
        opener = m.group(0)
        body0 = seg[0][len(opener) :]
        one = len(seg) == 1
        if one:
            body0 = body0[:-3]
        else:
            last = seg[-1]
            if last.strip() != '"""':
                seg[-1] = last.rstrip()[:-3]
                seg = [*seg, " " * ind + '"""']
        pre = opener.lstrip()
        body = [" " * ind + body0] + ([] if one else seg[1:-1])
        # the first line has the opening quotes
        body[0] = " " * ind + "QQQ" * (len(pre) // 3) + "Q" * (len(pre) % 3) + body0
        body = wrap_lines(body)
        first = body[0][ind + len(pre) :]
        if len(body) == 1 and len(opener + first) + 3 <= W:
            new = [opener + first + '"""']
        else:
            new = [opener + first, *body[1:], " " * ind + '"""']
        lines[a:z] = new
    text = "\n".join(lines)
    # comment blocks
    lines = text.split("\n")
    toks = {}
    for t in tokenize.generate_tokens(io.StringIO(text).readline):
        if t.type == tokenize.COMMENT and not lines[t.start[0] - 1][: t.start[1]].strip():
            toks[t.start[0] - 1] = t.start[1]
    out, i = [], 0
    while i < len(lines):
        if i in toks:
            j = i
            while j in toks and toks[j] == toks[i]:
                j += 1
            block = lines[i:j]
            if any(len(l) > W for l in block) and not any(
                re.search(r"noqa|type: ignore|fmt:|^\s*#!", l) for l in block
            ):
                c = toks[i]
                bodies = [l[c + 1 :] for l in block]
                global_ = [" " * c + " " + b[1:] if b.startswith(" ") else " " * c + " " + b for b in bodies]
                wrapped = wrap_lines([g if g.strip() else "" for g in global_])
                block = [(" " * c + "#" + w[c:]).rstrip() if w.strip() else " " * c + "#" for w in wrapped]
            out += block
            i = j
        else:
            out.append(lines[i])
            i += 1
    open(path, "w").write("\n".join(out))


for f in sys.argv[1:]:
    try:
        do(f)
    except Exception as x:
        print("ERR", f, repr(x))
