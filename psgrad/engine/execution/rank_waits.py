"""How long a rank waits: for another rank, for the key-value store of the group, for a process to listen.

No wait is without a limit. The limits come from the environment, as they differ by machine and hold before a
config is read. Seconds in which this process was stopped do not count: the others may have been, too.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from torch.distributed.distributed_c10d import Store

from psgrad.engine.execution.rank_tensors import OneThread, watched
from psgrad.engine.execution.ranks import Result
from psgrad.errors import ConfigError, DistributedError

POLL = 0.05  # seconds between two looks while something else runs
_PREFIX = "PSGRAD_RANK_"
_PAUSE = 1.0  # seconds between two looks of a wait, at most: more were a pause of this process


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
        """Raises ConfigError for what is no number of seconds."""
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
    """Whether a wait has taken longer than so many seconds, of those in which this process ran."""

    def __init__(self, limit: float) -> None:
        self.limit, self._waited, self._looked = limit, 0.0, time.monotonic()

    def ended(self) -> bool:
        now = time.monotonic()
        self._waited += min(now - self._looked, _PAUSE)
        self._looked = now
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


def within(limits: Limits, look: Callable[[], None], size: int) -> Callable[[], None]:
    """The same look while ranks come together; DistributedError where that takes too long: a little longer
    than the waits inside, which say more.
    """
    patience = Patience(limits.exchange + limits.silence)

    def looked() -> None:
        look()
        if patience.ended():
            raise not_together(size, limits.exchange)

    return looked


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
    """Seconds between two looks: short ones at first."""
    pause = POLL
    while True:
        yield pause
        pause = min(2 * pause, _PAUSE)


def reached(environment: Mapping[str, str], connect: Callable[[], Result], limits: Limits) -> Result:
    """What `connect` returns, once a process listens where rank 0 is to hold the store. Raises
    DistributedError where none does in time, or where what listens is no store.
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
