"""Ids and texts as an attacker, or a careless exporter, writes them: each must be harmless in every report
and every CI format.
"""

from __future__ import annotations

NASTY: dict[str, str] = {
    "newline": "first\nsecond",
    "carriage return": "shown\rhidden",
    "terminal colours": "\x1b[31mred\x1b[0m",
    "terminal title": "\x1b]0;owned\x07",
    "terminal, eight bits": "\x9b2J",
    "workflow command": "::error::injected",
    "workflow command in a new line": "id\n::error file=x::injected",
    "old workflow command": "##[error]injected",
    "stop commands": "::stop-commands::token",
    "encoded newline": "id%0A::error::injected",
    "properties": "a,b:c=d::e",
    "end of CDATA": "]]>",
    "XML entity": "&evil;<!ENTITY x SYSTEM 'file:///etc/passwd'>",
    "formula": "=cmd|' /C calc'!A0",
    "formula, plus": "+1+1",
    "formula, minus": "-2+3",
    "formula, at": "@SUM(A1)",
    "formula after a tab": "\t=1+1",
    "formula after a carriage return": "\r=1+1",
    "script": "<script>alert(1)</script>",
    "attribute": '" onmouseover="alert(1)',
    "image": "<img src=x onerror=alert(1)>",
    "link": "javascript:alert(1)",
    "markdown link": "[click](javascript:alert(1))",
    "markdown table": "a | b | c",
    "markdown code": "``` ` ```",
    "mention": "@everyone #1",
    "template": "{{ 7 * 7 }}{% raw %}",
    "rich markup": "[red]id[/red][link=https://example.org]x[/link]",
    "TeX": "$\\frac{1}{0}$",
    "lone surrogate": "a\udc80b",
    "NUL": "a\x00b",
    "not a character": "a\uffffb\ufffe",
    "right to left": "\u202egpj.exe",
    "zero width": "a\u200bb\u2028c",
    "path": "../../etc/passwd",
    "quotes": "'\"`\\",
    "comma and quote": 'a,"b",c',
    "emoji": "\U0001f600",
    "empty": "",
    "blank": "   ",
    "long": "x" * 100_000,
}
"""By what is nasty about it."""

NOT_IN_PARQUET = ("lone surrogate",)
"""Those that a file in UTF-8 can't hold."""
