"""The heartbeats of the ranks of a run, in its key-value store: which ranks run, what each waits for, and
waits that end as soon as one has failed or died.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from psgrad.engine.execution.rank_waits import POLL, Limits, Patience, ReachableStore
from psgrad.errors import DistributedError

SHORTEST_POLL = 0.0005  # seconds between two looks into the store at first; POLL at last
HURRIED = 5.0  # seconds of silence where this rank has been asked to end, or has lost a connection
_LOOK = 0.002  # seconds between two looks for dead ranks, times the number of ranks: all ask one store
_BEAT = 2.0  # seconds between two heartbeats
_FAILED = "failed"
_SHOWN = 8  # ranks in an error


class Heartbeats:
    """This rank's heartbeats, sent by a thread, and those of the others.

    Attributes:
        store: the key-value store of the run.
        heard: rank -> its last heartbeat, empty before the first, and when this rank saw that it had changed.
        hurried: whether this rank has been asked to end, or has lost a connection.
        waits_for: what this rank waits for, which the others see; empty while it does not wait.
        stopped: set once this rank sends no more heartbeats.
        looked: when it last looked for those of the others.
    """

    def __init__(self, store: ReachableStore, rank: int, size: int, limits: Limits) -> None:
        self.store, self.rank, self.size, self.limits = store, rank, size, limits
        self.heard = {other: (b"", time.monotonic()) for other in range(size) if other != rank}
        self.hurried, self.looked, self.waits_for = False, time.monotonic(), ""
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
        began, look = time.monotonic(), self.waiting(what)
        self.waits_for = what
        while not reached():
            look()
            time.sleep(min(POLL, max(SHORTEST_POLL, (time.monotonic() - began) / 10)))
        self.waits_for = ""

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
                self.require_others()
                looked = now

        return look

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
        paused = now - self.looked > silence / 2  # computed, or was stopped, maybe together with the others
        self.looked = now
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
