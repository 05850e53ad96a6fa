"""Tensors by name from one rank to another, over torch.distributed. Nothing is pickled.

Sending and receiving wait in a thread of their own: a rank that hangs without closing its connections would
hold up the other one for minutes, and the calling thread looks for such ranks in the meantime.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from psgrad.engine.execution.ranks import Arrays, Result

# Small tensors are sent together, up to this number of bytes.
_PIECE = 1 << 20


@dataclass(frozen=True)
class _TensorFacts:
    """The name, shape and type of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def send(arrays: Arrays, to: Sequence[int]) -> None:
    """Send these tensors to these ranks, which call `received`."""
    facts = _facts_of(arrays)
    words = _words(facts)
    for rank in to:
        _send_words(words, rank)
    for piece in _pieces(facts):
        parts = [_as_bytes(arrays[each.name]) for each in piece]
        _send_bytes(parts[0] if len(parts) == 1 else torch.cat(parts), to)


def received(source: int, onwards: Sequence[int] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Each name and tensor that another rank sends, on the CPU; they are passed on to the ranks `onwards`."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    words = torch.zeros(int(length), dtype=torch.uint8)
    dist.recv(words, source)
    for rank in onwards:
        _send_words(words, rank)
    for piece in _pieces(_facts_in(words)):
        content = torch.empty(sum(each.bytes for each in piece), dtype=torch.uint8)
        if len(content):
            dist.recv(content, source)
        _send_bytes(content, onwards)
        yield from _cut(content, piece)


def gathered(own: Arrays, rank: int, size: int) -> list[Arrays]:
    """The tensors of all ranks, in their order, on the CPU; each rank calls it with its own.

    In a ring: a rank receives from the one before it what it has not got yet, and passes it on.
    """
    facts = _facts_of(own)
    words = _words(facts)
    row = torch.cat([words, *(_as_bytes(value) for value in own.values())])
    lengths = torch.tensor([len(words), len(row)])
    found: dict[int, Arrays] = {rank: {name: value.detach().cpu() for name, value in own.items()}}
    for step in range(1, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        sent = [dist.isend(lengths, after)]
        arrived = torch.zeros(2, dtype=torch.int64)
        dist.recv(arrived, before)
        sent.append(dist.isend(row, after))
        next_row = torch.empty(int(arrived[1]), dtype=torch.uint8)
        dist.recv(next_row, before)
        for request in sent:
            assert request is not None, "this process is in the group"
            request.wait()
        lengths, row = arrived, next_row
        described = int(lengths[0])
        found[(rank - step) % size] = dict(_cut(row[described:], _facts_in(row[:described])))
    return [found[each] for each in range(size)]


def watched(exchange: Callable[[], Result], check: Callable[[], None], seconds: float) -> Result:
    """The result of the exchange, which runs in another thread; `check` is called at such intervals until it
    has ended. What either of them raises is raised; an exchange that has not ended by then is left behind.
    """
    failures, found = list[BaseException](), list[Result]()

    def run() -> None:
        try:
            found.append(exchange())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    while thread.is_alive():
        check()
        thread.join(seconds)
    if failures:
        raise failures[0]
    return found[0]


class OneThread:
    """As `watched`, in one thread for all exchanges, which come one after another: a new thread for each
    would take time, and memory for its stack.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="psgrad-exchanges").start()

    def __call__(self, exchange: Callable[[], Result], check: Callable[[], None], seconds: float) -> Result:
        done: Future[Result] = Future()
        self._waiting.put((exchange, done))
        while not wait([done], seconds).done:
            check()
        return done.result()

    def _run(self) -> None:
        while True:
            exchange, done = self._waiting.get()
            try:
                done.set_result(exchange())
            except BaseException as error:
                done.set_exception(error)
            del exchange, done  # with what they hold


def _pieces(facts: Sequence[_TensorFacts]) -> Iterator[list[_TensorFacts]]:
    """The tensors in their order, in runs of no more than `_PIECE` bytes, or of a single larger one."""
    piece: list[_TensorFacts] = []
    for each in facts:
        if piece and sum(other.bytes for other in piece) + each.bytes > _PIECE:
            yield piece
            piece = []
        piece.append(each)
    if piece:
        yield piece


def _cut(content: torch.Tensor, facts: Sequence[_TensorFacts]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each name and tensor of these bytes."""
    start = 0
    for each in facts:
        own = content[start : start + each.bytes]
        start += each.bytes
        aligned = own if len(facts) == 1 and own.storage_offset() == 0 else own.clone()
        yield each.name, aligned.view(each.dtype).reshape(each.shape)


def _facts_of(arrays: Arrays) -> list[_TensorFacts]:
    return [_TensorFacts(name, tuple(value.shape), value.dtype) for name, value in arrays.items()]


def _facts_in(words: torch.Tensor) -> list[_TensorFacts]:
    """What `_words` says."""
    found = json.loads(words.numpy().tobytes())
    return [_TensorFacts(name, tuple(shape), getattr(torch, kind)) for name, shape, kind in found]


def _words(facts: Sequence[_TensorFacts]) -> torch.Tensor:
    known = [[each.name, list(each.shape), str(each.dtype).removeprefix("torch.")] for each in facts]
    return torch.tensor(list(json.dumps(known).encode()), dtype=torch.uint8)


def _send_words(words: torch.Tensor, to: int) -> None:
    dist.send(torch.tensor([len(words)]), to)
    dist.send(words, to)


def _send_bytes(content: torch.Tensor, to: Sequence[int]) -> None:
    for rank in to if len(content) else ():
        dist.send(content, rank)


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes [k] on the CPU; its own memory where it is there. gloo does not know all types."""
    plain = value.detach().cpu().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # of one number or none the stride may be any
    return flat.view(torch.uint8)
