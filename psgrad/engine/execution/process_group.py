"""The ranks of torch.distributed as the processes that share the rows of a dataset.

torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
(https://docs.pytorch.org/docs/stable/elastic/run.html). A rank that dies closes its connections, which ends
the others at the next call; one that hangs ends them after the time limit of the process group.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from psgrad.engine.execution.ranks import Arrays, Processes, Result, joined
from psgrad.errors import DistributedError, PsgradError, error_of

_POLL = 0.05  # seconds between two looks for the other ranks
_FAILED = "failed"  # the exit code of the rank that failed first, in the store


def keys_of_this_attempt(store: Store, rank: int, size: int, seconds: float) -> Store:
    """A part of the store for the ranks that are there now. Raises DistributedError where they do not come.

    torchrun keeps the store where it starts ranks again, with all that was in it, and gives ranks no number
    of the attempt that is the same on all hosts. So rank 0 takes a new number, and each rank has to find its
    own nonce in the list that rank 0 has made under it. Ranks of an attempt before are dead by then.
    """
    nonce, end = secrets.token_hex(8), time.monotonic() + seconds
    number = store.add("attempts", int(rank == 0))
    while time.monotonic() < end:
        own = PrefixStore(f"attempt.{number}", store)
        own.set(f"nonce.{rank}", nonce)
        if rank == 0 and own.check([f"nonce.{other}" for other in range(size)]):
            own.set("nonces", json.dumps([own.get(f"nonce.{other}").decode() for other in range(size)]))
        if own.check(["nonces"]) and nonce in json.loads(own.get("nonces")):
            return own
        time.sleep(_POLL)
        number = store.add("attempts", 0)
    raise DistributedError(
        f"not all of the {size:,} ranks have come together within {seconds:,.0f} seconds",
        hint=(
            "look at what the others have printed, and run again with --resume;"
            " engine.process_timeout sets the time limit"
        ),
    )


class RankGroup(Processes):
    """The ranks of one run. See `Processes`.

    Args:
        store: the key-value store of the process group, which is made by now.
        seconds: its time limit.
    """

    backend: str | None = "gloo"

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self.leads, self.seconds = rank, size, rank == 0, seconds
        self._store = store
        self._computing = False  # in `together`

    @classmethod
    def join(cls, seconds: float) -> RankGroup:
        """Join the group that the environment describes. seconds: the time limit of each wait for other
        ranks. Raises DistributedError.
        """
        timeout = timedelta(seconds=seconds)
        try:
            store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
            own = keys_of_this_attempt(PrefixStore("psgrad", store), rank, size, seconds)
            dist.init_process_group(cls.backend, store=own, rank=rank, world_size=size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise DistributedError(
                f"the process group can't be made: {str(error).splitlines()[0]}",
                hint=(
                    "start with torchrun, or with --processes; or unset RANK and WORLD_SIZE for one"
                    " process. If the port is taken, set MASTER_PORT to a free one"
                ),
            ) from error
        return cls(own, rank, size, seconds)

    def leave(self) -> None:
        """Leave the group, when all ranks have come to the end."""
        self.meet("the end")
        dist.destroy_process_group()

    def failed(self, exit_code: int) -> int | None:
        """Let the others know that this rank fails with this exit code. Returns the exit code of the rank
        that failed before; None where this is the first.
        """
        try:
            first = int(self._store.compare_set(_FAILED, "", f"{self.rank} {exit_code}").split()[0])
            return None if first == self.rank else int(self._store.get(_FAILED).split()[1])
        except RuntimeError:  # the process that holds the store is gone
            return None

    def part_of(self, rank: int) -> str:
        return f"rank-{rank}"

    def my_rows(self, name: str, chunks: Sequence[range]) -> list[range]:
        first, last = (len(chunks) * each // self.size for each in (self.rank, self.rank + 1))
        return joined(chunks[first:last])

    def meet(self, what: str) -> None:
        self.gathered(what, {})

    def agreed(self, what: str, numbers: Callable[[], list[int]]) -> list[int]:
        own = torch.tensor(numbers() if self.leads else [], dtype=torch.int64, device="cpu")
        found: list[int] = self.broadcast(what, {"numbers": own})["numbers"].tolist()
        return found

    def gathered(self, what: str, own: Arrays) -> list[Arrays]:
        found: list[Any] = [None] * self.size
        message = self._message(what, own)
        with self._errors_named():
            dist.all_gather_object(found, message)
        return [self._opened(each, what) for each in found]

    def texts(self, what: str, text: str) -> list[str]:
        own = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        return [bytes(each["text"].tolist()).decode() for each in self.gathered(what, {"text": own})]

    def broadcast(self, what: str, arrays: Arrays) -> Arrays:
        found: list[Any] = [self._message(what, arrays if self.leads else {})]
        with self._errors_named():
            dist.broadcast_object_list(found, 0)
        return self._opened(found[0], what)

    def reduce(self, what: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> Arrays:
        self.collect(what, state, merge)
        return self.broadcast(what, state() if self.leads else {})

    def collect(self, what: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> None:
        """Merges in pairs, then in pairs of pairs."""
        self._require_between_passes(what)
        step = 1
        while step < self.size and self.rank % (2 * step) == 0:
            if self.rank + step < self.size:
                found: list[Any] = [None]
                with self._errors_named():
                    dist.recv_object_list(found, self.rank + step)
                merge(self._opened(found[0], what))
            step *= 2
        if not self.leads:
            message = self._message(what, state())
            with self._errors_named():
                dist.send_object_list([message], self.rank & (self.rank - 1))  # without its lowest bit

    def together(self, what: str, compute: Callable[[], Result]) -> Result:
        self._require_between_passes(what)
        raised = None
        self._computing = True
        try:
            result = compute()
        except PsgradError as error:
            raised = error
        finally:
            self._computing = False
        errors = self.texts(f"{what}, computed", "" if raised is None else json.dumps(raised.parts()))
        if any(errors):
            first = error_of(json.loads(next(filter(None, errors))))
            raise raised if raised is not None and raised.parts() == first.parts() else first
        return result

    # -- messages --------------------------------------------------------------------------------------------

    def _message(self, what: str, arrays: Arrays) -> tuple[str, Arrays]:
        """The name of a call, and its tensors on the CPU, each with no more memory than its own."""
        self._require_between_passes(what)
        return what, {name: value.detach().cpu().clone() for name, value in arrays.items()}

    def _opened(self, message: tuple[str, Arrays], what: str) -> Arrays:
        """The tensors of a message. Raises DistributedError where the other rank is at another place of the
        program.
        """
        there, arrays = message
        if there != what:
            raise DistributedError(
                f"rank {self.rank} shares {what}, and another rank shares {there}",
                hint=(
                    "run it in one process, or on machines of one kind; code of yours may not depend on"
                    " the process"
                ),
            )
        return arrays

    def _require_between_passes(self, what: str) -> None:
        """Raises DistributedError in a share of a pass, where ranks have other rows and messages."""
        if self._computing:
            raise DistributedError(
                f"a rank is about to share {what} while it computes its share of a pass",
                hint=(
                    "keep what the first pass gives, and go over the rows when it is done; or run one process"
                ),
            )

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise DistributedError(
                f"rank {self.rank} has lost another rank, or has waited {self.seconds:,.0f} seconds for it:"
                f" {str(error).splitlines()[0]}",
                hint=(
                    "look at what the other ranks have printed, and run again with --resume: what is"
                    " finished is kept. engine.process_timeout sets the time limit"
                ),
            ) from error
