"""One rank: its part of the model, its caches, and a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from kvstrata.config.units import ByteSize
from kvstrata.core.layout import ParallelLayout
from kvstrata.engine.batching import in_runs, make_batch
from kvstrata.engine.cache.grouping import plan_cache
from kvstrata.engine.cache.tensors import allocate_tensors
from kvstrata.engine.checkpoint import load_model
from kvstrata.engine.nn.cached import CachedLayer
from kvstrata.engine.sampling import draw_token
from kvstrata.engine.scheduling.step import StepResult
from kvstrata.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvstrata.engine.cache.grouping import CachePlan, CacheSettings
    from kvstrata.engine.cache.tensors import LayerTensors
    from kvstrata.engine.models.registry import CausalModel
    from kvstrata.engine.nn.parallel import TensorParallel
    from kvstrata.engine.scheduling.step import StepPlan


class ModelRunner:
    """A rank's model and caches. Keeps nothing about requests.

    Args:
        folder: the model directory.
        ranks: this rank's place.
        dtype: of weights and caches; "auto" for the checkpoint's own.
        device: where they go.
        settings: the user's choices about the cache.

    Raises:
        ModelError: the directory cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        ranks: TensorParallel,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        settings: CacheSettings | None = None,
    ) -> None:
        self._device = device
        module = load_model(folder, ranks, dtype=dtype, device=device)
        self._model = cast("CausalModel", module)
        self._layers: Mapping[str, CachedLayer] = {
            name: layer for name, layer in module.named_modules() if isinstance(layer, CachedLayer)
        }
        self._dtype = next(module.parameters()).dtype
        specs = {name: layer.spec for name, layer in self._layers.items()}
        self.plan: CachePlan = plan_cache(
            specs, self._dtype, settings, ParallelLayout(tensor=ranks.size)
        )

    def allocate(self, num_blocks: int) -> LayerTensors:
        """Allocate the caches; call it once, before the first step.

        Raises:
            LayoutError: there is not enough memory.
        """
        specs = {name: layer.spec for name, layer in self._layers.items()}
        try:
            tensors = allocate_tensors(
                self.plan, specs, num_blocks, dtype=self._dtype, device=self._device
            )
        except RuntimeError as error:  # what torch raises when memory runs out
            size = ByteSize(num_blocks * self.plan.page_bytes * self.plan.num_storages)
            raise LayoutError(
                f"{num_blocks} KV blocks take {size}, which cannot be allocated on "
                f"{self._device}: lower cache_capacity or num_blocks"
            ) from error
        for group_id, group in enumerate(self.plan.layout.groups):
            for layer in group.layers:
                self._layers[layer.name].bind(tensors[layer.name], group_id)
        return tensors

    @torch.inference_mode()
    def execute(self, step: StepPlan) -> StepResult:
        """Compute a step's tokens and draw the next ones."""
        sequences = in_runs(step.sequences)
        if not sequences:
            return StepResult()
        hidden = self._model(make_batch(self.plan.layout, sequences, self._device))
        ends = torch.tensor([len(sequence.token_ids) for sequence in sequences]).cumsum(0) - 1
        drawing = [i for i, sequence in enumerate(sequences) if sequence.sampling]
        result = StepResult()
        if not drawing:
            return result
        logits = self._model.logits(hidden[ends[drawing]]).float().cpu()
        for row, index in zip(logits, drawing, strict=True):
            sequence = sequences[index]
            assert sequence.sampling is not None
            result.tokens[sequence.request_id] = draw_token(row, sequence.sampling, sequence.stop)
            if sequence.sampling.keep_logits:
                result.logits[sequence.request_id] = row.tolist()
        return result
