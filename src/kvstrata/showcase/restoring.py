"""Serve a prompt, lose the cache, restore it from every tier, and compare all there is.

For each model:

    recompute   an engine without offloading serves the prompt from nothing, several times
    store       an engine with every tier serves it: cold, then with all of it on its device
    restore     the device's memory is overwritten and the prompt served again: from host memory by
                the same engine, from each tier below by a new one that has nothing but that tier

The fastest of several runs counts; the bytes of each must be right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata.engine import Engine
from kvstrata.engine.tiny import make_tiny
from kvstrata.showcase.compute_threads import compute_threads
from kvstrata.showcase.events import Phase, Recomputed, Row
from kvstrata.showcase.models import MODELS
from kvstrata.showcase.partial_hit import show_partial_hit
from kvstrata.showcase.serving import OPTIONS, ObservedEngine, serve
from kvstrata.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstrata.showcase.events import Event
    from kvstrata.showcase.places import Place
    from kvstrata.showcase.serving import Serving

PROMPT_TOKENS: Final = 2_060
"""2,048 that can be restored, whatever the model's blocks, and some to compute."""
BEST_OF: Final = 3
COMPUTE_THREADS: Final = 1
"""The other cores move bytes; figures are steady on a busy machine, too."""
_VOCABULARY: Final = 256


def restore_all(models: Sequence[str], places: Sequence[Place], folder: Path) -> Iterator[Event]:
    """Show every model with every tier, and one hit that is shorter than it could be.

    Args:
        models: of `MODELS`.
        places: the tiers.
        folder: a temporary directory, for checkpoints.
    """
    with compute_threads(COMPUTE_THREADS):
        yield from _show(models, places, folder)


def _show(models: Sequence[str], places: Sequence[Place], folder: Path) -> Iterator[Event]:
    chooser = random.Random(0)  # noqa: S311 - equal prompts in every run
    prompt = [chooser.randrange(_VOCABULARY) for _ in range(PROMPT_TOKENS)]
    for model in models:
        yield from _restore(_Case(model, folder / model, prompt), places)
    partial = max(models, key=lambda model: model == "qwen3_next")
    yield Phase(partial, "lose one chunk for good, and see what is left")
    yield show_partial_hit(partial, folder / partial, prompt, folder / "partial")


@dataclass(frozen=True, slots=True)
class _Case:
    """A model, its checkpoint, and what it is asked."""

    model: str
    folder: Path
    prompt: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Expected:
    """What every restore must lead to."""

    recompute_s: float
    tokens: list[int]
    """Of an engine without offloading."""
    cold: Serving
    local: Serving
    """With the same hit on the device."""

    def row(self, model: str, tier: str, restored: _Restored) -> Row:
        """Compare."""
        servings = restored.servings
        return Row(
            model,
            tier,
            restored.num_tokens,
            restored.num_bytes,
            self.recompute_s,
            min(serving.first_token_s for serving in servings),
            all(_same_bytes(serving, self.cold) for serving in servings),
            all(serving.logits == self.local.logits for serving in servings),
            all(serving.tokens == self.tokens == self.cold.tokens for serving in servings),
        )


@dataclass(frozen=True, slots=True)
class _Restored:
    """Several restores, and what each of them brought."""

    servings: list[Serving]
    num_tokens: int
    num_bytes: int


def _restore(case: _Case, places: Sequence[Place]) -> Iterator[Event]:
    model = case.model
    yield Phase(model, f"compute {len(case.prompt):,} tokens without a cache")
    make_tiny(model, case.folder, **MODELS[model])
    with Engine(case.folder, OPTIONS) as without:
        plain = [_cold(without, case.prompt) for _ in range(BEST_OF)]
        kinds = tuple(group.kind for group in without.layout.groups)
    recompute_s = min(serving.first_token_s for serving in plain)
    yield Recomputed(model, kinds, recompute_s)

    yield Phase(model, "compute once more, and store in every tier")
    settings = [place.settings for place in places if place.settings is not None]
    with ObservedEngine(case.folder, settings) as engine:
        cold, local = engine.serve(case.prompt), engine.serve(case.prompt)
        expected = _Expected(recompute_s, plain[0].tokens, cold, local)
        for place in places:
            if place.settings is None:
                yield Phase(model, f"lose the device's memory, restore from {place.tier}")
                yield expected.row(model, place.tier, _restore_often(engine, case, place))
    for place in places:
        if place.settings is not None:
            yield Phase(model, f"a new engine, nothing in memory: restore from {place.tier}")
            with ObservedEngine(case.folder, [place.settings]) as engine:
                yield expected.row(model, place.tier, _restore_often(engine, case, place))


def _cold(engine: Engine, prompt: Sequence[int]) -> Serving:
    engine.reset_cache()
    return serve(engine, prompt)


def _restore_often(engine: ObservedEngine, case: _Case, place: Place) -> _Restored:
    before_tokens = engine.total(metrics.HIT_TOKENS, place.tier)
    before_bytes = engine.total(metrics.LOAD_BYTES)
    servings = []
    for _ in range(BEST_OF):
        engine.lose_device()
        if place.settings is not None:
            engine.lose_host()
        servings.append(engine.serve(case.prompt))
    num_tokens = engine.total(metrics.HIT_TOKENS, place.tier) - before_tokens
    num_bytes = engine.total(metrics.LOAD_BYTES) - before_bytes
    return _Restored(servings, int(num_tokens) // BEST_OF, int(num_bytes) // BEST_OF)


def _same_bytes(one: Serving, other: Serving) -> bool:
    pairs = zip(one.blocks, other.blocks, strict=True)
    return all(mine.is_same_as(theirs) for mine, theirs in pairs)
