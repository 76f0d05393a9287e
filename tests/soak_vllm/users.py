"""Users with minds of their own, who talk at once or one after another."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .forms import MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from kvstrata.testing.vllm_endpoint import Completion
    from kvstrata.testing.vllm_server import VllmServer

    from .forms import Form

MAX_TURNS = 5
HANG_UP_SHARE = 0.12
SENT_AFTER_S = 0.05
"""A question has reached the server by then."""


@dataclass(frozen=True)
class Turn:
    """A question, and what was answered."""

    prompt: list[int]
    answer: Completion

    @property
    def story(self) -> str:
        """For messages."""
        return f"an answer to {len(self.prompt)} tokens, {self.answer.cached_tokens} cached"


class User:
    """Somebody who asks, and may hang up. Belongs to one thread at a time."""

    def __init__(self, seed: int, openings: list[list[int]], form: Form) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not a secret
        self._openings = openings
        self._form = form
        self.hung_up: list[int] = []
        """Lengths of questions whose answer was not waited for."""

    def talk(self, server: VllmServer) -> Iterator[Turn]:
        """One conversation: each question is all that was said before, and something new."""
        prompt = self._random.choice(self._openings)[: self._random.randrange(40, 500)]
        for _ in range(self._random.randrange(1, MAX_TURNS + 1)):
            prompt = prompt + some_tokens(self._random, self._random.randrange(1, 120))
            max_tokens = self._random.randrange(1, self._form.max_answer)
            if len(prompt) + max_tokens > MAX_TOKENS:
                return
            if self._random.random() < HANG_UP_SHARE:
                self.hung_up.append(len(prompt))
                after_s = SENT_AFTER_S + self._random.random() ** 2
                server.ask_and_leave(prompt, max_tokens, after_s)
                return
            turn = Turn(prompt, server.ask(prompt, max_tokens))
            yield turn
            if self._form.are_answers_quoted:
                prompt = prompt + turn.answer.tokens


def talk_at_once(users: Sequence[User], server: VllmServer, threads: Executor) -> list[Turn]:
    """Everybody has a conversation."""
    talks = threads.map(lambda user: list(user.talk(server)), users)
    return [turn for talk in talks for turn in talk]


def talk_in_turn(users: Sequence[User], server: VllmServer) -> list[Turn]:
    """Everybody has a conversation, a question each time it is their turn."""
    turns: list[Turn] = []
    talks = deque(user.talk(server) for user in users)
    while talks:
        talk = talks.popleft()
        turn = next(talk, None)
        if turn is None:  # nobody shares a step with what is left of somebody who hung up
            server.settle()
            continue
        turns.append(turn)
        talks.append(talk)
    return turns


def some_tokens(chooser: random.Random, count: int) -> list[int]:
    """Something new."""
    return [chooser.randrange(3, 256) for _ in range(count)]
