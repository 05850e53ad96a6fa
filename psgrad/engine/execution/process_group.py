"""The ranks of torch.distributed as the processes that share the rows of a dataset.

torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
(https://docs.pytorch.org/docs/stable/elastic/run.html). Only tensors are sent: nothing is pickled. A rank
that dies closes its connections, which ends the others at the next call; one that hangs ends them after the
time limit of the process group.
"""

from __future__ import annotations

import json
import math
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

from psgrad.engine.execution.ranks import Arrays, Result, joined
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


class RankGroup:
    """The ranks of one run. See `Processes`.

    Args:
        store: the key-value store of the process group, which is made by now.
        seconds: its time limit.
    """

    parts: int | None = None
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
        head = self._head(what, own)
        rows = self._all(torch.cat([head, *map(_as_bytes, own.values())]), len(head))
        return [_cut(row[length:], self._facts(row[:length], what)) for row, length in rows]

    def texts(self, what: str, text: str) -> list[str]:
        own = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        return [bytes(each["text"].tolist()).decode() for each in self.gathered(what, {"text": own})]

    def broadcast(self, what: str, arrays: Arrays) -> Arrays:
        head = self._head(what, arrays if self.leads else {})
        length = torch.tensor([len(head)], device="cpu")
        with self._errors_named():
            dist.broadcast(length, 0)
            head = head if self.leads else head.new_empty(int(length))
            dist.broadcast(head, 0)
        found: Arrays = {}
        for name, (shape, kind) in self._facts(head, what).items():
            value = (
                arrays[name].detach().cpu() if self.leads else torch.empty(shape, dtype=kind, device="cpu")
            )
            content = _as_bytes(value)
            if len(content):
                with self._errors_named():
                    dist.broadcast(content, 0)
            found[name] = value if self.leads else content.view(kind).reshape(shape)
        return found

    def collect(
        self, what: str, state: Callable[[], Arrays], add: Callable[[str, torch.Tensor], None]
    ) -> None:
        for source in self._sources():
            for name, value in self._received(what, source):
                add(name, value)
        self._send_on(what, state)

    def reduce(self, what: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> Arrays:
        for source in self._sources():
            merge(dict(self._received(what, source)))
        self._send_on(what, state)
        return self.broadcast(what, state() if self.leads else {})

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

    def _sources(self) -> Iterator[int]:
        """The ranks that send to this one where all is gathered on rank 0: in pairs, then pairs of pairs."""
        step = 1
        while step < self.size and self.rank % (2 * step) == 0:
            if self.rank + step < self.size:
                yield self.rank + step
            step *= 2

    def _send_on(self, what: str, state: Callable[[], Arrays]) -> None:
        """Send what this rank and its sources have gathered to the rank that merges it."""
        if self.leads:
            return
        arrays, receiver = state(), self.rank & (self.rank - 1)  # without its lowest bit
        head = self._head(what, arrays)
        with self._errors_named():
            for message in (torch.tensor([len(head)], device="cpu"), head, *map(_as_bytes, arrays.values())):
                if len(message):
                    dist.send(message, receiver)

    def _received(self, what: str, source: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Each name and tensor that another rank sends, on the CPU."""
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._errors_named():
            dist.recv(length, source)
            head = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            dist.recv(head, source)
        for name, (shape, kind) in self._facts(head, what).items():
            content = torch.empty(kind.itemsize * math.prod(shape), dtype=torch.uint8, device="cpu")
            if len(content):
                with self._errors_named():
                    dist.recv(content, source)
            yield name, content.view(kind).reshape(shape)

    def _all(self, own: torch.Tensor, head: int) -> list[tuple[torch.Tensor, int]]:
        """The bytes of each rank, and how many of them are its head."""
        lengths = [torch.zeros(2, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        with self._errors_named():
            dist.all_gather(lengths, torch.tensor([len(own), head], device="cpu"))
        longest = max(int(each[0]) for each in lengths)
        padded = torch.cat([own, own.new_zeros(longest - len(own))])
        rows = [torch.empty_like(padded) for _ in lengths]
        with self._errors_named():
            dist.all_gather(rows, padded)
        return [(row[: int(each[0])], int(each[1])) for row, each in zip(rows, lengths, strict=True)]

    def _head(self, what: str, arrays: Arrays) -> torch.Tensor:
        """The name of a message, and the name, shape and type of each of its tensors, as bytes."""
        self._require_between_passes(what)
        facts = [
            [name, list(value.shape), str(value.dtype).removeprefix("torch.")]
            for name, value in arrays.items()
        ]
        return torch.tensor(list(json.dumps([what, facts]).encode()), dtype=torch.uint8, device="cpu")

    def _require_between_passes(self, what: str) -> None:
        """Raises DistributedError in a share of a pass, where ranks have other rows and messages."""
        if self._computing:
            raise DistributedError(
                f"a rank is about to share {what} while it computes its share of a pass",
                hint=(
                    "keep what the first pass gives, and go over the rows when it is done; or run one process"
                ),
            )

    def _facts(self, head: torch.Tensor, what: str) -> Facts:
        """name -> (shape, type), as `_head` wrote them. Raises DistributedError where the other rank is at
        another place of the program.
        """
        there, facts = json.loads(bytes(head.tolist()))
        if there != what:
            raise DistributedError(
                f"rank {self.rank} shares {what}, and another rank shares {there}",
                hint=(
                    "run it in one process, or on machines of one kind; code of yours may not depend on"
                    " the process"
                ),
            )
        return {name: (tuple(shape), getattr(torch, kind)) for name, shape, kind in facts}

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


Facts = dict[str, tuple[tuple[int, ...], Any]]


def _cut(content: torch.Tensor, facts: Facts) -> Arrays:
    """The tensors whose bytes follow each other."""
    found, start = Arrays(), 0
    for name, (shape, kind) in facts.items():
        size = kind.itemsize * math.prod(shape)
        found[name] = content[start : start + size].clone().view(kind).reshape(shape)
        start += size
    return found


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes [k] on the CPU; its own memory where it is there. gloo does not know all types."""
    plain = value.detach().cpu().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # of one number or none the stride may be any
    return flat.view(torch.uint8)
