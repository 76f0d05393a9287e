"""Whatever fails, hangs or lies: every request goes on and its answer is right."""

from __future__ import annotations

import logging
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstrata.core.ids import ChunkKey
from kvstrata.core.outcomes import TierOutcome
from kvstrata.engine import Engine, EngineOptions, SamplingParams
from kvstrata.engine.scheduling.request import RequestState
from kvstrata.errors import ConfigError, RequestError
from kvstrata.runtime import assemble
from kvstrata.runtime.messages import RankReport, TierReportMessage, decode_report, encode
from kvstrata.runtime.seam import EndedLoads
from kvstrata.telemetry import metrics
from kvstrata.testing.faults import flip_payload_bit
from kvstrata.tiers import registry
from kvstrata.tiers.chunk_format import parse_header
from kvstrata.tiers.wrapping import FailingStore, WrappedStore
from kvstrata.transfers.copy_queue import CopyReport
from kvstrata.transfers.plain_copier import PlainCopier

from .support import GREEDY, Bed, expected_of, is_loaded, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstrata.core.chunk_label import ChunkBuffer
    from kvstrata.core.outcomes import Deadline
    from kvstrata.interfaces import ChunkStore
    from kvstrata.transfers.copy_queue import ChunkCopier, ChunkCopy

    from .conftest import Models, Tiers
    from .support import Expected

    Wrap = Callable[[Callable[[ChunkStore], ChunkStore]], None]

PROMPT = tokens_of(200)
HIT = 192
DEADLINE_S = 0.4
HASTY = {"deadline": f"{DEADLINE_S}s", "decide": "always"}


