"""The children of a multi connector, as its configuration lists them."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstrata.config.units import ACCEPTED_TIMES, Duration
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_OWN_KEYS: Final = ("load_weight", "match_deadline", "name")


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """One child."""

    path: str
    """Where it stands in the configuration."""
    name: str
    """Unique."""
    load_weight: float
    """What a token that it loads is worth, next to those of others."""
    match_deadline_s: float
    """How long a request waits while this child does not know what it has."""
    transfer: Mapping[str, Any]
    """The other keys: the engine's own settings of a connector."""


def read_children(extra: Mapping[str, Any], engine_keys: Collection[str]) -> list[ChildSettings]:
    """The children that a multi connector's settings list.

    Args:
        extra: the multi connector's settings.
        engine_keys: what the engine accepts for a connector.

    Raises:
        ConfigError: names the key, what is wrong, and what is accepted.
    """
    _check_keys(extra, ["connectors"], "")
    listed = extra.get("connectors")
    if not isinstance(listed, list | tuple) or not listed:
        raise ConfigError("connectors", f"it is {listed!r}", "a list of one connector or more")
    entries = [_mapping(entry, f"connectors[{place}]") for place, entry in enumerate(listed)]
    for place, entry in enumerate(entries):
        _check_keys(entry, [*_OWN_KEYS, *engine_keys], f"connectors[{place}]")
    names = list(_names(entries))
    _check_unique(names)
    return [
        _child(entry, f"connectors[{place}]", name)
        for place, (entry, name) in enumerate(zip(entries, names, strict=True))
    ]


def _child(entry: Mapping[str, Any], path: str, name: str) -> ChildSettings:
    return ChildSettings(
        path,
        name,
        _weight(entry.get("load_weight", 1.0), f"{path}.load_weight"),
        _deadline(entry.get("match_deadline", "1s"), f"{path}.match_deadline"),
        {key: value for key, value in entry.items() if key not in _OWN_KEYS},
    )


def _mapping(entry: object, path: str) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise ConfigError(path, f"it is {entry!r}", "a mapping")
    if not _is_text(entry.get("kv_connector")):
        raise ConfigError(
            f"{path}.kv_connector", f"it is {entry.get('kv_connector')!r}", "a connector's class"
        )
    return entry


def _names(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each child's name: its own, or its class, numbered where that stands several times."""
    given = [_given_name(entry, place) for place, entry in enumerate(entries)]
    taken = {name for name in given if name is not None}
    repeated = Counter(
        str(entry["kv_connector"])
        for entry, name in zip(entries, given, strict=True)
        if name is None
    )
    numbers: Counter[str] = Counter()
    for entry, name in zip(entries, given, strict=True):
        kind = str(entry["kv_connector"])
        if name is not None:
            yield name
        elif repeated[kind] == 1 and kind not in taken:
            yield kind
        else:
            yield _numbered(kind, numbers, taken)


def _numbered(kind: str, numbers: Counter[str], taken: Collection[str]) -> str:
    """The class and the next number that makes it unique."""
    numbers[kind] += 1
    while f"{kind}#{numbers[kind]}" in taken:
        numbers[kind] += 1
    return f"{kind}#{numbers[kind]}"


def _given_name(entry: Mapping[str, Any], place: int) -> str | None:
    name = entry.get("name")
    if name is None:
        return None
    if not _is_text(name):
        raise ConfigError(f"connectors[{place}].name", f"it is {name!r}", "text")
    return str(name)


def _check_unique(names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(
                f"connectors[{place}].name",
                f"{name!r} is the name of connectors[{names.index(name)}] already",
                "a name of its own for each connector",
            )


def _weight(value: object, path: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ConfigError(path, f"it is {value!r}", "a number above 0")
    return float(value)  # type: ignore[arg-type]


def _deadline(value: object, path: str) -> float:
    try:
        return float(Duration.parse(value))
    except ValueError as error:
        problem = str(error).partition("; accepted: ")[0]
        raise ConfigError(path, problem, ACCEPTED_TIMES) from error


def _check_keys(found: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    for key in map(str, found):
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ConfigError(
                f"{path}.{key}".lstrip("."),
                "unknown key",
                f"{hint}known here: {', '.join(sorted(known))}",
            )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
