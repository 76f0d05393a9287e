"""vLLM's scheduler output, as a step's progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.runtime.seam import OfferedState, RequestProgress, StepProgress

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from vllm.v1.core.sched.output import SchedulerOutput

    from kvstrata.engines.vllm.layout import GroupMap


def read_progress(output: SchedulerOutput, groups: GroupMap, known: Container[str]) -> StepProgress:
    """What a step computes, for the requests that are known."""
    states = getattr(output.kv_connector_block_state, "boundary_state_offloads", None) or {}
    guessed = output.scheduled_spec_decode_tokens
    running = [
        RequestProgress(
            request_id,
            computed + output.num_scheduled_tokens[request_id] - len(guessed.get(request_id, ())),
            tuple(_offered(states.get(request_id, ()), groups)),
        )
        for request_id, computed in _computed(output)
        if request_id in known
    ]
    preempted = [name for name in output.preempted_req_ids or () if name in known]
    return StepProgress(running, preempted)


def _computed(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Requests of a step, with the tokens computed before it."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def _offered(
    states: Iterator[tuple[int, int, int]] | tuple[()], groups: GroupMap
) -> Iterator[OfferedState]:
    for engine_group, block_id, num_tokens in states:
        group_id = groups.ours(engine_group)
        if group_id is not None:
            yield OfferedState(group_id, block_id, num_tokens)
