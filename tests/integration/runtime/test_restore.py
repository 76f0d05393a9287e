"""What was stored comes back: counted, bit for bit, from every tier, for every architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.core.spans import floor_to
from kvstrata.engine import EngineOptions, SamplingParams
from kvstrata.engine.models.registry import ARCHITECTURES
from kvstrata.engine.scheduling.request import Request
from kvstrata.runtime.seam import RequestLimits
from kvstrata.telemetry import metrics

from .support import GREEDY, Bed, expected_of, is_loaded, plan_bytes, tokens_of

if TYPE_CHECKING:
    from .conftest import Models, Tiers
    from .support import Expected

PROMPT = tokens_of(200)
LOWER = ("filesystem", "valkey", "object_store")
QUICK = {("llama", "host"), ("qwen3_next", "filesystem"), ("gemma3", "valkey")}
COMBINATIONS = [
    pytest.param(arch, kind, marks=[] if (arch, kind) in QUICK else [pytest.mark.slow])
    for arch in ARCHITECTURES
    for kind in ("host", *LOWER)
]


@pytest.fixture(scope="module")
def expected(model: Models) -> dict[str, Expected]:
    """By architecture, found out once."""

    class Found(dict[str, "Expected"]):
        def __missing__(self, arch: str) -> Expected:
            self[arch] = expected_of(model(arch), PROMPT)
            return self[arch]

    return Found()


def restored(
    bed: Bed, hit: int
) -> tuple[list[int], list[list[float]], dict[tuple[int, int], bytes]]:
    """Ask again; the answer, its scores, and the bytes of the hit right after the load."""
    request = bed.engine.add_request(PROMPT, GREEDY)
    bed.step_until(lambda: is_loaded(request))
    loaded = bed.held_bytes(request, hit)
    bed.step_until(lambda: request.finish_reason is not None)
    answer = bed.engine.answer(request)
    bed.settle()
    assert (answer.local_hit_tokens, answer.external_hit_tokens) == (0, hit)
    return answer.tokens, answer.logits, loaded


@pytest.mark.parametrize(("arch", "kind"), COMBINATIONS)
def test_every_tier_gives_back_what_it_was_given(
    arch: str, kind: str, model: Models, tier: Tiers, expected: dict[str, Expected]
) -> None:
    wanted = expected[arch]
    with Bed(model(arch), tier(kind)) as bed:
        hit = wanted.hit_tokens
        assert hit == floor_to(len(PROMPT) - 1, bed.layout.hit_stride_tokens) > 0
        cold = bed.ask(PROMPT)
        assert (cold.tokens, cold.external_hit_tokens) == (wanted.tokens, 0)
        known = bed.known_bytes(PROMPT, hit)
        assert all(any(content) for content in known.values()), "a block of zeros proves nothing"

        (bed.drop_device if kind == "host" else bed.drop_host)()
        tokens, logits, loaded = restored(bed, hit)

        assert tokens == wanted.tokens
        assert logits == wanted.logits, "not bit-equal to a run behind a local hit"
        assert loaded == known
        needed = plan_bytes(bed, hit)
        assert bed.by_label(metrics.HIT_TOKENS) == {kind: hit}
        assert bed.by_label(metrics.LOAD_BYTES) == needed
        assert bed.by_label(metrics.PROMPT_TOKENS) == {
            "computed": 2 * len(PROMPT) - hit,
            kind: hit,
        }
        if kind != "host":
            assert bed.count(metrics.READ_BYTES, kind) == needed.total()
            assert bed.count(metrics.WRITE_BYTES, kind) >= needed.total()
        assert bed.count(metrics.TIER_FAULTS) == 0


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("limit", [None, 100])
def test_large_chunks_are_loaded_whole_and_in_part(
    mode: str, limit: int | None, model: Models, expected: dict[str, Expected]
) -> None:
    settings: dict[str, Any] = {"hybrid_chunk_size": 128, "store": {"mode": mode}}
    options = EngineOptions(num_blocks=130 if mode == "lazy" else 400)
    with Bed(model("gemma3"), options=options, **settings) as bed:
        bed.ask(PROMPT)
        if mode == "lazy":
            for seed in (8, 9):  # others take the blocks
                bed.ask(tokens_of(200, seed=seed), SamplingParams(max_tokens=1))
        bed.drop_device()
        limits = RequestLimits(max_load_tokens=limit)
        request = bed.engine.add_request(PROMPT, GREEDY, limits=limits)
        bed.step_until(lambda: request.finish_reason is not None)
        bed.settle()

        # 200 tokens have one complete chunk of 128 in the full group; 96 end within it.
        assert request.external_hit_tokens == (128 if limit is None else 96)
        assert request.output == expected["gemma3"].tokens


def test_a_load_goes_on_behind_a_local_hit(model: Models, expected: dict[str, Expected]) -> None:
    with Bed(model("gemma3")) as bed:
        bed.ask(PROMPT)
        bed.drop_device()
        bed.ask(PROMPT[:65], SamplingParams(max_tokens=1))
        answer = bed.ask(PROMPT)

        assert answer.local_hit_tokens == 64
        assert answer.external_hit_tokens == expected["gemma3"].hit_tokens - 64
        assert answer.tokens == expected["gemma3"].tokens
        assert answer.logits == expected["gemma3"].logits


@pytest.mark.parametrize(
    "kind", ["filesystem", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LOWER[1:])]
)
def test_a_new_engine_finds_what_an_old_one_wrote(
    kind: str, model: Models, tier: Tiers, expected: dict[str, Expected]
) -> None:
    wanted, place = expected["qwen3_next"], tier(kind)
    with Bed(model("qwen3_next"), place) as bed:
        bed.ask(PROMPT)
        known = bed.known_bytes(PROMPT, wanted.hit_tokens)
    with Bed(model("qwen3_next"), place) as bed:
        tokens, logits, loaded = restored(bed, wanted.hit_tokens)

        assert (tokens, logits, loaded) == (wanted.tokens, wanted.logits, known)
        assert bed.by_label(metrics.HIT_TOKENS) == {kind: wanted.hit_tokens}


_OTHER_PROCESS = """
import json, sys, torch
from pathlib import Path
from kvstrata.config.parsing import parse_config
from kvstrata.engine import Engine, EngineOptions, SamplingParams
from kvstrata.engine.offloading import offloading

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, config, prompt = json.loads(sys.argv[1])
    parts = offloading(parse_config(config), Path(model))
    with Engine(model, EngineOptions(num_blocks=400), parts) as engine:
        [answer] = engine.generate([prompt], SamplingParams(max_tokens=6))
        engine.run_until_idle(100_000)
    print(json.dumps([answer.tokens, answer.external_hit_tokens]))
