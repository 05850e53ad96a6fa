"""docs/reference/commands.md is made from the commands, and names all of them."""

from __future__ import annotations

import inspect

import pytest

from psgrad.cli.app import app
from tools.commands_page import PAGE, page, parameters_of


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(""), "run python -m tools.pages"


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda each: each.name)
def test_a_command_and_each_of_its_options_says_what_it_does(command: object) -> None:
    callback = command.callback  # type: ignore[attr-defined]
    assert len(inspect.getdoc(callback) or "") > 30
    for key, about, _, _ in parameters_of(callback):
        assert about.help, key
