"""README tells the truth: its table of families, its commands, its make targets."""

import re
from pathlib import Path

from click.testing import CliRunner

from difftool.cli import difftool
from difftool.surgery.families import families_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_has_the_table_of_families_that_the_code_has() -> None:
    assert families_table() in README


def test_every_command_of_readme_exists_with_its_options() -> None:
    lines = re.findall(r"difftool (\w+)([^\n`]*)", README)
    used = [(name, rest) for name, rest in lines if name in difftool.list_commands(None)]
    assert {name for name, _ in used} == set(difftool.list_commands(None))
    for name, rest in used:
        usage = CliRunner().invoke(difftool, [name, "--help"], env={"COLUMNS": "200"}).output
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in usage, f"difftool {name} {option}"


def test_every_make_target_of_readme_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for target in re.findall(r"make ([a-z-]+)", README):
        assert target in targets, target
