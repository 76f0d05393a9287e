"""What a store learns about each key, and the outcome that the facts make together."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, TypeAlias

from kvstrata.core.outcomes import TierOutcome
from kvstrata.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvstrata.core.ids import ChunkKey

_SHOWN_CHARACTERS: Final = 200


class Presence(enum.Enum):
    """Whether the medium had, or now has, what was asked about."""

    DONE = "done"
    ABSENT = "absent"

    @classmethod
    def of(cls, is_there: bool) -> Presence:  # noqa: FBT001 - the fact itself, not a mode
        """A medium's yes or no."""
        return cls.DONE if is_there else cls.ABSENT


Fact: TypeAlias = Presence | TierError


def outcome_of(facts: Collection[tuple[ChunkKey, Fact]]) -> TierOutcome:
    """Sort the facts into an outcome; of several facts about one key the worst counts."""
    failed = {key: fact for key, fact in facts if isinstance(fact, TierError)}
    absent = {key for key, fact in facts if fact is Presence.ABSENT} - failed.keys()
    done = {key for key, fact in facts if fact is Presence.DONE} - absent - failed.keys()
    return TierOutcome(frozenset(done), frozenset(absent), failed)


def shown(error: Exception, secrets: Iterable[str]) -> str:
    """An error of a client library in one short line, without secrets.

    Servers echo what they do not understand, so an error's text can hold a password; such a text
    is left out as a whole, since the echo may be quoted in ways that a replacement would miss.
    """
    name = type(error).__name__
    text = str(error).strip().partition("\n")[0][:_SHOWN_CHARACTERS]
    if not text or any(secret in str(error) for secret in secrets if secret):
        return name
    return f"{name}: {text}"
