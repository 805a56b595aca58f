"""YAML file and `key=value` overrides -> `Config`; and back: `dump_config`.

Whatever is wrong, `load_config` raises `ConfigError`: one line naming the key, its value, where it
was said, and the way out. Nothing is ignored, converted or adjusted.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from leangrpo.configs.checks import ConfigError, Problem, find_problems, problem, raise_first, shorten, show
from leangrpo.configs.help import (
    ADAPTER,
    KeyPath,
    allowed,
    choices,
    is_section,
    nearest,
    nearest_keys,
    schema_at,
)
from leangrpo.configs.schema import Config

PACKAGED = Path(__file__).parent
COMMAND_LINE = "command line"
UNKNOWN, MISSING = "unexpected_keyword_argument", "missing"  # pydantic's names

# YAML 1.2's plain scalars, less its octal, hexadecimal, infinite and very long numbers. PyYAML's own
# rules are those of YAML 1.1, where 1e-4 is text, 010 is eight, and no and off are false.
# Name, pattern, first characters, conversion.
SCALARS: tuple[tuple[str, str, str, Callable[[str], object]], ...] = (
    ("null", r"(~|null|Null|NULL)?", "~nN", lambda text: None),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    ("int", r"[-+]?(0|[1-9][0-9]{0,99})", "-+0123456789", int),
    (
        "float",
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?",
        "-+.0123456789",
        float,
    ),
)
TAG = "tag:yaml.org,2002:"


class _NotYaml(Exception):
    """What cannot be read, and in which line, counted from 1."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


class _Loader(yaml.SafeLoader):
    """Composes nodes by the rules above, without aliases: a value stands where it is used."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            line = event.start_mark.line + 1
            raise _NotYaml("aliases (*name) are not read; write the value out", line)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes the text that `_Loader` would read as something else, and no other."""


def _use_yaml_12(*classes: type[yaml.SafeLoader] | type[yaml.SafeDumper]) -> None:
    for one in classes:
        one.yaml_implicit_resolvers = {}  # else PyYAML's own rules come first
        for name, pattern, first, _ in SCALARS:
            one.add_implicit_resolver(TAG + name, re.compile(rf"({pattern})\Z"), [*first, ""])


_use_yaml_12(_Loader, _Dumper)


