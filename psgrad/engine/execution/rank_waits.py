"""How long a rank waits, and how it finds out whether the others still run.

A rank waits for another rank, for the key-value store of the group, and for a process to listen. No wait is
without a limit. The limits come from the environment, as they differ by machine and hold before a config is
read. Seconds in which this process was stopped do not count: the others may have been, too.

The heartbeats of the ranks in the store say which ranks run and what each waits for, so that a wait ends as
soon as one has failed.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from torch.distributed.distributed_c10d import Store

from psgrad.engine.execution.rank_tensors import OneThread, watched
from psgrad.engine.execution.ranks import Result
from psgrad.errors import ConfigError, DistributedError

POLL = 0.05  # seconds between two checks while something else runs
_PREFIX = "PSGRAD_RANK_"
_PAUSE = 1.0  # seconds between two checks of a wait, at most: more were a pause of this process


@dataclass(frozen=True)
class Limits:
    """Seconds that a rank waits, at most; PSGRAD_RANK_SILENCE and so on in the environment.

    Attributes:
        silence: for a heartbeat of a rank, or an answer of the store. Both come within milliseconds from
            threads of their own, whatever is computed or written: only a machine that is short of memory
            holds them up for seconds.
        exchange: for all ranks to come together, and for one message between two. Machines of one job may
            be ready minutes apart.
        work: for a rank that sends heartbeats, to come to where the others wait. It may compute for hours.
    """

    silence: float = 25.0
    exchange: float = 600.0
    work: float = 86_400.0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Limits:
        """Raises ConfigError for a value that is not a number of seconds."""
        given = {each.name: environment.get(_PREFIX + each.name.upper()) for each in fields(cls)}
        return cls(**{name: _seconds(name, text) for name, text in given.items() if text})


def _seconds(name: str, text: str) -> float:
    with suppress(ValueError):
        if 0 < (found := float(text)) < math.inf:
            return found
    raise ConfigError(
        f"{_PREFIX}{name.upper()} is {text!r}",
        expected="a number of seconds above 0",
        next_step=f"unset it for {getattr(Limits, name):,.0f} seconds, or set a number",
    )


class Patience:
    """Whether a wait has taken longer than a limit. Only seconds in which this process ran count."""

    def __init__(self, limit: float) -> None:
        self.limit, self._waited, self._checked = limit, 0.0, time.monotonic()

    def ended(self) -> bool:
        now = time.monotonic()
        self._waited += min(now - self._checked, _PAUSE)
        self._checked = now
        return self._waited > self.limit


class ReachableStore:
    """The key-value store; DistributedError where the process that holds it is gone, or gives no answer in
    time. Requests run in a thread of their own: those of torch wait without a limit.
    """

    def __init__(self, store: Store, silence: float) -> None:
        self._store, self._silence, self._in_turn = store, silence, OneThread()
        self.silent = False  # whether it has not answered in time

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            patience = Patience(self._silence)

            def require_answer() -> None:
                self.silent = self.silent or patience.ended()
                if self.silent:
                    raise DistributedError(
                        "the process that holds the key-value store of the group has given no answer for"
                        f" {self._silence:.0f} seconds",
                        cause="rank 0, or the agent of torchrun on the first machine, is stopped, or its"
                        " machine hangs",
                        next_step="continue or end it, and run again with --resume;"
                        " PSGRAD_RANK_SILENCE=120 waits longer",
                    )

            if self.silent:
                require_answer()
            try:
                return self._in_turn(lambda: method(*args), require_answer, POLL)
            except RuntimeError as error:
                raise DistributedError(
                    "the process that holds the key-value store of the group can't be reached",
                    cause="rank 0, or the agent of torchrun on the first machine, was killed",
                    next_step="run again with --resume: what is finished is kept",
                ) from error

        return call


def not_together(size: int, seconds: float) -> DistributedError:
    """The error of ranks that did not come together."""
    return DistributedError(
        f"not all of the {size:,} ranks have come together within {seconds:,.0f} seconds",
        cause="a rank has failed before it could say so, or was not started; or the process that holds the"
        " key-value store is stopped",
        next_step="look at what the others have printed, and run again with --resume;"
        " PSGRAD_RANK_EXCHANGE=1800 waits longer",
    )


def within(limits: Limits, check: Callable[[], None], size: int) -> Callable[[], None]:
    """`check`, which also raises DistributedError where ranks take too long to come together. That is a
    little longer than the limits of the waits inside, whose errors say more.
    """
    patience = Patience(limits.exchange + limits.silence)

    def checked() -> None:
        check()
        if patience.ended():
            raise not_together(size, limits.exchange)

    return checked


def require_known(host: str, seconds: float) -> None:
    """Wait until a host's name has an address: a service may know it a moment after the host has started.
    Raises DistributedError.
    """
    patience, pauses = Patience(seconds), _pauses()
    while True:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            if patience.ended():
                raise DistributedError(
                    f"the host of MASTER_ADDR, {host!r}, has had no address for {seconds:,.0f} seconds:"
                    f" {error.strerror}",
                    expected="a name or an address of the host of rank 0 that all hosts know",
                    cause="a name that is misspelt, or that this host's name service does not know",
                    next_step="set MASTER_ADDR to the address of that host;"
                    " PSGRAD_RANK_EXCHANGE=1800 waits longer",
                ) from error
            time.sleep(next(pauses))
        else:
            return


def _pauses() -> Iterator[float]:
    """Seconds between two checks: short ones at first."""
    pause = POLL
    while True:
        yield pause
        pause = min(2 * pause, _PAUSE)


def reached(environment: Mapping[str, str], connect: Callable[[], Result], limits: Limits) -> Result:
    """The result of `connect`, called when a process listens at the address of rank 0's store. Raises
    DistributedError where none listens in time, or where the listening process is not a store.
    """
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    _require_listener(host, port, limits.exchange)
    patience = Patience(limits.silence)

    def require_store() -> None:
        if patience.ended():
            raise DistributedError(
                f"what listens at {host}, port {port} has given no answer for {limits.silence:,.0f} seconds",
                expected="the key-value store of rank 0",
                cause="another program uses that port, or rank 0 is stopped",
                next_step="set MASTER_PORT to a port that is free on that host",
            )

    return watched(connect, require_store, POLL)


def _require_listener(host: str, port: int, seconds: float) -> None:
    """Wait until a process listens there."""
    patience, pauses = Patience(seconds), _pauses()
    while not patience.ended():
        with suppress(OSError), socket.create_connection((host, port), timeout=_PAUSE):
            return
        time.sleep(next(pauses))
    raise DistributedError(
        f"nothing has listened at {host}, port {port} for {seconds:,.0f} seconds",
        expected="rank 0, which holds the key-value store of the ranks",
        cause="rank 0 has failed before it could say so, or was not started; or a firewall is in between",
        next_step="look at what rank 0 has printed; PSGRAD_RANK_EXCHANGE=1800 waits longer",
    )


SHORTEST_POLL = 0.0005  # seconds between two requests to the store at first; POLL at last
HURRIED = 5.0  # seconds of silence where this rank has been asked to end, or has lost a connection
_CHECK = 0.002  # seconds between two checks for dead ranks, times the number of ranks: all use one store
_BEAT = 2.0  # seconds between two heartbeats
_FAILED = "failed"
_SHOWN = 8  # ranks in an error


class Heartbeats:
    """This rank's heartbeats, sent by a thread, and those of the others.

    Attributes:
        store: the key-value store of the run.
        heard: rank -> its last heartbeat, empty before the first, and when this rank saw that it had changed.
        hurried: whether this rank has been asked to end, or has lost a connection.
        waits_for: what this rank waits for, which the others read; empty while it does not wait.
        stopped: set once this rank sends no more heartbeats.
        checked: when it last checked for those of the others.
    """

    def __init__(self, store: ReachableStore, rank: int, size: int, limits: Limits) -> None:
        self.store, self.rank, self.size, self.limits = store, rank, size, limits
        self.heard = {other: (b"", time.monotonic()) for other in range(size) if other != rank}
        self.hurried, self.checked, self.waits_for = False, time.monotonic(), ""
        self.stopped = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def end(self) -> None:
        """Send no more of them."""
        self.stopped.set()
        self._beating.join()

    def fail(self, message: str) -> bool:
        """Let the others know that this rank has failed, and why; returns whether it was the first."""
        failure = json.dumps([self.rank, message])
        try:
            return bool(self.store.compare_set(_FAILED, "", failure) == failure.encode())
        except DistributedError:
            return True

    def wait_for(self, reached: Callable[[], bool], what: str) -> None:
        """Wait until `reached` is true: check often at first, then in pauses of a tenth of the time waited,
        and for dead ranks now and then. Raises DistributedError where another rank has failed or died.
        """
        began, check = time.monotonic(), self.waiting(what)
        self.waits_for = what
        while not reached():
            check()
            time.sleep(min(POLL, max(SHORTEST_POLL, (time.monotonic() - began) / 10)))
        self.waits_for = ""

    def waiting(self, what: str, limit: float | None = None) -> Callable[[], None]:
        """A function to call again and again during a wait. It raises DistributedError where another rank has
        failed or died, or the wait is too long.

        what: is waited for. limit: in seconds; None for the one of work.
        """
        patience = Patience(self.limits.work if limit is None else limit)
        checked = time.monotonic()

        def check() -> None:
            nonlocal checked
            if patience.ended():
                raise self._too_late(what, patience.limit)
            if (now := time.monotonic()) - checked > max(POLL, self.size * _CHECK):
                self.require_others()
                checked = now

        return check

    def _too_late(self, what: str, seconds: float) -> DistributedError:
        waits = f" {what}".encode()
        late = [rank for rank, beat in self.beats().items() if not beat.endswith(waits)]
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

    def require_others(self) -> None:
        if self.store.check([_FAILED]):
            rank, message = json.loads(self.store.get(_FAILED))
            raise DistributedError(
                f"rank {rank} failed: {message}", next_step="mend it there, and run again with --resume"
            )
        now, silence = time.monotonic(), self._patience()
        paused = now - self.checked > silence / 2  # computed, or was stopped, maybe together with the others
        self.checked = now
        for rank, beat in self.beats().items():
            before, since = self.heard[rank]
            if beat != before or paused:
                self.heard[rank] = beat, now
            elif now - since > (silence if before else self.limits.exchange):  # it may begin late
                raise DistributedError(
                    f"rank {rank} has sent no heartbeat for {now - since:.0f} seconds",
                    cause="its process was killed, or its machine is down",
                    next_step="run again with --resume: what is finished is kept",
                    rank=rank,
                )

    def _patience(self) -> float:
        """Seconds of silence of another rank, at most."""
        return min(HURRIED, self.limits.silence) if self.hurried else self.limits.silence

    def beats(self) -> dict[int, bytes]:
        """The last heartbeat of each other rank; empty where it has sent none. One request for all that
        have begun.
        """
        begun = [
            rank for rank, (before, _) in self.heard.items() if before or self.store.check([f"alive.{rank}"])
        ]
        beats = self.store.multi_get([f"alive.{rank}" for rank in begun]) if begun else []
        return dict.fromkeys(self.heard, b"") | dict(zip(begun, beats, strict=True))

    def _beat(self) -> None:
        with suppress(DistributedError):
            while True:
                self.store.set(f"alive.{self.rank}", f"{time.monotonic()} {self.waits_for}")
                if self.stopped.wait(_BEAT):
                    return
