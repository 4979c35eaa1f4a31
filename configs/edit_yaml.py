"""Changes single values in the text of a YAML file; everything else stays as it is written, comments too."""

from __future__ import annotations

import difflib

import yaml


def changed(text: str, setting: str) -> str:
    """The text with one value replaced; `setting` is `path.to.key=VALUE`. An entry of a list is named by its `name` or
    its number. Raises ValueError that names the key and the nearest one."""
    path, equals, value = setting.partition("=")
    if not equals or not path.strip():
        raise ValueError(f"--set {setting}: write KEY=VALUE, for example --set model.recipe.hidden_size=512")
    node, found = yaml.compose(text, Loader=yaml.SafeLoader), []
    for key in path.strip().split("."):
        known = _children(node)
        if key not in known:
            raise ValueError(f"--set {setting}: {_unknown(key, list(known), found)}")
        node = known[key]
        found.append(key)
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        keys = ", ".join(_children(node))
        raise ValueError(f"--set {setting}: {path} is a section; set its keys one by one ({path}.KEY: {keys})")
    wanted = _parsed(value, setting)
    after = f"{text[: node.start_mark.index]}{value.strip() or repr('')}{text[node.end_mark.index :]}"
    if found[-1] == "name" and isinstance(node.value, str) and node.value in found:
        raise ValueError(
            f"--set {setting}: {node.value} is the name by which settings and other phases find this entry: write a "
            f"new name into the file of `glm46 config`"
        )
    if _parsed(after, setting, found) != wanted:
        raise ValueError(f"--set {setting}: the value does not read as one value there, put it into quotes")
    return after


def _children(node: yaml.Node) -> dict[str, yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return {key.value: value for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        named = [_children(entry).get("name") for entry in node.value]
        return {
            str(number) if name is None else name.value: entry
            for number, (name, entry) in enumerate(zip(named, node.value, strict=True))
        }
    return {}


def _unknown(key: str, known: list[str], found: list[str]) -> str:
    place = ".".join(found) or "the file"
    if not known:
        return f"{place} is one value and has no key {key}"
    nearest = difflib.get_close_matches(key, known, 1)
    hint = f"the nearest is {nearest[0]}" if nearest else f"its keys are {', '.join(known)}"
    return f"no key {key} in {place}; {hint}"


def _parsed(text: str, setting: str, path: list[str] | None = None) -> object:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        for key in path or []:
            node = _children(node)[key]
    except (yaml.YAMLError, KeyError) as error:
        raise ValueError(f"--set {setting}: the value is no YAML, put it into quotes") from error
    return None if node is None else yaml.SafeLoader("").construct_object(node, deep=True)