def load_config(source: str, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of a run.

    `source`: a YAML file, or the name of a packaged configuration with or without `configs/` and
    `.yaml`. `overrides`: `a.b=value` each, the value in YAML; the last one wins.
    Raises ConfigError.
    """
    tree, said = _read(*_find(source))
    problems = [one for text in overrides if (one := _override(tree, said, text))]
    config = None
    try:
        config = ADAPTER.validate_json(json.dumps(tree))
    except ValidationError as error:
        problems += _invalid(error, tree, said)
    else:
        given = [key for key, where in said.items() if where == COMMAND_LINE]
        problems += find_problems(config, given)
    raise_first(problems, said)
    assert config is not None
    return config


def dump_config(config: Config) -> str:
    """YAML text of every key, in the order of the schema; `load_config` reads it back."""
    tree = ADAPTER.dump_python(config, mode="json")
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def packaged_configs() -> list[str]:
    """Names of the configurations that are part of the package."""
    return sorted(path.stem for path in PACKAGED.glob("*.yaml"))


def _find(source: str) -> tuple[Path, str]:
    """The file, or the packaged configuration of that name; and what errors call it."""
    if Path(source).is_file():
        return Path(source), source
    name = Path(source).as_posix().removeprefix("configs/").removesuffix(".yaml")
    names = packaged_configs()
    if name in names:
        return PACKAGED / f"{name}.yaml", f"packaged {name}.yaml"
    close = nearest(name.rsplit("/", 1)[-1], names)
    listed = ", ".join(close + [other for other in names if other not in close])
    text = f"no such file, and no packaged configuration; packaged are {listed}"
    raise ConfigError(f"configuration {show(source)} (command line): {text}")


def _read(path: Path, called: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Content of a file, and the line where every dotted key was said."""
    try:
        text = path.read_text(encoding="utf-8")
        tree, said = _parse(text, "", lambda line: f"{called}, line {line}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{called}: cannot be read: {error}") from error
    except _NotYaml as error:
        raise ConfigError(f"{called}, line {error.line}: {error}") from error
    if not isinstance(tree, dict):
        text = "write keys with values, such as updates: 60"
        raise ConfigError(f"{said['']}: {show(tree)} instead of a mapping; {text}")
    return tree, said | {"": called}


def _override(tree: dict[str, Any], said: dict[str, str], text: str) -> Problem | None:
    """Puts `a.b=value` into the tree, or says why not."""
    key, equals, value_text = text.partition("=")
    path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    schema = schema_at(path)
    fault: str | None
    if not (key and equals):
        example = f"{key}=VALUE" if schema and key else "optimizer.learning_rate=1e-3"
        fault = f"is not key=value; write {example}"
    elif schema is None or is_section(schema):
        fault = _no_place(path)
    else:
        try:
            value, places = _parse(value_text, key, lambda line: COMMAND_LINE)
            fault = _put(tree, path, value)
        except _NotYaml as error:
            fault = f"the value is not YAML ({error}); must be {allowed(schema)}"
    if fault:
        return Problem(key, shorten(text), fault, COMMAND_LINE)
    for old in [old for old in said if old == key or old.startswith(f"{key}.")]:
        del said[old]
    said.update(places)
    return None


def _no_place(path: KeyPath) -> str:
    """Why no value can be put at `path`: a section, something below a value, or no key at all."""
    schema = schema_at(path)
    if schema is not None:
        return f"is a section; set its keys one by one: {', '.join(schema['properties'])}"
    depth = max(n for n in range(len(path)) if schema_at(path[:n]) is not None)
    outer, name = schema_at(path[:depth]), _dotted(path[:depth])
    assert outer is not None
    if is_section(outer):
        return _unknown(path)
    return f"{name} takes {allowed(outer)}, and has no such part; write {name}=VALUE"


def _put(tree: dict[str, Any], path: KeyPath, value: object) -> str | None:
    """Sets the value at `path`, or says what stands in the way."""
    node: Any = tree
    for depth, part in enumerate(path):
        outer = _dotted(path[:depth])
        if isinstance(node, dict) and isinstance(part, str):
            schema = schema_at(path[: depth + 1]) or {}
            node.setdefault(part, copy.deepcopy(schema.get("default", {})))
        elif not _has(node, part) and isinstance(node, list):
            return f"{outer} has length {len(node)}, counted from 0; set {outer}=[...] as a whole"
        elif not _has(node, part):
            return f"{outer} is {show(node)}, which has no such part; correct that first"
        if depth == len(path) - 1:
            node[part] = value
        node = node[part]
    return None


def _parse(text: str, key: str, place: Callable[[int], str]) -> tuple[Any, dict[str, str]]:
    """The value of a YAML text, and the place of every key in it. Raises _NotYaml."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        spaces = "; indent with spaces" if "\\t" in str(error.problem) else ""
        raise _NotYaml(f"{error.problem}{spaces}", mark.line + 1 if mark else 1) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _NotYaml(f"character #x{error.character:04x} is not allowed", line) from error
    if root is None:
        way_out = "" if key else "; write at least out_dir: FOLDER"
        raise _NotYaml(f"nothing is there{way_out}", 1)
    places: dict[str, str] = {}
    return _build(root, key, place, places), places


def _build(node: yaml.Node, key: str, place: Callable[[int], str], places: dict[str, str]) -> Any:
    """The value of a node, whose place and those of its parts are added to `places`."""
    line = node.start_mark.line + 1
    places.setdefault(key, place(line))
    prefix = f"{key}." if key else ""
    if isinstance(node, yaml.SequenceNode):
        return [_build(one, f"{prefix}{n}", place, places) for n, one in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            name = _name(name_node, prefix, line)
            if name in mapping:
                earlier = places[f"{prefix}{name}"]
                raise _NotYaml(f"{prefix}{name} is there twice ({earlier}); remove one", line)
            places[f"{prefix}{name}"] = place(line)
            mapping[name] = _build(value_node, f"{prefix}{name}", place, places)
        return mapping
    for name, pattern, _, convert in SCALARS:
        if node.tag == TAG + name and re.fullmatch(pattern, node.value):
            return convert(node.value)
    if node.tag != f"{TAG}str":
        raise _NotYaml(f"{show(node.value)} cannot have the tag {node.tag}; remove that", line)
    return node.value


def _name(node: yaml.Node, prefix: str, line: int) -> str:
    """The key as it was typed: 1, true and null are text here."""
    if not isinstance(node, yaml.ScalarNode):
        raise _NotYaml("a key must be a word", line)
    name = str(node.value)
    if "." in name:
        outer, inner = name.split(".", 1)
        way_out = f"nest them: {prefix}{outer}: and below it, indented, {inner}:"
        raise _NotYaml(f"{prefix}{name}: dotted keys are for the command line; {way_out}", line)
    return name


def _invalid(error: ValidationError, tree: dict[str, Any], said: dict[str, str]) -> list[Problem]:
    """The problems that pydantic found: unknown keys, then wrong values, then missing ones."""
    order = {UNKNOWN: 0, MISSING: 2}
    kinds: dict[KeyPath, str] = {}
    for one in sorted(error.errors(), key=lambda one: order.get(one["type"], 1)):
        # A union has an error for each of its branches, under the name of the branch.
        path = _existing(one["loc"], tree) + (one["loc"][-1:] if one["type"] == MISSING else ())
        kinds.setdefault(path, one["type"])
    # A list with a wrong entry also counts as too short.
    outer = {path[:depth] for path in kinds for depth in range(len(path))}
    return [_problem_at(path, kinds[path], tree, said) for path in kinds if path not in outer]


def _problem_at(path: KeyPath, kind: str, tree: dict[str, Any], said: dict[str, str]) -> Problem:
    """What is wrong with the value at `path`, what is allowed, and where it was said."""
    key = _dotted(path)
    around = [_dotted(path[:depth]) for depth in range(len(path), -1, -1)]
    where = next(said[name] for name in around if name in said)
    schema = schema_at(path)
    if kind == MISSING:
        assert schema is not None
        text = f"is missing; give {allowed(schema)} ({schema['description']})"
        return Problem(key, key, text, where)
    value: Any = tree
    for part in path:
        value = value[part]
    if schema is None:
        return problem(key, value, _unknown(path), where)
    close = nearest(str(value), choices(schema))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return problem(key, value, f"must be {allowed(schema)}{hint}", where)


def _existing(path: KeyPath, tree: dict[str, Any]) -> KeyPath:
    """The part of `path` that leads to something in the tree: without names of union branches."""
    node: Any = tree
    for depth, part in enumerate(path):
        if not _has(node, part):
            return path[:depth]
        node = node[part]
    return path


def _has(node: object, part: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, dict) and part in node


def _unknown(path: KeyPath) -> str:
    """What to say about a key that does not exist."""
    close = nearest_keys(_dotted(path))
    if not close:
        return "unknown key; leangrpo train --help lists all keys"
    return f"unknown key; did you mean {' or '.join(close)}?"


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
