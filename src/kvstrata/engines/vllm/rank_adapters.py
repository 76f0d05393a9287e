"""Beside a worker: which weights an adapter has.

vLLM's block hashes name an adapter and its folder, not what is in it, and an engine may load
another adapter under the same name. What counts is what this rank has loaded, or would load now.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstrata.runtime.digest_cache import user_digests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest

_log = logging.getLogger(__name__)

UNKNOWN: Final = b""
"""Stands for weights that cannot be told."""
_DIGEST_BYTES: Final = 16
_SETTINGS: Final = "adapter_config.json"
_SCHEME: Final = "kvstrata/adapters/1"


class Question(NamedTuple):
    """Which weights will answer a request?"""

    name: str
    adapter_id: int
    path: str
    is_loaded_anew: bool
    """Whether the request has vLLM load the adapter though it is there."""


class AdapterReport(NamedTuple):
    """What a rank says about adapters after a step."""

    answers: dict[str, bytes]
    """By request."""
    loaded: dict[str, bytes]
    """What vLLM has loaded since the last report, by the adapter's name."""


class _Loaded(NamedTuple):
    weights: bytes
    owner: weakref.ref[Any]
    """vLLM's manager of adapters; it may drop the adapter, and load it again."""


class _Promised(NamedTuple):
    """What was answered about a request."""

    name: str
    weights: bytes


class RankAdapters:
    """The adapters of one rank. Called on the rank's thread.

    Args:
        config: vLLM's settings for adapters; None: it has none.
    """

    def __init__(self, config: LoRAConfig | None) -> None:
        self._loaded: dict[int, _Loaded] = {}
        self._promised: dict[str, _Promised] = {}
        self.outdated: set[str] = set()
        """Requests that were promised other weights than vLLM has loaded since: what is loaded for
        them is not what they would compute."""
        self._report = AdapterReport({}, {})
        self._settings = b"" if config is None else config.compute_hash().encode()
        self._is_told = config is not None and _watch(self)

    def ask(self, questions: Mapping[str, Question]) -> None:
        """Answer these in the next report."""
        answers: dict[Question, bytes] = {}
        for request_id, question in questions.items():
            if question not in answers:
                answers[question] = self._answer(question)
            self._report.answers[request_id] = answers[question]
            self._promised[request_id] = _Promised(question.name, answers[question])

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests ended."""
        for request_id in request_ids:
            self._promised.pop(request_id, None)
            self.outdated.discard(request_id)

    def take_report(self) -> AdapterReport | None:
        """Hand over what is new; None: nothing."""
        if not any(self._report):
            return None
        report, self._report = self._report, AdapterReport({}, {})
        return report

    def note(self, lora: LoRARequest, weights: bytes, owner: Any) -> None:  # noqa: ANN401 - vLLM's manager
        """An adapter was loaded, with these files' digest."""
        known = self._with_settings(weights)
        kept = owner.list_adapters()
        self._loaded = {number: one for number, one in self._loaded.items() if number in kept}
        self._loaded[lora.lora_int_id] = _Loaded(known, weakref.ref(owner))
        self._report.loaded[lora.lora_name] = known
        other = _Promised(lora.lora_name, known)
        self.outdated.update(
            request_id
            for request_id, promised in self._promised.items()
            if promised.name == lora.lora_name and promised != other
        )

    def close(self) -> None:
        """Hear no more of what is loaded."""
        _watchers.discard(self)

    def _answer(self, question: Question) -> bytes:
        if not self._is_told or len(_watchers) > 1:  # whose adapters are they?
            return UNKNOWN
        loaded = self._loaded.get(question.adapter_id)
        if loaded is not None and not question.is_loaded_anew:
            owner = loaded.owner()
            if owner is not None and question.adapter_id in owner.list_adapters():
                return loaded.weights
        return self._with_settings(files_digest(question.path))

    def _with_settings(self, weights: bytes) -> bytes:
        """What an adapter does depends on vLLM's settings too: types, modules it is applied to."""
        if weights == UNKNOWN:
            return UNKNOWN
        return hashlib.sha256(self._settings + weights).digest()[:_DIGEST_BYTES]


def files_digest(path: str) -> bytes:
    """A digest of all that vLLM reads of an adapter; `UNKNOWN` if it is not there."""
    try:
        folder = _folder(path)
        files = [folder / _SETTINGS, *sorted(folder.glob("adapter_model.*"))]
        known = user_digests("adapters", _SCHEME)
        digests = b"".join(known.digest(file, _file_digest) for file in files)
        return hashlib.sha256(digests).digest() if files[1:] else UNKNOWN
    except Exception as error:  # noqa: BLE001 - vLLM says what is wrong with it when it loads it
        _log.warning("adapter %s cannot be read (%s): it is not offloaded", path, error)
        return UNKNOWN


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        name = hashlib.sha256(path.name.encode()).digest()
        return name + hashlib.file_digest(file, "sha256").digest()


def _folder(path: str) -> Path:
    """Where an adapter's files lie: named by the user, or downloaded."""
    folder = Path(path).expanduser()
    if folder.is_dir() or folder.is_absolute():
        return folder
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with vLLM

    return Path(snapshot_download(path, local_files_only=True))


_watchers: weakref.WeakSet[RankAdapters] = weakref.WeakSet()


def _watch(rank: RankAdapters) -> bool:
    """Follow every load of an adapter in this process, of which vLLM tells no connector.

    False: this vLLM loads them in another way.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415 - with adapters only

    load = getattr(WorkerLoRAManager, "_load_adapter", None)
    if load is None:
        _log.warning("this vLLM does not say which adapters it loads: they are not offloaded")
        return False
    _watchers.add(rank)
    if not hasattr(load, "is_followed"):
        WorkerLoRAManager._load_adapter = _followed(load)  # noqa: SLF001
    return True


def _followed(load: Any) -> Any:  # noqa: ANN401 - vLLM's own method
    @functools.wraps(load)
    def load_adapter(self: Any, lora_request: LoRARequest) -> Any:  # noqa: ANN401
        before = files_digest(lora_request.lora_path)
        loaded = load(self, lora_request)
        after = files_digest(lora_request.lora_path)
        is_certain = before in (after, UNKNOWN)  # vLLM may have downloaded it
        for rank in tuple(_watchers):
            rank.note(lora_request, after if is_certain else UNKNOWN, self)
        return loaded

    load_adapter.is_followed = True  # type: ignore[attr-defined]
    return load_adapter
