"""Reads the JSON schemas of functions' arguments: what a reference names, which values are strings, and a schema that
stands by itself for llguidance, without what that does not know and no value needs: `uniqueItems`, names of formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

NOTES = {"allOf", "default", "deprecated", "description", "examples", "title"}
"""Keys beside an allOf of one schema that restrict no value."""
VALUES = {"enum", "const", "default", "examples"}
"""Keys that hold values, not schemas."""
NAMED = {"properties", "patternProperties", "dependentSchemas"}
"""Keys whose schemas have names of the user's."""
DEFINITIONS = {"$defs", "definitions"}
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
"""Formats that llguidance holds text to; it refuses others."""
Schema = Mapping[str, Any]
Texts = Literal["all", "some", "none"]
"""Whether the values that a schema accepts are strings."""


def texts_of(schema: Any, whole: Schema) -> Texts:
    """Whether the values of a schema are strings; `whole` has what it refers to."""
    return _texts_of(schema, whole, {})


def _texts_of(schema: Any, whole: Schema, known: dict[int, Texts]) -> Texts:
    """`known` are the answers by the schemas' ids, so that one with many paths to it is looked at once."""
    schema = resolved(schema, whole)
    if id(schema) not in known:
        known[id(schema)] = _texts_of_resolved(schema, whole, known)
    return known[id(schema)]


def _texts_of_resolved(schema: Schema, whole: Schema, known: dict[int, Texts]) -> Texts:
    if "enum" in schema or "const" in schema:
        kinds = {isinstance(each, str) for each in schema.get("enum", [schema.get("const")])}
    elif "type" in schema:
        kinds = {each == "string" for each in ([schema["type"]] if isinstance(schema["type"], str) else schema["type"])}
    elif options := schema.get("anyOf", schema.get("oneOf")):
        found: set[Texts] = {_texts_of(each, whole, known) for each in options}
        return found.pop() if len(found) == 1 else "some"
    elif parts := schema.get("allOf"):
        each_of = {_texts_of(each, whole, known) for each in parts}
        return "none" if "none" in each_of else "all" if "all" in each_of else "some"
    else:
        return "some"
    return "some" if len(kinds) != 1 else "all" if kinds.pop() else "none"


def options_of(schema: Schema) -> list[Any]:
    """The schemas any of which a value may have, of one that is resolved; empty where it has no options."""
    if "enum" in schema or "const" in schema:
        return []
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": kind} for kind in schema["type"]]
    return [] if "type" in schema else schema.get("anyOf", schema.get("oneOf")) or []


def accepts_kind(schema: Any, value: Any, whole: Schema) -> bool:
    """Whether a schema accepts values of this one's type that are no strings."""
    return _accepts_kind(schema, _kinds_of(value), whole, {})


def _accepts_kind(schema: Any, kinds: set[str], whole: Schema, known: dict[int, tuple[bool, Any]]) -> bool:
    schema = resolved(schema, whole)
    if id(schema) not in known:
        known[id(schema)] = False, schema
        if "enum" in schema or "const" in schema:
            accepted = schema.get("enum", [schema.get("const")])
            is_accepted = any(_kinds_of(each) & kinds for each in accepted if not isinstance(each, str))
        elif isinstance(schema.get("type"), str):
            is_accepted = schema["type"] in kinds
        else:
            options = options_of(schema)
            is_accepted = not options or any(_accepts_kind(option, kinds, whole, known) for option in options)
        known[id(schema)] = is_accepted, schema
    return known[id(schema)][0]


def _kinds_of(value: Any) -> set[str]:
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if isinstance(value, int) else {"number"}
    return {"array" if isinstance(value, list) else "object" if isinstance(value, dict) else "string"}


def resolved(schema: Any, whole: Schema) -> Schema:
    """The schema that a reference inside `whole` names, or that allOf has alone. Raises ValueError for a reference to
    nothing, or to itself."""
    seen = set()
    while isinstance(schema, dict) and ("$ref" in schema or _wraps(schema)):
        if "$ref" not in schema:
            schema = schema["allOf"][0]
            continue
        address = str(schema["$ref"])
        if address in seen:
            raise _nowhere(address)
        seen.add(address)
        schema = _at(address, whole)
    return schema if isinstance(schema, dict) else {}


def _at(address: str, whole: Schema) -> Any:
    """What a JSON pointer names (RFC 6901)."""
    place: Any = whole
    for part in address.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, dict) and key in place:
            place = place[key]
        else:
            raise _nowhere(address)
    if address != "#" and not address.startswith("#/"):
        raise _nowhere(address)
    return place


def _nowhere(address: str) -> ValueError:
    return ValueError(f"the reference {address!r} leads nowhere: write #/$defs/NAME, and define NAME there")


def _wraps(schema: Schema) -> bool:
    """Whether a schema is another one with notes, as pydantic writes a reference that has a default."""
    parts = schema.get("allOf")
    return isinstance(parts, list) and len(parts) == 1 and schema.keys() <= NOTES


def standing_alone(schema: Schema, whole: Schema) -> dict[str, Any]:
    """A schema that is resolved, with a definition of everything to which it leads. Raises ValueError for a reference
    to nothing."""
    names: dict[str, str] = {}
    alone, defined = _copied(schema, names), {}
    while len(defined) < len(names):
        address = list(names)[len(defined)]
        defined[names[address]] = _copied(_at(address, whole), names)
    return {**alone, "$defs": defined} if defined else alone


def _copied(part: Any, names: dict[str, str]) -> Any:
    """A schema, or a list of schemas, with references by `names`, which has the addresses in their order."""
    if isinstance(part, list):
        return [_copied(each, names) for each in part]
    if not isinstance(part, dict):
        return part
    copied: dict[str, Any] = {}
    for key, value in part.items():
        if key in VALUES:
            copied[key] = value
        elif key in NAMED and isinstance(value, dict):
            copied[key] = {name: _copied(each, names) for name, each in value.items()}
        elif key == "$ref":
            copied[key] = f"#/$defs/{names.setdefault(str(value), str(len(names)))}"
        elif key not in DEFINITIONS and not _is_needless(key, value):
            copied[key] = _copied(value, names)
    return copied


def _is_needless(key: str, value: Any) -> bool:
    """Whether a keyword is one that llguidance refuses, and without which a value is still of its type."""
    if key == "propertyNames":
        return isinstance(value, dict) and value.keys() <= {"type"}
    is_unknown = not isinstance(value, str) or value not in FORMATS
    return key == "uniqueItems" or (key == "format" and is_unknown)
