"""The README is true to the letter: its code runs, its excerpt is the code, its files and keys exist."""

import re
import textwrap
from pathlib import Path

import pytest

from leangrpo.configs.loader import load_config

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in fenced if name == language]


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(block for block in blocks("python") if "engine.Engine" in block)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 and all(0 < float(line.split()[0]) <= 1 for line in printed)


def test_the_excerpt_is_the_code() -> None:
    excerpt = next(block for block in blocks("python") if "torch.autograd.grad" in block)
    code = (ROOT / "tools" / "minimal_loop.py").read_text(encoding="utf-8")
    assert textwrap.indent(excerpt.rstrip(), " " * 8) in code


def test_commands_name_what_exists() -> None:
    for line in "\n".join(blocks("bash")).splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["bash"]:
            assert (ROOT / words[1]).is_file()
        if words[:2] == ["leangrpo", "train"] and "--help" not in words:
            load_config(words[2], words[3:])


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_links_and_pictures_exist(text: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", text.read_text(encoding="utf-8")):
        assert "://" in target or (text.parent / target).exists(), target


def test_files_of_the_tree_exist() -> None:
    tree = next(block for block in blocks("") if block.startswith("configs/"))
    folder = ""
    for line in tree.splitlines():
        if match := re.match(r"(\w+)/", line):
            folder = match[1]
        for name in re.findall(
            r"[\w/]+\.(?:py|sh|md)\b|(?<=\s)\w+/(?:\w+/)?(?=[\s:])", line.removeprefix(f"{folder}/")
        ):
            found = (
                [ROOT / folder / name, *(ROOT / folder).rglob(name)]
                if not name.endswith("/")
                else [ROOT / folder / name]
            )
            assert any(path.exists() for path in found) or "<" in name, f"{folder}/{name}"
