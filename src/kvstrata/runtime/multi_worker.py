"""The worker halves of several connectors as one. Called on the rank's thread.

A child that raises is closed on this rank and named in the report, so that the scheduler half can
stop it everywhere. Names that this rank does not have are reported as faults too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvstrata.errors import ConfigError
from kvstrata.runtime.multi_messages import MultiMessage, MultiReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstrata.core.layout import KVLayout
    from kvstrata.runtime.seam import WorkerConnector
    from kvstrata.transfers.cache_views import LayerCache

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class MultiWorker:
    """Several worker halves as one.

    Args:
        children: by the names that the scheduler half has for them.

    Raises:
        ConfigError: two have the same name.
    """

    def __init__(self, children: Sequence[tuple[str, WorkerConnector]]) -> None:
        check_names([name for name, _ in children])
        self._children = dict(children)
        self._stepping: list[str] = []
        self._stopped: set[str] = set()
        self._unclean: set[str] = set()
        self._faults: dict[str, str] = {}

    def register_caches(
        self, layout: KVLayout, caches: Mapping[str, LayerCache], num_blocks: int
    ) -> None:
        """Show every child the caches."""
        for name in self._children:
            self._tell(name, lambda c: c.register_caches(layout, caches, num_blocks))

    def start_step(self, message: bytes) -> None:
        """Stop whom the message says, and hand the others their parts."""
        said = msgspec.msgpack.decode(message, type=MultiMessage)
        for name in said.stopping:
            self._stop(name)
        for name, part in said.parts.items():
            self._start(name, part)
        self._stepping = list(said.parts)

    def finish_step(self) -> bytes:
        """What the children of this step say."""
        parts = {name: self._tell(name, _finish) for name in self._stepping}
        faults, self._faults, self._stepping = self._faults, {}, []
        return msgspec.msgpack.encode(
            MultiReport(
                {name: part for name, part in parts.items() if part is not None},
                faults,
                sorted(self._stopped),
                sorted(self._unclean),
            )
        )

    def close(self) -> None:
        """Close every child. Does nothing on successive calls."""
        for name in self._children:
            self._stop(name)

    def _start(self, name: str, part: bytes) -> None:
        """Start a child's step; a name that this rank does not have counts as stopped."""
        if name not in self._children:
            self._faults[name] = "there is no such connector on this rank"
            self._stopped.add(name)
        self._tell(name, lambda c: c.start_step(part))

    def _tell(self, name: str, call: Callable[[WorkerConnector], _T]) -> _T | None:
        """Tell a child something; None: it is stopped, or raised and is stopped now."""
        if name in self._stopped:
            return None
        try:
            return call(self._children[name])
        except Exception as error:  # noqa: BLE001 - a fault stays with its child
            _log.exception("connector %s: its worker half is stopped", name)
            self._faults[name] = repr(error)
            self._stop(name)
            return None

    def _stop(self, name: str) -> None:
        """Close a child; it touches no cache after that, unless closing raises."""
        if name in self._stopped:
            return
        self._stopped.add(name)
        try:
            if name in self._children:
                self._children[name].close()
        except Exception as error:  # noqa: BLE001 - a fault stays with its child
            _log.exception("connector %s: its worker half could not be closed", name)
            self._faults.setdefault(name, repr(error))
            self._unclean.add(name)


def check_names(names: Sequence[str]) -> None:
    """Refuse connectors that could not be told apart.

    Raises:
        ConfigError: there is none, or two have the same name.
    """
    if not names:
        raise ConfigError("connectors", "there is none", "one or more")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError("connectors", f"names stand twice: {repeated}", "unique names")


def _finish(worker: WorkerConnector) -> bytes:
    return bytes(worker.finish_step())