"""


def test_another_process_finds_what_this_one_wrote(
    model: Models, tier: Tiers, tmp_path: Path, expected: dict[str, Expected]
) -> None:
    wanted, place = expected["lfm2"], tier("filesystem")
    with Bed(model("lfm2"), place) as bed:
        bed.ask(PROMPT)
    config = {"hybrid_chunk_size": 64, "tiers": [place], "load": {"decide": "always"}}
    script = tmp_path / "other.py"
    script.write_text(_OTHER_PROCESS)
    message = json.dumps([str(model("lfm2")), config, PROMPT])
    result = subprocess.run(
        [sys.executable, str(script), message],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert json.loads(result.stdout) == [wanted.tokens, wanted.hit_tokens]


@pytest.mark.parametrize(
    "kind", ["filesystem", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LOWER[1:])]
)
def test_two_engines_share_one_store_at_the_same_time(
    kind: str, model: Models, tier: Tiers, expected: dict[str, Expected]
) -> None:
    wanted, place = expected["lfm2"], tier(kind)
    other_prompt = tokens_of(200, seed=7)
    other_wanted = expected_of(model("lfm2"), other_prompt)
    with Bed(model("lfm2"), place) as one, Bed(model("lfm2"), place) as two:
        together = [
            one.engine.add_request(PROMPT, GREEDY),
            two.engine.add_request(other_prompt, GREEDY),
        ]
        while any(request.finish_reason is None for request in together):
            one.engine.step()
            two.engine.step()
        one.settle()
        two.settle()
        crossed = (one.ask(other_prompt), two.ask(PROMPT))

        assert [answer.tokens for answer in crossed] == [other_wanted.tokens, wanted.tokens]
        assert [answer.logits for answer in crossed] == [other_wanted.logits, wanted.logits]
        for bed in (one, two):
            assert bed.by_label(metrics.HIT_TOKENS) == {kind: wanted.hit_tokens}


@pytest.mark.slow
def test_a_chunk_counts_only_when_both_ranks_hold_it(model: Models, tier: Tiers) -> None:
    options = EngineOptions(num_blocks=400, num_ranks=2)
    place = tier("filesystem")
    assert place is not None
    store = Path(place["path"])
    wanted = expected_of(model("llama"), PROMPT, options)
    with Bed(model("llama"), place, options=options) as bed:
        assert bed.ask(PROMPT).tokens == wanted.tokens
        parts = {rank: sorted(store.glob(f"namespaces/*/*/*.{rank}of2")) for rank in (0, 1)}
        assert len(parts[0]) == len(parts[1]) == 200 // 16
        bed.drop_host()
        whole = bed.ask(PROMPT)
        assert (whole.tokens, whole.logits) == (wanted.tokens, wanted.logits)
        assert whole.external_hit_tokens == wanted.hit_tokens

        # This engine still believes that the chunk is there.
        gone = _file_of_chunk(store, bed, index=5, rank=1)
        gone.unlink()
        bed.drop_host()
        shorter = bed.ask(PROMPT)
        assert (shorter.tokens, shorter.external_hit_tokens) == (wanted.tokens, 80)
        assert gone.exists(), "it was computed, so it was stored again"

        gone.unlink()
    # A new engine asks; the other rank's file alone is not enough.
    with Bed(model("llama"), place, options=options) as bed:
        answer = bed.ask(PROMPT)
        assert (answer.tokens, answer.external_hit_tokens) == (wanted.tokens, 80)


@pytest.mark.slow
def test_a_chunk_that_one_rank_could_not_write_is_not_offered(
    model: Models, tmp_path: Path
) -> None:
    options = EngineOptions(num_blocks=400, num_ranks=2)
    place = {
        "kind": "custom",
        "name": "lame",
        "store": "kvstrata.testing.lame_rank_store:LameRankStore",
        "options": {"path": str(tmp_path / "store"), "rank": 1, "most_tokens": 64},
    }
    wanted = expected_of(model("llama"), PROMPT, options)
    with Bed(model("llama"), place, options=options) as bed:
        bed.ask(PROMPT)
        bed.drop_host()
        answer = bed.ask(PROMPT)

        assert (answer.tokens, answer.external_hit_tokens) == (wanted.tokens, 64)
        assert bed.count(metrics.TIER_FAULTS, "lame") > 0


def _file_of_chunk(store: Path, bed: Bed, *, index: int, rank: int) -> Path:
    end = Request("hashes", PROMPT, SamplingParams(), bed.layout).hashes[index]
    [path] = store.glob(f"namespaces/*/*/{end.hex()}*.{rank}of2")
    return path
