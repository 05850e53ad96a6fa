"""Writes the pages of the documentation that are made from the code.

python -m tools.pages            # writes those that are out of date, and prints their paths
python -m tools.pages --check    # writes nothing; exit code 1 if a page is out of date
"""

from __future__ import annotations

import sys

from tools import (
    benchmarks_page,
    commands_page,
    config_page,
    influence_page,
    layers,
    measures_page,
    operators_page,
)

GENERATORS = (
    commands_page,
    config_page,
    layers,
    measures_page,
    operators_page,
    influence_page,
    benchmarks_page,
)
"""Each has a PAGE and a function `page(text) -> str`: the whole page as it has to be, from the page as it is.
"""


def outdated() -> dict[object, str]:
    """generator -> its page as it has to be, of all pages that differ from that."""
    wanted = {each: each.page(each.PAGE.read_text(encoding="utf-8")) for each in GENERATORS}
    return {each: text for each, text in wanted.items() if each.PAGE.read_text(encoding="utf-8") != text}


def main(arguments: list[str]) -> int:
    """Exit code."""
    check = "--check" in arguments
    found = outdated()
    for each in GENERATORS:
        if each in found:
            print(each.PAGE)
            if not check:
                each.PAGE.write_text(found[each], encoding="utf-8")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
