from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.config import Config, parse_config, read_config
from kvstrata.config.schema import CustomTierConfig, FilesystemTierConfig, ValkeyTierConfig
from kvstrata.config.units import ByteSize, Duration
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path
from types import MappingProxyType

EXAMPLE = """
host: {capacity: 64GiB, eviction: s3fifo}
tiers:
  - {kind: filesystem, path: /var/cache/kvstrata, quota: 500GiB, weight: 1.0}
  - {kind: valkey, url: "valkey://cache:6379/0", weight: 0.5}
store: {mode: eager, decode: true}
load: {deadline: 10s, decide: cost}
events: {self_describing: true}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvstrata.yaml"
    path.write_text(EXAMPLE)
    return path


def test_an_example_is_read(file: Path) -> None:
    config = read_config(file)

    assert config.host.capacity == 64 * 2**30
    disk, server = config.tiers
    assert isinstance(disk, FilesystemTierConfig)
    assert isinstance(server, ValkeyTierConfig)
    assert disk.quota == 500 * 2**30
    assert server.weight == 0.5
    assert config.load.deadline == 10.0
    assert config.events.self_describing


def test_json_and_dictionaries_say_the_same(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "host": {"capacity": "2GiB"},
        "tiers": [{"kind": "filesystem", "path": "x"}],
    }
    path = tmp_path / "kvstrata.json"
    path.write_text(json.dumps(data))

    assert read_config(path) == parse_config(data)


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")

    assert read_config(path) == Config()


@pytest.mark.parametrize(
    ("data", "path", "problem", "accepted"),
    [
        ({"host": {"capacty": "1GiB"}}, "host.capacty", "unknown key", "did you mean 'capacity'?"),
        ({"tiers": [{"kind": "filesystem", "path": "x", "qouta": 1}]}, "tiers[0].qouta", "unknown", "'quota'"),
        ({"zzz": 1}, "zzz", "unknown key", "known here: events, host"),
        ({"host": {"capacity": "64"}}, "host.capacity", "'64' is not a size", "as in 64GiB"),
        ({"host": {"capacity": 64}}, "host.capacity", "64 is not a size", "as in 64GiB"),
        ({"host": {"capacity": True}}, "host.capacity", "true is not understood", "as in 64GiB"),
        ({"host": {"capacity": "-1GiB"}}, "host.capacity", "not understood", "as in 64GiB"),
        ({"host": {"eviction": "random"}}, "host.eviction", "'random'", "arc or lru or s3fifo"),
        ({"load": {"deadline": "soon"}}, "load.deadline", "'soon' is not", "as in 10s"),
        ({"load": {"deadline": 10}}, "load.deadline", "10 is not a time", "as in 10s"),
        ({"tiers": [{"kind": "tape"}]}, "tiers[0].kind", "'tape'", "filesystem or object_store or valkey or custom"),
        ({"tiers": [{"path": "x"}]}, "tiers[0].kind", "missing", "filesystem or object_store"),
        ({"tiers": [{"kind": "filesystem"}]}, "tiers[0].path", "missing", "text"),
        ({"tiers": [{"kind": "filesystem", "path": "x", "weight": 0}]}, "tiers[0].weight", "0 is wrong", "above 0"),
        ({"tiers": [{"kind": "valkey", "url": "http://x"}]}, "tiers[0].url", "regex", "(valkey|redis)"),
        ({"tiers": {"kind": "filesystem"}}, "tiers", "expected array", "a list"),
        ({"hybrid_chunk_size": 0}, "hybrid_chunk_size", "0 is wrong", "at least 1, or null"),
        ({"store": {"decode": 1}}, "store.decode", "1 is wrong", "true or false"),
        ({"host": None}, "host", "expected object", "a mapping"),
        ([1], "configuration", "expected object", "a mapping"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_what_is_accepted(
    data: Any,  # noqa: ANN401 - that is the point
    path: str,
    problem: str,
    accepted: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    error = caught.value
    assert error.path == path
    assert problem in error.problem
    assert accepted in error.accepted
    assert str(error) == f"{error.path}: {error.problem}; accepted: {error.accepted}"


def test_two_tiers_of_one_name_are_refused() -> None:
    tier = {"kind": "filesystem", "path": "x", "name": "disk"}
    with pytest.raises(ConfigError, match=r"tiers\[1\].name: 'disk' is the name of tiers\[0\]"):
        parse_config({"tiers": [tier, tier]})


def test_a_password_does_not_reach_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"tiers": [{"kind": "valkey", "url": "http://me:secret@host"}]})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"host: {capacity: 1GiB", "expected"),
        (b"\xff\xfe\x00", "a YAML or JSON file"),
        (b"host: {}\nhost: {}\n", "key 'host' stands twice"),
        (b"? [a]\n: 1\n", "a key must be a word"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_config(path)
    assert caught.value.path == str(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512B", 512),
        ("4 KiB", 4096),
        ("1.5GiB", 3 * 2**29),
        ("2TB", 2 * 10**12),
        ("1kB", 1000),
    ],
)
def test_sizes_carry_units(text: str, size: int) -> None:
    assert ByteSize.parse(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("250ms", 0.25), ("10s", 10), ("2min", 120), ("1h", 3600), ("5us", 5e-6)],
)
def test_times_carry_units(text: str, seconds: float) -> None:
    assert Duration.parse(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["4GiB", "1TiB", "512B", "0B", "2TB", "1PB"])
def test_sizes_are_shown_as_they_are_written(text: str) -> None:
    assert str(ByteSize.parse(text)) == text


@pytest.mark.parametrize("text", ["10s", "250ms", "0s", "30d", "90min", "5us"])
def test_times_are_shown_as_they_are_written(text: str) -> None:
    assert str(Duration.parse(text)) == text


def test_sizes_are_exact() -> None:
    assert ByteSize.parse("9007199254740993B") == 9007199254740993
    with pytest.raises(ValueError, match="too long"):
        Duration.parse("9" * 400 + "s")


def test_a_tier_written_elsewhere_keeps_its_options_to_itself() -> None:
    tier = {"kind": "custom", "store": "their.module:Store", "options": {"token": "secret", "n": 3}}
    config = parse_config({"tiers": [tier]})

    assert isinstance(config.tiers[0], CustomTierConfig)
    assert config.tiers[0].options == {"token": "secret", "n": 3}
    assert "secret" not in repr(config)
    with pytest.raises(ConfigError, match=r"tiers\[0\].store: .*regex"):
        parse_config({"tiers": [{"kind": "custom", "store": "no colon"}]})


@pytest.mark.parametrize("mode", ["eager", "lazy", "off"])
def test_words_need_no_quotes(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "kvstrata.yaml"
    path.write_text(f"store: {{mode: {mode}, decode: false}}\n")

    assert read_config(path).store.mode == mode
    assert read_config(path).store.decode is False


def test_anchors_and_odd_words_are_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "kvstrata.yaml"
    path.write_text(
        "tiers:\n"
        "  - &disk {kind: filesystem, path: 2024-13-45, quota: 2GiB, name: on}\n"
        "  - {<<: *disk, name: second}\n"
    )

    first, second = read_config(path).tiers
    assert isinstance(first, FilesystemTierConfig)
    assert isinstance(second, FilesystemTierConfig)
    assert (first.path, first.name) == ("2024-13-45", "on")
    assert (second.quota, second.name) == (2 * 2**30, "second")


def test_any_kind_of_mapping_is_read() -> None:
    data = MappingProxyType({"host": MappingProxyType({"capacty": "1GiB"})})
    with pytest.raises(ConfigError, match="did you mean 'capacity'"):
        parse_config(data)


@pytest.mark.parametrize(
    "tiers",
    [
        [{"kind": "filesystem", "path": "x"}] * 2,
        [
            {"kind": "filesystem", "path": "x"},
            {"kind": "valkey", "url": "redis://h", "name": "filesystem"},
        ],
        [{"kind": "filesystem", "path": "x", "name": "host"}],
    ],
)
def test_names_are_unique_whether_given_or_not(tiers: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"name: .* already"):
        parse_config({"tiers": tiers})


@pytest.mark.parametrize(
    "url",
    [
        "valkey://me:sec@ret@h:1/0",
        "redis://me:sec/ret@h",
        "redis://h/0?password=secret",
        "redis://:secret@h",
    ],
)
def test_credentials_are_in_no_repr(url: str) -> None:
    config = parse_config({"tiers": [{"kind": "valkey", "url": url}]})

    assert "sec" not in repr(config).replace("second", "")
    assert "***" in repr(config)
