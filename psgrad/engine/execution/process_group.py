"""The ranks of torch.distributed as the processes that share the rows of a dataset.

torchrun, srun and others start the processes, and set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
(https://docs.pytorch.org/docs/stable/elastic/run.html). Ranks wait for each other in the key-value store of
the process group, where a wait ends with an error as soon as another rank has failed or died. Tensors are
sent when all ranks are there, and only tensors: nothing is pickled.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from psgrad.engine.execution import rank_tensors
from psgrad.engine.execution.rank_requests import RankRequests
from psgrad.engine.execution.rank_waits import (
    HURRIED,
    POLL,
    SHORTEST_POLL,
    Heartbeats,
    Limits,
    Patience,
    ReachableStore,
    not_together,
    reached,
    require_known,
    within,
)
from psgrad.engine.execution.ranks import PROGRESS_EVERY, Answer, Arrays, Result, step_within
from psgrad.errors import DistributedError, PsgradError, error_of

_LEAVING = 1.0  # seconds that rank 0 waits for others to leave before it


def _run_of(environment: Mapping[str, str]) -> str:
    """A name that no other run has whose ranks meet at the same port by mistake."""
    step = [environment.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID")]
    return ".".join(["psgrad.run", environment.get("TORCHELASTIC_RUN_ID", ""), *step])


def keys_of_this_attempt(store: Store, rank: int, size: int, seconds: float) -> Store:
    """A part of the store for the ranks that are there now. Raises DistributedError where they do not come.

    torchrun keeps the store where it starts ranks again, with all that was in it, and gives ranks no number
    of the attempt that is the same on all hosts. So rank 0 takes a new number, and each rank has to find its
    own nonce in the list that rank 0 has made under it. Ranks of an attempt before are dead by then.
    """
    nonce, patience = secrets.token_hex(8), Patience(seconds)
    number = store.add("psgrad.attempts", int(rank == 0))
    while not patience.ended():
        own = PrefixStore(f"psgrad.attempt.{number}", store)
        own.set(f"nonce.{rank}", nonce)
        if rank == 0 and own.check([f"nonce.{other}" for other in range(size)]):
            own.set("nonces", json.dumps([own.get(f"nonce.{other}").decode() for other in range(size)]))
        if own.check(["nonces"]) and nonce in json.loads(own.get("nonces")):
            return own
        time.sleep(POLL)
        number = store.add("psgrad.attempts", 0)
    raise not_together(size, seconds)


Watched = Callable[[Callable[[], Any], Callable[[], None], float], Any]
"""Such as rank_tensors.watched."""


class RankGroup:
    """The ranks of one run. See `Processes`."""

    parts: int | None = None
    backend: str | None = "gloo"

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.limits = Limits.of(os.environ)
        self.rank, self.size, self.leads = rank, size, rank == 0
        self._store = ReachableStore(store, self.limits.silence)
        self.heartbeats = Heartbeats(self._store, rank, size, self.limits)
        self._turns = Counter[str]()
        self._whole = True  # whether no message was broken off
        self._requests: list[RankRequests] = []
        self._progress: dict[str, tuple[int, int, float]] = {}  # rows not sent, rows of all, when it asked
        self._steps, self._computing = 0, False
        self._computed = self._waited = 0.0  # seconds

    @classmethod
    def join(cls, agent: int | None = None) -> RankGroup:
        """Join the group that the environment describes. Raises DistributedError.

        agent: the number of the process that has started this one, and holds the store; None where the store
        is another's.
        """

        def require_agent() -> None:
            if agent not in (None, os.getppid()):
                raise DistributedError(
                    "the process that started this rank is gone",
                    cause="the agent of torchrun, or psgrad with --processes, was killed",
                    next_step="run again with --resume: what is finished is kept",
                )

        threads = os.environ.get("OMP_NUM_THREADS", "")
        if "SLURM_PROCID" in os.environ and threads.isdecimal():  # set after torch was loaded
            torch.set_num_threads(int(threads))
        limits = Limits.of(os.environ)
        timeout = timedelta(seconds=limits.exchange)

        def connected() -> tuple[Store, int, int]:
            return next(iter(rendezvous("env://", timeout=timeout)))

        def met() -> tuple[Store, int, int]:
            require_known(os.environ.get("MASTER_ADDR", "localhost"), limits.exchange)
            holds = os.environ["RANK"] == "0" or agent is not None
            store, rank, size = connected() if holds else reached(os.environ, connected, limits)
            own = PrefixStore(_run_of(os.environ), store)
            return keys_of_this_attempt(own, rank, size, limits.exchange), rank, size

        try:
            # Watched: it waits without a limit for a store that went with its agent, or does not answer.
            size = int(os.environ["WORLD_SIZE"])
            store, rank, size = rank_tensors.watched(met, within(limits, require_agent, size), POLL)
            group = cls(PrefixStore("psgrad", store), rank, size)
            # Watched: a rank that dies while the others connect to it would hold them up for minutes.
            rank_tensors.watched(
                lambda: dist.init_process_group(
                    cls.backend, store=store, rank=rank, world_size=size, timeout=timeout
                ),
                within(limits, group.heartbeats.require_others, size),
                POLL,
            )
        except (RuntimeError, ValueError) as error:
            if "waiting for clients" in str(error):
                raise not_together(size, limits.exchange) from error
            taken = "EADDRINUSE" in str(error)
            raise DistributedError(
                f"the process group can't be made: {str(error).splitlines()[0]}",
                expected="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them",
                cause="another program uses the port MASTER_PORT"
                if taken
                else "a rank has ended already, or the environment describes no group",
                next_step="set MASTER_PORT to a port that is free on this host"
                if taken
                else "start with torchrun, or with --processes; or unset WORLD_SIZE for one process",
            ) from error
        return group

    def leave(self) -> None:
        """End the heartbeats, and leave the group; rank 0, which may hold the store, a moment after the
        others.
        """
        self.heartbeats.end()
        with suppress(DistributedError):
            self._store.add("left", 1)
            end = time.monotonic() + _LEAVING
            while self.rank == 0 and self._store.add("left", 0) < self.size and time.monotonic() < end:
                time.sleep(SHORTEST_POLL)
        # Otherwise it may wait for minutes for a message that does not come.
        if self._whole and not self._store.silent and all(each.ended for each in self._requests):
            dist.destroy_process_group()

    def fail(self, message: str) -> bool:
        """Let the others know that this rank has failed, and why; returns whether it was the first."""
        return self.heartbeats.fail(message)

    def part_of(self, rank: int) -> str:
        return f"rank-{rank}"

    def own(self, every: Sequence[range]) -> list[range]:
        return list(every)

    # -- rows ------------------------------------------------------------------------------------------------

    def ranges(self, name: str, every: Sequence[range], first: Collection[int] = ()) -> Iterator[range]:
        own = [place for place, rows in enumerate(every) if any(row in rows for row in first)]
        for place in chain(own, self._next_places(name, len(every))):
            if self._store.add(f"{name}.taken.{place}", 1) == 1:
                yield every[place]

    def _next_places(self, name: str, count: int) -> Iterator[int]:
        """Places below `count` that no rank was given before: a rank does not ask for those of all others."""
        while (place := self._store.add(f"{name}.next", 1) - 1) < count:
            yield place

    def progress(self, name: str, rows: int) -> int:
        unsent, known, asked = self._progress.get(name, (0, 0, -PROGRESS_EVERY))
        unsent, now = unsent + rows, time.monotonic()
        if now - asked >= PROGRESS_EVERY:
            known, unsent, asked = int(self._store.add(f"{name}.rows", unsent)), 0, now
        self._progress[name] = unsent, known, asked
        return known + unsent

    # -- meeting ---------------------------------------------------------------------------------------------

    def agreed(self, name: str, numbers: Callable[[], list[int]]) -> list[int]:
        key = f"agreed.{name}"
        self._turns[key] += 1
        key += f".{self._turns[key]}"
        if self.rank == 0:
            self._store.set(key, json.dumps(numbers()))
        self._wait(key)
        result: list[int] = json.loads(self._store.get(key))
        return result

    def meet(self, name: str) -> None:
        key = f"met.{name}"
        if self._store.add(f"{key}.count", 1) == self.size:
            self._store.set(key, "1")
        self._wait(key)

    def reduce(self, name: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> Arrays:
        """In pairs of ranks, then pairs of pairs: the time grows with the logarithm of their number."""
        self.meet(f"{name}.reduce")
        for source in self._sources():
            merge(self._received(source))
        if self.rank:
            self._send(state(), [self._receiver])
        return self._broadcast(state() if self.rank == 0 else {})

    def _sources(self) -> Iterator[int]:
        """The ranks that send to this one where all is gathered on rank 0, in pairs. What rank 0 sends to all
        goes the other way, the last of them first.
        """
        step = 1
        while step < self.size and self.rank % (2 * step) == 0:
            if self.rank + step < self.size:
                yield self.rank + step
            step *= 2

    @property
    def _receiver(self) -> int:
        """The rank that this one, which is not rank 0, sends to."""
        return self.rank & (self.rank - 1)  # without its lowest bit

    def broadcast(self, name: str, arrays: Arrays) -> Arrays:
        self._turns[name] += 1
        key = f"broadcast.{name}"
        if self.rank == 0:
            self._store.add(key, 1)
        else:
            self.heartbeats.wait_for(lambda: self._store.add(key, 0) >= self._turns[name], key)
        return self._broadcast(arrays)

    def collect(
        self, name: str, state: Callable[[], Arrays], add: Callable[[str, torch.Tensor], None]
    ) -> None:
        """In pairs of ranks, as in `reduce`, one tensor after another."""
        self._turns[name] += 1
        key = f"collect.{name}"
        self._store.add(key, 1)
        self.heartbeats.wait_for(lambda: self._store.add(key, 0) >= self._turns[name] * self.size, key)
        for source in self._sources():
            self._received(source, add)
        if self.rank:
            self._send(state(), [self._receiver])

    def texts(self, name: str, text: str) -> list[str]:
        self._store.set(f"text.{name}.{self.rank}", text)
        self.meet(f"text.{name}")
        if self.rank:
            return []
        return [self._store.get(f"text.{name}.{rank}").decode() for rank in range(self.size)]

    # -- steps of one program --------------------------------------------------------------------------------

    def step(self, what: str) -> str:
        if self._computing:
            raise step_within(what)
        self._steps += 1
        name = f"step.{self._steps}"
        found = self._store.compare_set(f"{name}.what", "", what).decode()
        if found != what:
            raise DistributedError(
                f"rank {self.rank} is about to share {what}, and another rank {found}",
                expected="processes that all take the same steps",
                cause="machines whose arithmetic differs, or code of yours that depends on the process",
                next_step="run it in one process, or on machines of one kind",
            )
        return name

    def together(self, what: str, compute: Callable[[], Result]) -> Result:
        name, raised, begun = self.step(what), None, time.monotonic()
        self._computing = True
        try:
            result = compute()
        except PsgradError as error:
            raised = error
            self._store.compare_set(f"{name}.error", "", json.dumps(error.parts()))
        finally:
            self._computing = False
        ended = time.monotonic()
        self.meet(name)
        self._computed += ended - begun
        self._waited += time.monotonic() - ended
        if self._store.check([f"{name}.error"]):
            first = error_of(json.loads(self._store.get(f"{name}.error")))
            raise raised if raised is not None and raised.parts() == first.parts() else first
        return result

    def gathered(self, what: str, own: Arrays) -> list[Arrays]:
        self.meet(self.step(what))
        found: list[Arrays] = []
        self.exchange(lambda: found.extend(rank_tensors.gathered(own, self.rank, self.size)))
        return found

    def spent(self) -> tuple[float, float]:
        return self._computed, self._waited

    def hurry(self) -> None:
        self.heartbeats.hurried = True

    def requests(self, ranks: Sequence[int], answer: Answer) -> RankRequests:
        self._requests.append(RankRequests(self, ranks, answer))
        return self._requests[-1]

    def answer_to_the_end(self) -> None:
        """Answer the other ranks' questions until their programs have ended, as this rank's has."""
        if not self._requests:
            return
        with suppress(DistributedError):  # this rank has all it needs; a rank that failed reports it itself
            self.meet("the end")
            for each in self._requests:
                each.end()

    # -- tensors ---------------------------------------------------------------------------------------------

    def _send(self, state: Arrays, to: Sequence[int]) -> None:
        self.exchange(lambda: rank_tensors.send(state, to))

    def _received(self, source: int, add: Callable[[str, torch.Tensor], None] | None = None) -> Arrays:
        """What another rank sends; nothing where `add` takes each tensor."""
        found: Arrays = {}

        def take() -> None:
            for name, value in rank_tensors.received(source):
                (found.__setitem__ if add is None else add)(name, value)

        self.exchange(take)
        return found

    def _broadcast(self, arrays: Arrays) -> Arrays:
        """The tensors of rank 0, on each rank's CPU."""
        onwards = list(self._sources())[::-1]
        if self.rank == 0:
            self._send(arrays, onwards)
            return {name: value.detach().cpu() for name, value in arrays.items()}
        found: Arrays = {}
        self.exchange(lambda: found.update(rank_tensors.received(self._receiver, onwards)))
        return found

    def exchange(
        self,
        exchange: Callable[[], Result],
        watched: Watched = rank_tensors.watched,
        limit: float | None = None,
    ) -> Result:
        """What an exchange of tensors returns. Raises DistributedError with the rank that has failed or
        died.

        watched: runs it. limit: seconds for all of it; None for as many as for work, as each message of the
        process group has a limit.
        """
        try:
            found: Result = watched(exchange, self.heartbeats.waiting("tensors of another rank", limit), POLL)
            return found
        except RuntimeError as error:
            self._whole = False
            self.hurry()
            end = time.monotonic() + 2 * HURRIED
            while time.monotonic() < end:
                self.heartbeats.require_others()
                time.sleep(POLL)
            raise DistributedError(
                f"a connection to another rank is lost: {str(error).splitlines()[0]}",
                cause="the network is down, or a rank was killed and started again",
                next_step="run again with --resume",
            ) from error
        except BaseException:
            self._whole = False
            raise

    def _wait(self, key: str) -> None:
        """Wait until the key is there. Raises DistributedError where a rank has failed or died."""
        self.heartbeats.wait_for(lambda: self._store.check([key]), key)
