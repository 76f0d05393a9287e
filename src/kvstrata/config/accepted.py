"""What a setting accepts, in words, read off its type."""

from __future__ import annotations

from msgspec import inspect

from kvstrata.config.units import ACCEPTED_SIZES, ACCEPTED_TIMES, ByteSize

_PLAIN = {
    inspect.BoolType: "true or false",
    inspect.StrType: "text",
    inspect.NoneType: "null",
    inspect.VarTupleType: "a list",
    inspect.StructType: "a mapping",
    inspect.DictType: "a mapping",
}


def plain(kind: inspect.Type) -> inspect.Type:
    """A type without what is only said about it."""
    return plain(kind.type) if isinstance(kind, inspect.Metadata) else kind


def description(kind: inspect.Type) -> str:
    """What a setting is for."""
    if isinstance(kind, inspect.Metadata) and kind.extra_json_schema:
        return str(kind.extra_json_schema.get("description", ""))
    return ""


def accepted(kind: inspect.Type) -> str:
    """What a value of this type may be."""
    kind = plain(kind)
    if isinstance(kind, inspect.UnionType):
        return _union(kind)
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(sorted(map(str, kind.values)))
    if isinstance(kind, inspect.CustomType):
        return ACCEPTED_SIZES if kind.cls is ByteSize else ACCEPTED_TIMES
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return _number(kind)
    if isinstance(kind, inspect.StrType) and kind.pattern:
        return f"text that matches {kind.pattern}"
    return _PLAIN[type(kind)]


def alternatives(kind: inspect.Type) -> list[inspect.StructType]:
    """The sections a mapping may be: one, or several told apart by a tag."""
    kind = plain(kind)
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [member for member in members if isinstance(member, inspect.StructType)]


def _union(kind: inspect.UnionType) -> str:
    sections = alternatives(kind)
    if len(sections) > 1:
        tags = " or ".join(str(section.tag) for section in sections)
        return f"a mapping with {sections[0].tag_field}: {tags}"
    return ", or ".join(accepted(member) for member in kind.types)


def _number(kind: inspect.IntType | inspect.FloatType) -> str:
    name = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    limits = [
        f"{word} {limit}"
        for word, limit in (("above", kind.gt), ("of at least", kind.ge), ("of at most", kind.le))
        if limit is not None
    ]
    return " ".join([name, " and ".join(limits)]).strip()
