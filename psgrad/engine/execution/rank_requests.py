"""Requests of a rank to other ranks, which answer at any time, also during a computation.

For each other rank a thread of this one waits for its questions and answers them. It takes nothing that a
computation holds, and waits for nobody but the rank that it answers, which waits for it. So no order in which
ranks ask can end in a deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from psgrad.engine.execution.rank_tensors import OneThread
from psgrad.engine.execution.rank_waits import Limits
from psgrad.engine.execution.ranks import Answer

_QUESTION, _ANSWER = 1, 2  # tags of messages
_HEAD = 4  # numbers of a question that are sent at once
_FOREVER = timedelta(days=365)  # a rank may compute for days without a question


class RankExchange(Protocol):
    """What is needed of the ranks of a run."""

    rank: int
    limits: Limits

    def exchange(
        self,
        exchange: Callable[[], Any],
        watched: Callable[..., Any] = ...,
        limit: float | None = None,
    ) -> Any:
        """What the exchange of tensors returns. Raises DistributedError with the rank that has failed or
        died. watched: runs it, such as rank_tensors.watched. limit: in seconds.
        """

    def fail(self, message: str) -> bool:
        """Let the others know that this rank has failed, and why."""


class RankRequests:
    """See `Requests`.

    Args:
        ranks: those that ask each other, with this one; each of them makes this object.
        answer: the answer to a question, called in threads.
    """

    def __init__(self, group: RankExchange, ranks: Sequence[int], answer: Answer) -> None:
        self._group, self._answer = group, answer
        self._others = [rank for rank in ranks if rank != group.rank]
        self._in_turn = OneThread()  # questions come one after another, whichever thread asks
        self._messages: ProcessGroup = group.exchange(lambda: _connected(ranks))
        self._answering = [
            threading.Thread(target=self._serve, args=(other,), daemon=True, name=f"psgrad-answers-{other}")
            for other in self._others
        ]
        for thread in self._answering:
            thread.start()

    def request(self, questions: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
        limit = self._group.limits.exchange  # that of the messages is too long
        self._group.exchange(lambda: self._asked(questions, into), self._in_turn, limit)

    def end(self) -> None:
        """Tell the other ranks that this one asks no more, and wait until they have said so too.

        Raises DistributedError where one of them has failed or died before.
        """
        self._group.exchange(self._said_goodbye, self._in_turn, self._group.limits.exchange)

    @property
    def ended(self) -> bool:
        """Whether all others have said that they ask no more, or are gone."""
        return not any(thread.is_alive() for thread in self._answering)

    def _asked(self, questions: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
        waiting = []
        for rank, question in questions.items():
            head = torch.zeros(_HEAD, dtype=torch.int64)
            head[0] = 1 + len(question)
            head[1 : 1 + min(len(question), _HEAD - 1)] = question[: _HEAD - 1]
            waiting.append(dist.isend(head, rank, group=self._messages, tag=_QUESTION))
            if len(question) > _HEAD - 1:
                rest = question[_HEAD - 1 :].contiguous()
                waiting.append(dist.isend(rest, rank, group=self._messages, tag=_QUESTION))
            waiting.append(dist.irecv(into[rank], rank, group=self._messages, tag=_ANSWER))
        for each in waiting:
            assert each is not None, "this process is in the group"
            each.wait()

    def _said_goodbye(self) -> None:
        for other in self._others:
            nothing = torch.zeros(_HEAD, dtype=torch.int64)
            dist.send(nothing, other, group=self._messages, tag=_QUESTION)
        for thread in self._answering:
            thread.join()

    def _serve(self, other: int) -> None:
        """Answer the questions of another rank until it asks no more, or is gone."""
        try:
            while (question := self._next_question(other)) is not None:
                try:
                    found = self._answer(question)
                except Exception as error:  # without an answer the asking rank would wait for ever
                    self._group.fail(f"{type(error).__name__}: {error}")
                    return
                dist.send(found, other, group=self._messages, tag=_ANSWER)
        except RuntimeError:  # the connection is lost; the next use of it names the dead rank
            return

    def _next_question(self, other: int) -> torch.Tensor | None:
        """The next question of another rank; None if it has no more."""
        head = torch.zeros(_HEAD, dtype=torch.int64)
        dist.recv(head, other, group=self._messages, tag=_QUESTION)
        count = int(head[0]) - 1
        if count < 0:
            return None
        if count <= _HEAD - 1:
            return head[1 : 1 + count]
        rest = torch.zeros(count - (_HEAD - 1), dtype=torch.int64)
        dist.recv(rest, other, group=self._messages, tag=_QUESTION)
        return torch.cat([head[1:], rest])


def _connected(ranks: Sequence[int]) -> ProcessGroup:
    return dist.new_group(  # type: ignore[no-any-return]
        list(ranks), timeout=_FOREVER, backend="gloo", use_local_synchronization=True
    )
