"""What keys there are: their types, defaults and descriptions, and which one a misspelt key meant.

Everything is read from the JSON schema of `Config`, so that errors, `--help` and the types cannot
disagree. A path is a tuple such as ("rewards", 0, "weight"); its dotted key is `rewards.0.weight`,
listed here as `rewards.N.weight`.
"""

import difflib
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from leangrpo.configs.schema import Config

ADAPTER = TypeAdapter(Config)
SCHEMA: dict[str, Any] = ADAPTER.json_schema()
WIDTH = 80
ALIKE = 0.6  # below this difflib ratio the best candidate has little to do with what was written
AS_ALIKE = 0.1  # runners-up this close to the best are named with it

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Key:
    """One key that takes a value: `dotted` name, JSON `schema`, and the heading it stands under."""

    dotted: str
    schema: dict[str, Any]
    required: bool
    heading: str


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, or the one that it refers to."""
    reference = schema.get("$ref")
    return SCHEMA["$defs"][reference.rsplit("/", 1)[1]] if reference else schema


def schema_at(path: Sequence[str | int]) -> dict[str, Any] | None:
    """JSON schema of the value at `path`; None if there is no such key."""
    schema = SCHEMA
    for part in path:
        inner = schema.get("items") if isinstance(part, int) else _properties(schema).get(part)
        if inner is None:
            return None
        schema = resolve(inner)
    return schema


def is_section(schema: dict[str, Any]) -> bool:
    """Whether the value is a mapping with keys of its own."""
    return "properties" in schema


def allowed(schema: dict[str, Any]) -> str:
    """What a value may be, in words: "an integer >= 1", "float32 or bfloat16", ..."""
    schema = resolve(schema)
    if is_section(schema):
        return "a section with the keys " + ", ".join(schema["properties"])
    if "anyOf" in schema or choices(schema):
        others = [allowed(one) for one in schema.get("anyOf", ()) if not choices(one)]
        names = choices(schema) + others
        return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
    kind = schema["type"]
    if kind == "array":
        few = "a list of one or more: " if schema.get("minItems") else "a list of: "
        items = resolve(schema["items"])
        inner = "{" + ", ".join(items["properties"]) + "}" if is_section(items) else allowed(items)
        return few + inner
    if kind == "string":
        return "non-empty text" if schema.get("minLength") else "text"
    words = {"integer": "an integer", "number": "a number", "boolean": "true or false"}
    return f"{words.get(kind, kind)} {_bounds(schema)}".strip()


def choices(schema: dict[str, Any]) -> list[str]:
    """The names a value is chosen from; empty for other types."""
    schema = resolve(schema)
    names = [name for branch in schema.get("anyOf", ()) for name in choices(branch)]
    return names or schema.get("enum", [schema["const"]] if "const" in schema else [])


def keys(path: KeyPath = (), heading: str = "") -> Iterator[Key]:
    """Every key that takes a value, in the order of the schema, plain keys before sections."""
    section = schema_at(path)
    assert section is not None
    named = {name: resolve(schema) for name, schema in section["properties"].items()}
    for name, schema in named.items():
        if not is_section(schema):
            required = name in section.get("required", ())
            yield Key(_dotted((*path, name)), section["properties"][name], required, heading)
    for name, schema in named.items():
        if is_section(schema):
            yield from keys((*path, name), _dotted((*path, name)))
        elif is_section(resolve(schema.get("items", {}))):
            yield from keys((*path, name, 0), _dotted((*path, name, "N")))


def nearest(word: str, candidates: Sequence[str]) -> list[str]:
    """The candidates most like `word`, best first; empty if none resembles it."""
    return _best({name: _ratio(word.lower(), name) for name in candidates})


def nearest_keys(dotted: str) -> list[str]:
    """Keys and sections most like `dotted`: by whole name, by last part, a word or initials of it.

    The last part finds keys that were written into the wrong section, initials find `lr`.
    Places in a list are those of `dotted`, and N where it has none.
    """
    whole, last = dotted.lower(), dotted.lower().rsplit(".", 1)[-1]
    scores = {}
    # Sorting is stable: equally good last parts stand in the order of the whole names.
    for name in sorted(_names(), key=lambda name: -_ratio(whole, name)):
        part = name.rsplit(".", 1)[-1]
        words = part.split("_")
        initials = "".join(word[0] for word in words) if len(words) > 1 else part
        same = 1.0 if last in (part, initials) else 0.9 if last in words else 0.0
        scores[name] = max(same, _ratio(last, part), _ratio(whole, name))
    places = [part for part in dotted.split(".") if part.isdecimal()]
    return [name.replace(".N", f".{places[0]}") if places else name for name in _best(scores)]


def describe_keys() -> str:
    """Every key with type, default and description, grouped by section, in 80 columns."""
    lines: list[str] = []
    heading = ""
    for key in keys():
        if key.heading != heading:
            heading = key.heading
            path = tuple(0 if part == "N" else part for part in heading.split("."))
            lines += ["", *_wrap(f"{heading}: {_docstring(path)}", "", " " * 4)]
        lines += _describe(key)
    return "\n".join(lines) + "\n"


def _describe(key: Key) -> list[str]:
    """A line `key=default (type)`, then the indented description."""
    # Quotes are left out: what is printed can be typed as an override.
    default = json.dumps(key.schema.get("default")).replace('"', "")
    head = f"{key.dotted} (required; " if key.required else f"{key.dotted}={default} ("
    described = _wrap(key.schema["description"], " " * 6, " " * 6)
    return [*_wrap(f"{head}{allowed(key.schema)})", "  ", " " * 4), *described]


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _docstring(path: Sequence[str | int]) -> str:
    section = schema_at(path)
    assert section is not None
    return str(section["description"])


def _names() -> list[str]:
    """Dotted names of all keys and sections."""
    listed = list(keys())
    return [key.dotted for key in listed] + list({key.heading: 0 for key in listed if key.heading})


def _properties(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    properties: dict[str, dict[str, Any]] = schema.get("properties", {})
    return properties


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join("N" if isinstance(part, int) else part for part in path)


def _bounds(schema: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return " and ".join(f"{sign} {schema[name]}" for name, sign in signs.items() if name in schema)


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def _best(scores: dict[str, float]) -> list[str]:
    best = max(scores.values(), default=0.0)
    close = [name for name, score in scores.items() if score >= best - AS_ALIKE]
    return sorted(close, key=lambda name: -scores[name])[:3] if best >= ALIKE else []
