"""The part of a page that a tool makes, between two comments."""

from __future__ import annotations


def with_made_part(text: str, tool: str, made: str) -> str:
    """The page `text` with `made` in place of the part that `tool` made earlier."""
    begin, end = f"<!-- made by tools/{tool}.py -->\n", "<!-- end of the made part -->\n"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{made}{end}{rest.partition(end)[2]}"
