"""What keeps the house in order: one-way imports, sizes of files, and a complete package."""

import ast
import re
import runpy
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools
from setuptools import Distribution

ROOT = Path(__file__).resolve().parents[1]

# folder -> the leangrpo folders it may import from, besides itself
MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "kernels": set(),
    "planners": {"configs"},
    "engine": {"configs", "kernels", "planners"},
    "tools": {"configs", "kernels", "planners", "engine"},
}
# import name -> distribution, where the two differ
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "pynvml": "nvidia-ml-py",
    "open_clip": "open-clip-torch",
}
MAX_LINES, MAX_MEDIAN_LINES = 400, 150


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every absolute import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "leangrpo":
            yield from ((node.lineno, f"leangrpo.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, str(node.module)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def normalise(requirement: str) -> str:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture
def setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py passes to setuptools.setup()."""
    arguments: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
    runpy.run_path("setup.py")
    return arguments


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(folder)
        for line, name in imports(parse(path))
        if name.split(".")[0] == "leangrpo" and name.split(".")[1] not in allowed
    ]
    assert not wrong


def test_no_relative_import() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(*MAY_IMPORT, "tests")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong


def test_every_import_is_a_declared_dependency(setup_arguments: dict[str, Any]) -> None:
    """At the top of a module only what every installation has; extras inside functions."""
    core = {normalise(requirement) for requirement in setup_arguments["install_requires"]}
    extras = setup_arguments["extras_require"].values()
    declared = core | {normalise(requirement) for extra in extras for requirement in extra}

    def third_party(tree: ast.AST) -> set[str]:
        names = {name.split(".")[0] for _, name in imports(tree)}
        names -= {*sys.stdlib_module_names, "leangrpo", "setuptools"}
        return {normalise(DISTRIBUTIONS.get(name, name)) for name in names}

    for path in sources(*MAY_IMPORT):
        tree = parse(path)
        assert third_party(tree) <= declared, path
        on_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if path.parent != ROOT / "tools":
            assert third_party(ast.Module(on_import, [])) <= core, path


@pytest.mark.parametrize("folder", ["kernels", "tools"])
def test_no_regular_package_where_a_library_has_that_name(folder: str) -> None:
    """With the repository on sys.path, kernels/__init__.py would replace Hugging Face's kernels."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_tool_shadows_the_standard_library() -> None:
    """Run as a script, a tool puts its folder first on sys.path: trace.py would hide trace."""
    assert not {path.stem for path in (ROOT / "tools").glob("*.py")} & sys.stdlib_module_names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folder_is_typed_and_linked_for_mypy(folder: str) -> None:
    assert (ROOT / folder / "py.typed").is_file()
    link = ROOT / ".typing" / "leangrpo" / folder
    assert link.is_symlink() and link.resolve() == ROOT / folder


def test_files_are_short() -> None:
    lengths = {path: count_lines(path) for path in sources(*MAY_IMPORT, "tests")}
    assert not {path: n for path, n in lengths.items() if n > MAX_LINES}
    modules = [path for path in sources(*MAY_IMPORT) if path.name != "__init__.py"]
    assert statistics.median(lengths[path] for path in modules) <= MAX_MEDIAN_LINES


def test_package_holds_every_file(setup_arguments: dict[str, Any]) -> None:
    """What setup.py leaves out works with pip install -e and is missing in a wheel."""
    build = Distribution({**setup_arguments, "script_name": "setup.py"}).get_command_obj("build_py")
    build.ensure_finalized()
    packaged = {Path(module_file) for _, _, module_file in build.find_all_modules()}
    packaged |= {Path(folder, name) for _, folder, _, names in build.data_files for name in names}
    present = {
        path.relative_to(ROOT)
        for folder in MAY_IMPORT
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".sh"} and path.name[0] != "."
    }
    assert present == packaged
