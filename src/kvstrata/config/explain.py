"""The configuration for people: every setting in force, and the schema for editors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import inspect

from kvstrata.config.accepted import accepted, description
from kvstrata.config.addresses import shown
from kvstrata.config.schema import Config
from kvstrata.config.units import ByteSize, Duration

if TYPE_CHECKING:
    from collections.abc import Iterator

_QUANTITY: Final = r"^\s*(0|\d+(\.\d+)?\s*({units}))\s*$"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting in force."""

    path: str
    value: str
    is_default: bool
    meaning: str
    accepted: str


def settings(config: Config, given: Mapping[str, Any]) -> Iterator[Setting]:
    """Every setting of a configuration; `given` is the data it was parsed from.

    Credentials inside addresses are left out of the values.
    """
    yield from _section(config, given, "")


def _section(section: msgspec.Struct, given: object, path: str) -> Iterator[Setting]:
    kind = inspect.type_info(type(section))
    assert isinstance(kind, inspect.StructType)
    data = given if isinstance(given, Mapping) else {}
    if kind.tag_field:
        yield Setting(
            path=f"{path}.{kind.tag_field}",
            value=str(kind.tag),
            is_default=False,
            meaning="What the tier is.",
            accepted=str(kind.tag),
        )
    for field in kind.fields:
        value, name = getattr(section, field.name), f"{path}.{field.name}".lstrip(".")
        if isinstance(value, msgspec.Struct):
            yield from _section(value, data.get(field.name), name)
        elif isinstance(value, tuple) and value:
            for index, item in enumerate(value):
                yield from _section(item, data[field.name][index], f"{name}[{index}]")
        else:
            yield Setting(
                path=name,
                value=_shown(value),
                is_default=field.name not in data,
                meaning=description(field.type),
                accepted=accepted(field.type),
            )


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if value == ():
        return "[]"
    return shown(value)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the configuration."""
    schema = msgspec.json.schema(Config, schema_hook=_quantity_schema)
    for section in _sections(inspect.type_info(Config)):
        properties = schema["$defs"][section.cls.__name__]["properties"]
        for field in section.fields:
            if field.default_factory is msgspec.NODEFAULT:
                continue
            default = field.default_factory()
            if isinstance(default, ByteSize | Duration):
                properties[field.name]["default"] = str(default)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _quantity_schema(kind: type) -> dict[str, Any]:
    units = r"B|[KMGTP]iB|[kKMGTP]B" if kind is ByteSize else r"us|ms|s|min|h|d"
    assert kind in (ByteSize, Duration), kind
    return {
        "type": ["string", "integer"],
        "pattern": _QUANTITY.format(units=units),
        "minimum": 0,
        "maximum": 0,
    }


def _sections(kind: inspect.Type) -> Iterator[inspect.StructType]:
    if isinstance(kind, inspect.Metadata):
        yield from _sections(kind.type)
    elif isinstance(kind, inspect.VarTupleType):
        yield from _sections(kind.item_type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _sections(member)
    elif isinstance(kind, inspect.StructType):
        yield kind
        for field in kind.fields:
            yield from _sections(field.type)
