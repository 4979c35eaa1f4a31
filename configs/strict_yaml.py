"""YAML as this project reads it: no repeated keys, whose last value would silently win, and bounded in size and
depth."""

from __future__ import annotations

from collections.abc import Hashable

import yaml
from yaml.composer import ComposerError

MAX_BYTES = 16 << 20
MAX_DEPTH = 50
"""Depth of nested lists and mappings; scales have 8."""
MERGE = "tag:yaml.org,2002:merge"


def read_yaml(where: str, data: bytes) -> object:
    """The content of a YAML file; `where` is its name in messages. Raises ValueError."""
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"{where} has more than {MAX_BYTES >> 20} MiB: a YAML file of settings is smaller, name the right one"
        )
    try:
        text = data.decode()
        _refuse_depth(text)
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not a YAML file: {error}") from error


def _refuse_depth(text: str) -> None:
    """Before it is loaded: libyaml's own recursion has no limit, and its events need none."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ComposerError(None, None, f"it nests more than {MAX_DEPTH} levels deep", event.start_mark)


class _StrictLoader(yaml.CSafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = None if key_node.tag == MERGE else self.construct_object(key_node, deep=deep)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
            if isinstance(key, Hashable) and key_node.tag != MERGE:
                seen.add(key)
        return super().construct_mapping(node, deep)
