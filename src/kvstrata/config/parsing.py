"""Dictionaries and files to a `Config`, or an error that names the key and what it accepts.

This is the only reader of configuration data; everything else gets the typed result.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import yaml
from msgspec import inspect

from kvstrata.config.accepted import accepted, alternatives, plain
from kvstrata.config.schema import Config, tier_name
from kvstrata.config.units import ByteSize, Duration
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable

_ROOT: Final = "configuration"
_LOCATED: Final = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_BOOL: Final = "tag:yaml.org,2002:bool"
_MERGE: Final = "tag:yaml.org,2002:merge"
_SURPRISES: Final = (_BOOL, "tag:yaml.org,2002:timestamp")
_STEP: Final = re.compile(r"[^.\[\]]+|\[\d+\]")


def read_config(path: Path | str) -> Config:
    """Read a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read, or what it says is wrong.
    """
    return parse_config(read_mapping(path))


def read_mapping(path: Path | str) -> Mapping[str, Any]:
    """Read a YAML or JSON file as it stands; an empty one is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, or is neither YAML nor JSON.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(
            str(path), f"cannot be read: {error.strerror}", "a readable file"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(str(path), problem, "a YAML or JSON file") from error
    return {} if data is None else data


def parse_config(data: Mapping[str, Any]) -> Config:
    """Turn a dictionary into a configuration, with defaults for what it leaves out.

    Raises:
        ConfigError: names the path of the key, what is wrong, and what is accepted.
    """
    kind = inspect.type_info(Config)
    data = _plain_data(data)
    _check_keys(data, kind, "")
    try:
        config = msgspec.convert(data, Config, dec_hook=_parse_quantity)
    except msgspec.ValidationError as error:
        raise _explained(error, kind, data) from error
    _check_names(config)
    return config


def _plain_data(value: Any) -> Any:  # noqa: ANN401 - data of any shape
    """Mappings and sequences of any class as dictionaries and lists."""
    if isinstance(value, Mapping):
        return {key: _plain_data(item) for key, item in value.items()}
    return [_plain_data(item) for item in value] if isinstance(value, list | tuple) else value


def _parse_quantity(kind: type, value: object) -> ByteSize | Duration:
    return ByteSize.parse(value) if kind is ByteSize else Duration.parse(value)


def _check_keys(value: object, kind: inspect.Type, path: str) -> None:
    """Refuse unknown keys anywhere, naming the nearest known one."""
    kind = plain(kind)
    if isinstance(kind, inspect.VarTupleType) and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_keys(item, kind.item_type, f"{path}[{index}]")
    if not isinstance(value, dict):
        return
    section = _section_for(value, kind)
    if section is None:
        return
    fields = {field.encode_name: field.type for field in section.fields}
    known = [*fields, section.tag_field] if section.tag_field else list(fields)
    for key, item in value.items():
        if key not in known:
            raise _unknown_key(str(key), known, path)
        if key in fields:
            _check_keys(item, fields[key], f"{path}.{key}".lstrip("."))


def _section_for(value: Mapping[str, Any], kind: inspect.Type) -> inspect.StructType | None:
    """The section that a mapping claims to be; None when its tag is missing or wrong."""
    sections = alternatives(kind)
    if len(sections) == 1:
        return sections[0]
    return next((s for s in sections if value.get(str(s.tag_field)) == s.tag), None)


def _unknown_key(key: str, known: list[str], path: str) -> ConfigError:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ConfigError(
        f"{path}.{key}".lstrip("."), "unknown key", f"{hint}known here: {', '.join(sorted(known))}"
    )


def _explained(error: msgspec.ValidationError, kind: inspect.Type, data: object) -> ConfigError:
    """The library's error with the path in our form and what the setting accepts."""
    located = _LOCATED.fullmatch(str(error))
    assert located is not None  # the pattern matches any text
    problem, path = located["problem"], located["path"] or ""
    problem, _, said = problem.partition("; accepted: ")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        problem, path = "missing", f"{path}.{missing[1]}".lstrip(".")
    problem = problem[0].lower() + problem[1:].replace("`", "")
    found = _find(path, _Found(kind, data))
    if isinstance(found.value, int | float) and not said:
        problem = f"{found.value} is wrong: {problem}"
    return ConfigError(path or _ROOT, problem, said or accepted(found.kind))


class _Found(NamedTuple):
    """A setting's type, and the value it was given."""

    kind: inspect.Type
    value: object


def _find(path: str, found: _Found) -> _Found:
    """Follow a path from a section down; where a tag is wrong the way ends at the choice."""
    for step in _STEP.findall(path):
        kind = plain(found.kind)
        if isinstance(kind, inspect.VarTupleType) and isinstance(found.value, list | tuple):
            found = _Found(kind.item_type, found.value[int(step[1:-1])])
            continue
        mapping = found.value if isinstance(found.value, dict) else {}
        section = _section_for(mapping, kind)
        if section is None:
            return _Found(kind, None)
        field = next(field for field in section.fields if field.encode_name == step)
        found = _Found(field.type, mapping.get(step))
    return found


def _check_names(config: Config) -> None:
    seen = {"host": "host"}
    for index, tier in enumerate(config.tiers):
        path, name = f"tiers[{index}]", tier_name(tier)
        if name in seen:
            raise ConfigError(
                f"{path}.name",
                f"{name!r} is the name of {seen[name]} already",
                "a name of its own for each tier",
            )
        seen[name] = path


class _StrictLoader(yaml.SafeLoader):
    """YAML without its surprises.

    A key that stands twice is an error instead of a lost setting; `off` and `on` are words, dates
    are text, and only `true` and `false` are booleans.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _SURPRISES]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _bad_key(key_node, "a key must be a word")
            if key_node.tag != _MERGE and key_node.value in seen:
                raise _bad_key(key_node, f"key {key_node.value!r} stands twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(_BOOL, re.compile("true|false"), list("tf"))


def _bad_key(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