class Gate:
    """Holds threads up while it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.num_waiting = 0

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.num_waiting += 1
        self._open.wait(20)
        self.num_waiting -= 1


class GatedStore(WrappedStore):
    """Hangs in the verbs whose gate is closed, deadline or not."""

    def __init__(self, inner: ChunkStore, gates: dict[str, Gate]) -> None:
        super().__init__(inner)
        self._gates = gates

    def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        self._gates["read"].pass_through()
        return super().read(chunks, deadline)

    def write(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
        self._gates["write"].pass_through()
        return super().write(chunks, deadline)

    def find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> TierOutcome:
        self._gates["find"].pass_through()
        return super().find(keys, deadline)


@pytest.fixture(scope="module")
def wanted(model: Models) -> Expected:
    return expected_of(model("llama"), PROMPT)


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Wrap:
    """Puts something around every store that an engine opens."""
    really_open = registry.open_store

    def wrapped(around: Callable[[ChunkStore], ChunkStore]) -> None:
        monkeypatch.setattr(
            assemble, "open_store", lambda *settings: around(really_open(*settings))
        )

    return wrapped


@pytest.fixture
def gates(wrap: Wrap) -> Iterator[dict[str, Gate]]:
    """By verb; every store has them."""
    gates = {verb: Gate() for verb in ("read", "write", "find")}
    wrap(lambda store: GatedStore(store, gates))
    yield gates
    for gate in gates.values():
        gate.open()


def _gated(
    really: Callable[[ChunkCopier, ChunkCopy], None], gate: Gate
) -> Callable[[ChunkCopier, ChunkCopy], None]:
    def copied(self: ChunkCopier, copy: ChunkCopy) -> None:
        gate.pass_through()
        really(self, copy)

    return copied


@pytest.fixture
def copies(
    monkeypatch: pytest.MonkeyPatch,
    plain_copies: None,  # noqa: ARG001
) -> Iterator[dict[str, Gate]]:
    """Gates before every copy between device and arena, by direction."""
    gates = {direction: Gate() for direction in ("load", "store")}
    for direction, gate in gates.items():
        really = getattr(PlainCopier, direction)

        monkeypatch.setattr(PlainCopier, direction, _gated(really, gate))
    yield gates
    for gate in gates.values():
        gate.open()


class TestADeadlineIsKept:
    @pytest.mark.parametrize("verb", ["read", "find"])
    def test_a_tier_that_hangs_costs_the_deadline_and_no_more(
        self, verb: str, model: Models, tier: Tiers, gates: dict[str, Gate], wanted: Expected
    ) -> None:
        place = tier("filesystem")
        with Bed(model("llama"), place) as bed:
            bed.ask(PROMPT)
        with Bed(model("llama"), place, load=HASTY) as bed:
            gates[verb].close()
            start = time.monotonic()
            request = bed.engine.add_request(PROMPT, GREEDY)
            bed.step_until(lambda: request.state is RequestState.RUNNING)
            waited = time.monotonic() - start
            bed.step_until(lambda: request.finish_reason is not None)

            assert 0.9 * DEADLINE_S <= waited < DEADLINE_S + 0.4
            assert request.output == wanted.tokens
            assert request.external_hit_tokens == 0
            assert bed.count(metrics.DEADLINE_MISSES) == 1
            assert "the deadline passed after 0.4 s" in str(bed.side.explain(request.request_id))

            gates[verb].open()
            bed.settle()
            bed.engine.scheduler.blocks.pool.forget_all()
            assert bed.ask(PROMPT).external_hit_tokens == HIT, "what is well again is used again"

    def test_what_has_arrived_by_then_is_used(
        self, model: Models, tier: Tiers, wrap: Wrap, wanted: Expected
    ) -> None:
        gate = Gate()

        class HangsFarOut(WrappedStore):
            def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
                if any(chunk.label.tokens.stop > 96 for chunk in chunks):
                    gate.pass_through()
                return super().read(chunks, deadline)

        wrap(HangsFarOut)
        with Bed(model("llama"), tier("filesystem"), load=HASTY) as bed:
            bed.ask(PROMPT)
            bed.drop_host()
            gate.close()
            request = bed.engine.add_request(PROMPT, GREEDY)
            bed.step_until(lambda: request.finish_reason is not None)

            assert request.external_hit_tokens == 96
            assert request.output == wanted.tokens
            gate.open()
            bed.settle()

    def test_others_do_not_wait_for_it(
        self, model: Models, tier: Tiers, gates: dict[str, Gate], wanted: Expected
    ) -> None:
        with Bed(model("llama"), tier("filesystem"), load=HASTY) as bed:
            bed.ask(PROMPT)
            bed.drop_host()
            short = tokens_of(10, seed=3)  # no complete chunk: nothing to wait for
            gates["read"].close()
            waiting = bed.engine.add_request(PROMPT, GREEDY)
            other = bed.engine.add_request(short, GREEDY)
            bed.step_until(lambda: other.finish_reason is not None)

            assert waiting.state is RequestState.WAITING
            bed.step_until(lambda: waiting.finish_reason is not None)
            assert waiting.output == wanted.tokens
            gates["read"].open()
            bed.settle()

    def test_a_write_that_hangs_holds_nobody_up(
        self, model: Models, tier: Tiers, gates: dict[str, Gate], wanted: Expected
    ) -> None:
        with Bed(model("llama"), tier("filesystem")) as bed:
            gates["write"].close()
            [answer] = bed.engine.generate([PROMPT], GREEDY)
            bed.engine.scheduler.blocks.pool.forget_all()
            [again] = bed.engine.generate([PROMPT], GREEDY)

            assert answer.tokens == again.tokens == wanted.tokens
            assert again.external_hit_tokens == HIT, "host memory has it"
            assert bed.side.num_leases > 0, "a medium may still read it"
            gates["write"].open()
            bed.settle()


def chunk_files(store: Path) -> list[Path]:
    """The files of a llama's only group, in the order of their tokens."""
    files = store.glob("namespaces/*/*/*.0of1")
    return sorted(files, key=lambda path: parse_header(path.read_bytes()[:4096]).first_token)


