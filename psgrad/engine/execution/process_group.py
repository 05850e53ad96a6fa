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
import threading
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
    POLL,
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

_SHORTEST_POLL = 0.0005  # seconds between two looks into the store at first; POLL at last
_LOOK = 0.002  # seconds between two looks for dead ranks, times the number of ranks: all ask one store
_BEAT = 2.0  # seconds between two heartbeats
_HURRIED = 5.0  # seconds of silence where this rank has been asked to end, or has lost a connection
_LEAVING = 1.0  # seconds that rank 0 waits for others to leave before it
_FAILED = "failed"
_SHOWN = 8  # ranks in an error


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
        self._heard = {other: (b"", time.monotonic()) for other in range(size) if other != rank}
        self._hurried, self._turns, self._looked = False, Counter[str](), time.monotonic()
        self._whole = True  # whether no message was broken off
        self._waits_for = ""
        self._requests: list[RankRequests] = []
        self._stopped = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()
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
                within(limits, group._require_others, size),
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
        self._stopped.set()
        self._beating.join()
        with suppress(DistributedError):
            self._store.add("left", 1)
            end = time.monotonic() + _LEAVING
            while self.rank == 0 and self._store.add("left", 0) < self.size and time.monotonic() < end:
                time.sleep(_SHORTEST_POLL)
        # Else it may wait for minutes for a message that does not come.
        if self._whole and not self._store.silent and all(each.ended for each in self._requests):
            dist.destroy_process_group()

    def fail(self, message: str) -> bool:
        """Let the others know that this rank has failed, and why; returns whether it was the first."""
        failure = json.dumps([self.rank, message])
        try:
            return bool(self._store.compare_set(_FAILED, "", failure) == failure.encode())
        except DistributedError:
            return True

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
            self._wait_for(lambda: self._store.add(key, 0) >= self._turns[name], key)
        return self._broadcast(arrays)

    def collect(
        self, name: str, state: Callable[[], Arrays], add: Callable[[str, torch.Tensor], None]
    ) -> None:
        """In pairs of ranks, as in `reduce`, one tensor after another."""
        self._turns[name] += 1
        key = f"collect.{name}"
        self._store.add(key, 1)
        self._wait_for(lambda: self._store.add(key, 0) >= self._turns[name] * self.size, key)
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
        self._hurried = True

    # -- questions at any time -------------------------------------------------------------------------------

    def requests(self, ranks: Sequence[int], answer: Answer) -> RankRequests:
        self._requests.append(RankRequests(self, ranks, answer))
        return self._requests[-1]

    def answer_to_the_end(self) -> None:
        """This rank's program has ended: answer the others' questions until theirs have, too."""
        if not self._requests:
            return
        with suppress(DistributedError):  # it has all that it needs; who has failed says so itself
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
            found: Result = watched(exchange, self.waiting("tensors of another rank", limit), POLL)
            return found
        except RuntimeError as error:
            self._whole = False
            self.hurry()
            end = time.monotonic() + 2 * _HURRIED
            while time.monotonic() < end:
                self._require_others()
                time.sleep(POLL)
            raise DistributedError(
                f"a connection to another rank is lost: {str(error).splitlines()[0]}",
                cause="the network is down, or a rank was killed and started again",
                next_step="run again with --resume",
            ) from error
        except BaseException:
            self._whole = False
            raise

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait(self, key: str) -> None:
        """Wait until the key is there. Raises DistributedError where a rank has failed or died."""
        self._wait_for(lambda: self._store.check([key]), key)

    def _wait_for(self, reached: Callable[[], bool], what: str) -> None:
        """Look often at first, then in pauses of a tenth of the time waited, and for dead ranks now and
        then.
        """
        began, look = time.monotonic(), self.waiting(what)
        self._waits_for = what
        while not reached():
            look()
            time.sleep(min(POLL, max(_SHORTEST_POLL, (time.monotonic() - began) / 10)))
        self._waits_for = ""

    def waiting(self, what: str, limit: float | None = None) -> Callable[[], None]:
        """A function to call again and again during a wait. It raises DistributedError where another rank has
        failed or died, or the wait is too long.

        what: is waited for. limit: in seconds; None for the one of work.
        """
        patience = Patience(self.limits.work if limit is None else limit)
        looked = time.monotonic()

        def look() -> None:
            nonlocal looked
            if patience.ended():
                raise self._too_late(what, patience.limit)
            if (now := time.monotonic()) - looked > max(POLL, self.size * _LOOK):
                self._require_others()
                looked = now

        return look

    def _too_late(self, what: str, seconds: float) -> DistributedError:
        waits = f" {what}".encode()
        late = [rank for rank, beat in self._beats().items() if not beat.endswith(waits)]
        return DistributedError(
            f"rank {self.rank} has waited {seconds:,.0f} seconds for {what!r}"
            + (f"; not there: rank {', '.join(map(str, late[:_SHOWN]))}" if late else ""),
            expected="ranks that come to the same place within that time",
            cause="a rank that lives and does not go on: it reads from a drive that hangs, or runs code of"
            " yours without an end",
            next_step="look at its log in logs/ of the run folder, and run again with --resume;"
            " PSGRAD_RANK_WORK=200000 waits longer",
            rank=late[0] if late else None,
        )

    def _require_others(self) -> None:
        if self._store.check([_FAILED]):
            rank, message = json.loads(self._store.get(_FAILED))
            raise DistributedError(
                f"rank {rank} failed: {message}", next_step="mend it there, and run again with --resume"
            )
        now, silence = time.monotonic(), self._patience()
        paused = now - self._looked > silence / 2  # computed, or was stopped, maybe together with the others
        self._looked = now
        for rank, beat in self._beats().items():
            before, since = self._heard[rank]
            if beat != before or paused:
                self._heard[rank] = beat, now
            elif now - since > (silence if before else self.limits.exchange):  # it may begin late
                raise DistributedError(
                    f"rank {rank} has sent no heartbeat for {now - since:.0f} seconds",
                    cause="its process was killed, or its machine is down",
                    next_step="run again with --resume: what is finished is kept",
                    rank=rank,
                )

    def _patience(self) -> float:
        """Seconds of silence of another rank, at most."""
        return min(_HURRIED, self.limits.silence) if self._hurried else self.limits.silence

    def _beats(self) -> dict[int, bytes]:
        """The last heartbeat of each other rank; empty where it has sent none. One request for all that
        have begun.
        """
        begun = [
            rank
            for rank, (before, _) in self._heard.items()
            if before or self._store.check([f"alive.{rank}"])
        ]
        beats = self._store.multi_get([f"alive.{rank}" for rank in begun]) if begun else []
        return dict.fromkeys(self._heard, b"") | dict(zip(begun, beats, strict=True))

    def _beat(self) -> None:
        with suppress(DistributedError):
            while True:
                self._store.set(f"alive.{self.rank}", f"{time.monotonic()} {self._waits_for}")
                if self._stopped.wait(_BEAT):
                    return
