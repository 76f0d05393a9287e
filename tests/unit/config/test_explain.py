from __future__ import annotations

from typing import Any

import jsonschema
import msgspec
import pytest

from kvstrata.config import parse_config
from kvstrata.config.explain import json_schema, settings
from kvstrata.errors import ConfigError

VALID: list[dict[str, Any]] = [
    {},
    {"host": {"capacity": "64GiB", "eviction": "lru"}, "hybrid_chunk_size": 256},
    {"tiers": [{"kind": "filesystem", "path": "/x", "quota": None, "min_free": 0}]},
    {"tiers": [{"kind": "valkey", "url": "redis://h", "ttl": "1 h", "cluster": True}]},
    {"tiers": [{"kind": "object_store", "url": "s3://b/p", "concurrency": 4}], "load": {"deadline": "5s"}},
]  # fmt: skip
INVALID: list[dict[str, Any]] = [
    {"unknown": 1},
    {"host": {"capacity": "64"}},
    {"host": {"capacity": 64}},
    {"host": {"capacity": -5}},
    {"load": {"deadline": "10 parsecs"}},
    {"tiers": [{"kind": "valkey", "url": "http://h"}]},
    {"tiers": [{"kind": "filesystem"}]},
    {"tiers": [{"kind": "filesystem", "path": "x", "weight": 0}]},
    {"hybrid_chunk_size": 0},
]


@pytest.mark.parametrize("data", VALID)
def test_schema_accepts_what_parsing_accepts(data: dict[str, Any]) -> None:
    parse_config(data)
    jsonschema.validate(data, json_schema())


@pytest.mark.parametrize("data", INVALID)
def test_schema_refuses_what_parsing_refuses(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_config(data)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, json_schema())


def test_every_setting_is_explained_with_its_origin() -> None:
    data: dict[str, Any] = {
        "host": {"capacity": "2GiB"},
        "tiers": [{"kind": "valkey", "url": "valkey://me:secret@cache:6379/0"}],
    }
    found = {setting.path: setting for setting in settings(parse_config(data), data)}

    assert not found["host.capacity"].is_default
    assert found["host.eviction"].is_default
    assert found["tiers[0].url"].value == "valkey://***@cache:6379/0"
    assert found["tiers[0].ttl"].value == "null"
    assert found["store.decode"].value == "true"
    assert found["tiers[0].kind"].value == "valkey"
    assert all(setting.meaning and setting.accepted for setting in found.values())


def test_the_defaults_in_the_schema_are_the_defaults() -> None:
    definitions = json_schema()["$defs"]
    config = parse_config({})

    assert definitions["HostConfig"]["properties"]["capacity"]["default"] == "4GiB"
    assert str(config.host.capacity) == "4GiB"
    for name, section in (("StoreConfig", config.store), ("EventsConfig", config.events)):
        properties = definitions[name]["properties"]
        defaults = {key: value["default"] for key, value in properties.items()}
        assert defaults == msgspec.to_builtins(section)


def test_every_property_of_the_schema_is_described() -> None:
    for definition in json_schema()["$defs"].values():
        for name, entry in definition["properties"].items():
            assert entry.get("description") or "$ref" in entry or "const" in entry or name == "kind"