class TestPartialResultsAreUsed:
    def test_a_corrupt_chunk_makes_the_hit_shorter_and_is_replaced(
        self, model: Models, tier: Tiers, wanted: Expected
    ) -> None:
        place = tier("filesystem")
        assert place is not None
        with Bed(model("llama"), place) as bed:
            bed.ask(PROMPT)
            path = chunk_files(Path(place["path"]))[5]
            path.write_bytes(flip_payload_bit(path.read_bytes(), random.Random(1)))  # noqa: S311
            bed.drop_host()
            request = bed.engine.add_request(PROMPT, GREEDY)
            bed.step_until(lambda: request.state is RequestState.RUNNING)
            [failed] = bed.failed_keys(request)
            bed.step_until(lambda: request.finish_reason is not None)
            bed.settle()

            assert failed.hex() in path.name
            assert (request.external_hit_tokens, request.output) == (80, wanted.tokens)
            assert bed.count(metrics.TIER_FAULTS, "filesystem", "ChunkCorrupt") == 1
            assert "failed" in str(bed.side.explain(request.request_id))
            bed.drop_host()
            healed = bed.ask(PROMPT)
            assert (healed.external_hit_tokens, healed.tokens) == (HIT, wanted.tokens)

    def test_a_chunk_that_cannot_be_read_makes_the_hit_shorter(
        self, model: Models, tier: Tiers, wrap: Wrap, wanted: Expected
    ) -> None:
        bad: set[ChunkKey] = set()
        wrap(lambda store: FailingStore(store, lambda key: key in bad))
        with Bed(model("llama"), tier("filesystem")) as bed:
            bed.ask(PROMPT)
            bad |= {bed.engine_key(PROMPT, 7)}
            bed.drop_host()
            shorter = bed.ask(PROMPT)

            assert (shorter.external_hit_tokens, shorter.tokens) == (7 * 16, wanted.tokens)

    def test_a_store_that_answers_nonsense_costs_recomputation_alone(
        self, model: Models, tier: Tiers, wrap: Wrap, wanted: Expected
    ) -> None:
        class Nonsense(WrappedStore):
            def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
                del deadline
                failed: Any = {chunk.label.key: ValueError("no tier error") for chunk in chunks}
                return TierOutcome(failed=failed)

        wrap(Nonsense)
        with Bed(model("llama"), tier("filesystem")) as bed:
            bed.ask(PROMPT)
            bed.drop_host()
            answer = bed.ask(PROMPT)

            assert (answer.external_hit_tokens, answer.tokens) == (0, wanted.tokens)
            assert bed.count(metrics.TIER_FAULTS, "filesystem") > 0

    def test_a_store_that_raises_costs_recomputation_alone(
        self, model: Models, tier: Tiers, wrap: Wrap, wanted: Expected
    ) -> None:
        class Raising(WrappedStore):
            def read(self, chunks: Sequence[ChunkBuffer], deadline: Deadline) -> TierOutcome:
                raise ZeroDivisionError(len(chunks), deadline)

        wrap(Raising)
        with Bed(model("llama"), tier("filesystem")) as bed:
            bed.ask(PROMPT)
            bed.drop_host()
            answer = bed.ask(PROMPT)

            assert (answer.external_hit_tokens, answer.tokens) == (0, wanted.tokens)


def break_copies(
    monkeypatch: pytest.MonkeyPatch, direction: str, is_broken: Callable[[ChunkCopy], bool]
) -> None:
    really = getattr(PlainCopier, direction)

    def copied(self: ChunkCopier, copy: ChunkCopy) -> None:
        if is_broken(copy):
            raise RuntimeError("the device is lost")
        really(self, copy)

    monkeypatch.setattr(PlainCopier, direction, copied)


@pytest.mark.usefixtures("plain_copies")
class TestCopiesThatFail:
    def test_a_load_that_fails_is_computed_and_others_are_not_touched(
        self, model: Models, monkeypatch: pytest.MonkeyPatch, wanted: Expected
    ) -> None:
        other_prompt = tokens_of(200, seed=5)
        other_wanted = expected_of(model("llama"), other_prompt)
        with Bed(model("llama")) as bed:
            bed.ask(PROMPT)
            bed.ask(other_prompt)
            bed.drop_device()
            broken = {bed.engine_key(PROMPT, index) for index in range(12)}
            break_copies(monkeypatch, "load", lambda copy: copy.key in broken)
            mine, other = bed.engine.generate([PROMPT, other_prompt], GREEDY)
            bed.settle()

            assert (mine.external_hit_tokens, mine.tokens) == (0, wanted.tokens)
            assert (other.external_hit_tokens, other.tokens) == (HIT, other_wanted.tokens)
            assert bed.count(metrics.LOADS_FAILED) == 1
            assert bed.by_label(metrics.HIT_TOKENS) == {"host": HIT}

    def test_a_load_that_failed_is_no_measure_of_speed(
        self, model: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Bed(model("llama"), load={"decide": "cost"}) as bed:
            bed.ask(PROMPT)
            bed.drop_device()
            with monkeypatch.context() as patched:
                break_copies(patched, "load", lambda copy: copy.group_id == 0)
                assert bed.ask(PROMPT).external_hit_tokens == 0
            bed.drop_device()

            assert bed.copy_speed is None
            assert bed.ask(PROMPT).external_hit_tokens == HIT
            assert bed.copy_speed is not None

    def test_one_chunk_that_cannot_be_copied_makes_the_next_try_shorter(
        self, model: Models, monkeypatch: pytest.MonkeyPatch, wanted: Expected
    ) -> None:
        with Bed(model("llama")) as bed:
            bed.ask(PROMPT)
            bed.drop_device()
            broken = bed.engine_key(PROMPT, 4)
            break_copies(monkeypatch, "load", lambda copy: copy.key == broken)
            answer = bed.ask(PROMPT)

            assert (answer.external_hit_tokens, answer.tokens) == (64, wanted.tokens)

    def test_a_store_that_fails_is_not_offered(
        self, model: Models, monkeypatch: pytest.MonkeyPatch, wanted: Expected
    ) -> None:
        with Bed(model("llama")) as bed:
            broken = bed.engine_key(PROMPT, 6)
            break_copies(monkeypatch, "store", lambda copy: copy.key == broken)
            bed.ask(PROMPT)
            bed.drop_device()
            answer = bed.ask(PROMPT)

            assert (answer.external_hit_tokens, answer.tokens) == (96, wanted.tokens)


STATES = {
    "asking": ("find", RequestState.WAITING),
    "promoting": ("read", RequestState.WAITING),
    "loading": ("load", RequestState.LOADING),
    "storing": ("store", RequestState.RUNNING),
}


def has_come(bed: Bed, gate: Gate) -> bool:
    """Whether a thread waits at a gate; a store that was begun gets there, if it is given time."""
    end = time.monotonic() + 5
    while bed.num_held_blocks and not gate.num_waiting and time.monotonic() < end:
        time.sleep(0.001)
    return gate.num_waiting > 0


class TestAborts:
    @pytest.mark.parametrize("when", STATES)
    def test_a_request_may_be_aborted_at_any_time_and_come_back(
        self,
        when: str,
        model: Models,
        tier: Tiers,
        gates: dict[str, Gate],
        copies: dict[str, Gate],
        wanted: Expected,
    ) -> None:
        place = tier("filesystem")
        with Bed(model("llama"), place) as bed:
            if when != "storing":
                bed.ask(PROMPT)
        name, state = STATES[when]
        gate = {**gates, **copies}[name]
        with Bed(model("llama"), place) as bed:
            gate.close()
            request = bed.engine.add_request(PROMPT, GREEDY, request_id="mine")
            bed.step_until(lambda: has_come(bed, gate))
            assert request.state is state
            bed.engine.abort("mine")
            for _ in range(3):
                bed.engine.step()
            if when == "loading":  # its blocks are still written to
                with pytest.raises(RequestError, match="in use"):
                    bed.engine.add_request(PROMPT, GREEDY, request_id="mine")
            else:
                again = bed.engine.add_request(PROMPT, GREEDY, request_id="mine")
            gate.open()
            if when == "loading":
                bed.settle()
                again = bed.engine.add_request(PROMPT, GREEDY, request_id="mine")
            bed.step_until(lambda: again.finish_reason is not None)
            bed.settle()

            assert again.output == wanted.tokens
            assert again.local_hit_tokens + again.external_hit_tokens == HIT

    def test_aborted_before_the_first_step(self, model: Models, wanted: Expected) -> None:
        with Bed(model("llama")) as bed:
            bed.engine.add_request(PROMPT, GREEDY, request_id="mine")
            bed.engine.abort("mine")
            bed.settle()
            request = bed.engine.add_request(PROMPT, GREEDY, request_id="mine")
            bed.step_until(lambda: request.finish_reason is not None)
            bed.settle()

            assert request.output == wanted.tokens


class TestResets:
    @pytest.mark.parametrize("name", ["find", "read", "write", "load", "store"])
    def test_a_reset_while_something_is_under_way(
        self,
        name: str,
        model: Models,
        tier: Tiers,
        gates: dict[str, Gate],
        copies: dict[str, Gate],
        wanted: Expected,
    ) -> None:
        place = tier("filesystem")
        with Bed(model("llama"), place) as bed:
            if name in ("find", "read"):
                bed.ask(PROMPT)
        with Bed(model("llama"), place) as bed:
            if name == "load":
                bed.ask(PROMPT)
                bed.drop_device()
            gate = {**gates, **copies}[name]
            gate.close()
            request = bed.engine.add_request(PROMPT, GREEDY)
            bed.step_until(lambda: gate.num_waiting > 0)
            assert bed.engine.reset_cache()
            assert not bed.side.host_keys()
            bed.engine.step()
            gate.open()
            bed.step_until(lambda: request.finish_reason is not None)
            bed.settle()

            assert request.output == wanted.tokens
            bed.drop_host()
            assert bed.ask(PROMPT).tokens == wanted.tokens

    def test_what_is_stored_during_a_reset_does_not_count(
        self, model: Models, copies: dict[str, Gate]
    ) -> None:
        with Bed(model("llama")) as bed:
            copies["store"].close()
            request = bed.engine.add_request(PROMPT, SamplingParams(max_tokens=1))
            bed.step_until(lambda: request.finish_reason is not None)
            bed.engine.reset_cache()
            copies["store"].open()
            bed.settle()

            assert not bed.side.host_keys()
            assert bed.ask(PROMPT).external_hit_tokens == 0

    def test_a_request_that_loads_meanwhile_is_counted_once(
        self, model: Models, copies: dict[str, Gate]
    ) -> None:
        with Bed(model("llama")) as bed:
            bed.ask(PROMPT)
            bed.drop_device()
            copies["load"].close()
            request = bed.engine.add_request(PROMPT, SamplingParams(max_tokens=2))
            bed.step_until(lambda: bed.count(metrics.PENDING, "loads") > 0)
            assert bed.side.renew()
            copies["load"].open()
            bed.step_until(lambda: is_loaded(request))
            bed.side.allocated(request.request_id, (), 0)  # as vLLM does when a load has ended

            assert bed.count(metrics.HIT_TOKENS) > 0
            assert bed.count(metrics.LOOKUPS) == 2
            assert bed.count(metrics.LOOKUP_TOKENS) == 2 * len(PROMPT)


class TestPreemption:
    def test_source_blocks_of_stores_are_held(self, model: Models, copies: dict[str, Gate]) -> None:
        prompts = [tokens_of(90, seed=seed) for seed in range(4)]
        sampling = SamplingParams(max_tokens=40)
        answers = [expected_answer(model("llama"), prompt, sampling) for prompt in prompts]
        options = EngineOptions(num_blocks=26, max_step_tokens=64)
        with Bed(model("llama"), options=options) as bed:
            copies["store"].close()
            requests = [bed.engine.add_request(prompt, sampling) for prompt in prompts]
            bed.step_until(lambda: sum(r.num_preemptions for r in requests) > 0)
            held = bed.num_held_blocks
            pool = bed.engine.scheduler.blocks.pool
            in_tables = {b for r in requests for t in r.tables for b in t.blocks}
            assert held > 0
            assert pool.num_blocks - 1 - pool.num_free > len(in_tables), "nobody else holds them"
            copies["store"].open()
            bed.step_until(lambda: all(r.finish_reason is not None for r in requests))
            bed.settle()

            assert [request.output for request in requests] == answers
            bed.drop_device()
            for prompt, answer in zip(prompts, answers, strict=True):
                again = bed.ask(prompt, sampling)
                assert again.tokens == answer
                assert again.external_hit_tokens > 0


def expected_answer(model: Path, prompt: list[int], sampling: SamplingParams) -> list[int]:
    with Engine(model, EngineOptions(num_blocks=400)) as engine:
        [answer] = engine.generate([prompt], sampling)
    return answer.tokens


class TestLateReports:
    def test_reports_of_unknown_jobs_are_dropped(self, model: Models, wanted: Expected) -> None:
        with Bed(model("llama")) as bed:
            bed.ask(PROMPT)
            late = RankReport(copy_reports=(CopyReport(1, frozenset(), 10, 0.1),) * 2)
            unknown = frozenset({ChunkKey(b"x")})
            never = RankReport(copy_reports=(CopyReport(999_999, unknown, 10, 0.1),))

            assert bed.side.report([encode(late)]) == EndedLoads()
            assert bed.side.report([encode(never)]) == EndedLoads()
            assert bed.side.report([b""]) == EndedLoads()
            bed.check_quiet()
            assert bed.ask(PROMPT).tokens == wanted.tokens

    def test_a_tiers_report_of_an_unknown_job_costs_no_other_report(
        self, model: Models, tier: Tiers, wanted: Expected
    ) -> None:
        with Bed(model("llama"), tier("filesystem")) as bed:
            stray = TierReportMessage(0, 999_999, (), (), (), (), (), (), 0.0, 0.0)
            really = bed.side.report

            def report(reports: Sequence[bytes]) -> EndedLoads:
                read = decode_report(reports[0])
                both = RankReport((stray, *read.tier_reports), read.copy_reports)
                return really([encode(both)])

            bed.side.report = report  # type: ignore[method-assign]
            bed.engine.generate([PROMPT], GREEDY)
            bed.step_until(lambda: not bed.engine.scheduler.has_work)
            bed.engine.reset_cache()
            [answer] = bed.engine.generate([PROMPT], GREEDY)

            assert (answer.external_hit_tokens, answer.tokens) == (HIT, wanted.tokens)


class TestTiersThatCannotBeOpened:
    def test_a_required_one_stops_the_start(self, model: Models, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("no directory")
        before = threading.active_count()
        good = {"kind": "filesystem", "path": str(tmp_path / "good"), "name": "good"}
        bad = {"kind": "filesystem", "path": str(file), "name": "bad"}

        with pytest.raises(ConfigError, match="file"):
            Bed(model("llama"), tiers=[good, bad])
        assert threading.active_count() == before, "what was opened before is closed again"

    @pytest.mark.slow
    def test_a_required_one_stops_the_start_of_ranks(self, model: Models, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("no directory")
        place = {"kind": "filesystem", "path": str(file)}
        options = EngineOptions(num_blocks=100, num_ranks=2)

        with pytest.raises(ConfigError, match="file"):
            Bed(model("llama"), place, options=options)

    def test_one_that_raises_anything_is_no_different(
        self, model: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def fails(*_settings: object) -> ChunkStore:
            raise OSError(5, "the disk is on fire")

        monkeypatch.setattr(assemble, "open_store", fails)
        place = {"kind": "filesystem", "path": str(tmp_path / "store"), "name": "cold"}

        with pytest.raises(ConfigError, match=r"cold.*on fire"):
            Bed(model("llama"), place)
        with Bed(model("llama"), {**place, "required": False}) as bed:
            assert bed.ask(PROMPT).external_hit_tokens == 0

    def test_another_is_left_out_and_said_once(
        self, model: Models, tmp_path: Path, wanted: Expected, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "file"
        file.write_text("no directory")
        place = {"kind": "filesystem", "path": str(file), "required": False}
        with caplog.at_level(logging.WARNING), Bed(model("llama"), place) as bed:
            cold = bed.ask(PROMPT)
            bed.drop_device()
            warm = bed.ask(PROMPT)
            for seed in range(10):
                bed.ask(tokens_of(100, seed=seed))

            assert cold.tokens == warm.tokens == wanted.tokens
            assert warm.external_hit_tokens == HIT, "host memory works without it"
        said = [record.getMessage() for record in caplog.records]
        assert len([text for text in said if "left out" in text]) == 1
        assert len(said) <= 2, "a fault is counted, and logged once"

    def test_faults_of_one_kind_are_logged_once(
        self, model: Models, tier: Tiers, wrap: Wrap, caplog: pytest.LogCaptureFixture
    ) -> None:
        wrap(lambda store: FailingStore(store, bool))
        with caplog.at_level(logging.WARNING), Bed(model("llama"), tier("filesystem")) as bed:
            for seed in range(5):
                bed.ask(tokens_of(100, seed=seed))

            assert bed.count(metrics.TIER_FAULTS, "filesystem", "TierUnavailable") >= 3
        assert len(caplog.records) == 1


def raising(*_args: object, **_options: object) -> Any:  # noqa: ANN401 - never gives anything
    raise RuntimeError("a bug of ours")


STACK = ("lookup", "ask", "promote", "demote", "poll", "tiers_with")
RECORDER = ("admitted", "described", "loaded", "stored", "evicted", "refused", "tiers_changed")
SPEEDS = ("step_planned", "step_reported", "load_reported")
PARTS = {
    **{f"stack.{name}": ("_stack", name) for name in STACK},
    **{f"recorder.{name}": ("_recorder", name) for name in RECORDER},
    **{f"speeds.{name}": ("_speeds", name) for name in SPEEDS},
    "tracker.take_events": ("tracker", "take_events"),
    "stores.start": ("_stores", "start"),
    "loading.answer": ("_loading", "answer"),
    "loading.start": ("_loading", "start"),
}


class TestHooksNeverRaise:
    @pytest.mark.parametrize("part", PARTS)
    def test_requests_are_answered_whatever_is_broken_inside(
        self,
        part: str,
        model: Models,
        tier: Tiers,
        monkeypatch: pytest.MonkeyPatch,
        wanted: Expected,
    ) -> None:
        owner_name, name = PARTS[part]
        host = {"capacity": "256KiB"}  # too small for two prompts
        with Bed(model("llama"), tier("filesystem"), host=host, load=HASTY) as bed:
            bed.ask(PROMPT)
            bed.drop_device()
            monkeypatch.setattr(getattr(bed.side, owner_name), name, raising)
            for seed in (0, 1, 2, 0):
                [answer] = bed.engine.generate([tokens_of(200, seed=seed)], GREEDY)
                bed.side.take_events()
                if seed == 0:
                    assert answer.tokens == wanted.tokens
                bed.engine.scheduler.blocks.pool.forget_all()

            if part not in ("stack.promote", "recorder.refused", "stack.tiers_with"):
                assert bed.side.hook_faults.total() > 0
            assert bed.count(metrics.HOOK_FAULTS) == bed.side.hook_faults.total()

    def test_one_request_that_is_not_known_costs_the_others_nothing(
        self, model: Models, monkeypatch: pytest.MonkeyPatch, wanted: Expected
    ) -> None:
        with Bed(model("llama")) as bed:
            with monkeypatch.context() as patched:
                patched.setattr("kvstrata.runtime.scheduler_side.TrackedRequest", raising)
                unknown = bed.engine.add_request(tokens_of(300, seed=4), GREEDY)
            mine = bed.engine.add_request(PROMPT, GREEDY)
            bed.step_until(lambda: unknown.finish_reason is not None)
            bed.step_until(lambda: mine.finish_reason is not None)
            bed.step_until(lambda: not bed.engine.scheduler.has_work)
            bed.engine.scheduler.blocks.pool.forget_all()
            [again] = bed.engine.generate([PROMPT], GREEDY)

            assert mine.output == again.tokens == wanted.tokens
            assert again.external_hit_tokens == HIT, "it was stored beside the unknown one"
