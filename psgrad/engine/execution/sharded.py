"""Weights of which each rank of a group keeps a part: an operator gathers the parts of its weight from the
ranks, runs, and frees them.

A part is asked for when it is needed (see rank_requests.py), and not in collectives, which all ranks would
have to enter in one order: ranks have other rows, and so other operators.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.engine.execution.placement import is_plain, narrowed_to
from psgrad.engine.execution.ranks import Processes, Requests
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_sources import FEW_ROWS
from psgrad.engine.transforms.private_torch import parameter_store
from psgrad.errors import DistributedError

# Bytes below which each rank keeps the whole of a weight: to ask for it would take longer than to send it.
WHOLE_BELOW = 1 << 15
# A weight is cut between its rows if it has at least this many rows for each rank: parts are about equal.
_ROWS_A_RANK = 8
_SPAN, _ROWS = 0, 1  # the kinds of question


class InParts:
    """See `Source`. Each rank has `each` numbers, those of rank r from r x each on; the last ones have fewer.

    Attributes:
        number: of the weight, the same on all ranks.
        unit: numbers of a row that is on one rank as a whole; 1 where rows may be cut.
        own: [k], what this rank keeps.
    """

    def __init__(self, parts: WeightParts, number: int, data: Tensor, kind: torch.dtype) -> None:
        self.parts, self.number = parts, number
        self.layout = torch.empty_strided(data.shape, data.stride(), dtype=kind, device="meta")
        count, ranks = data.numel(), len(parts.ranks)
        rows = data.is_contiguous() and data.dim() > 1 and len(data) >= _ROWS_A_RANK * ranks
        self.unit = count // len(data) if rows else 1
        self.each = -(-(count // self.unit) // ranks) * self.unit
        first = min(count, parts.index * self.each)
        self.own = _flat(data, first, min(count, first + self.each) - first).to(kind)

    def read(self, view: Tensor, *, pinned: bool = False) -> Tensor:
        if not view.numel():
            return torch.empty(view.shape, dtype=view.dtype, device="cpu")
        first = int(view.storage_offset())
        count = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        found = torch.empty(count, dtype=view.dtype, pin_memory=pinned, device="cpu")
        questions, into = dict[int, Tensor](), dict[int, Tensor]()
        for place in range(first // self.each, -(-(first + count) // self.each)):
            begins = place * self.each
            low, high = max(first, begins), min(first + count, begins + self.each)
            piece = found[low - first : high - first]
            if place == self.parts.index:
                piece.copy_(self.own[low - begins : high - begins])
            else:
                questions[place] = torch.tensor([_SPAN, self.number, low - begins, high - low])
                into[place] = piece
        self.parts.request(questions, into)
        return found.as_strided(view.shape, view.stride())

    def rows(self, view: Tensor, rows: Tensor) -> Tensor:
        chosen, places = rows.unique(return_inverse=True)
        first = int(view.storage_offset())
        whole = view.is_contiguous() and self.unit > 1 and first % self.unit == 0
        if not whole or view[0].numel() != self.unit or len(chosen) > FEW_ROWS * len(view):
            return self.read(view)[rows]
        wanted, a_rank = chosen + first // self.unit, self.each // self.unit
        found = torch.empty(len(chosen), self.unit, dtype=view.dtype, device="cpu")
        questions, into = dict[int, Tensor](), dict[int, Tensor]()
        for place in (wanted // a_rank).unique().tolist():
            mine = wanted // a_rank == place  # one after another, as the rows are sorted
            begins, count = int(mine.int().argmax()), int(mine.sum())
            there, piece = wanted[mine] - place * a_rank, found[begins : begins + count]
            if place == self.parts.index:
                piece.copy_(self.own.view(-1, self.unit)[there])
            else:
                questions[place] = torch.cat([torch.tensor([_ROWS, self.number]), there])
                into[place] = piece
        self.parts.request(questions, into)
        return found.reshape(len(chosen), *view.shape[1:])[places]

    def answer(self, question: Tensor) -> Tensor:
        """What another rank asks for of this one's part."""
        if question[0] == _ROWS:
            return self.own.view(-1, self.unit)[question[2:]]
        first, count = question[2:].tolist()
        return self.own[first : first + count]


def _flat(data: Tensor, first: int, count: int) -> Tensor:
    """So many numbers of a dense tensor, in the order of its memory, which they do not keep; of a file these
    alone are read.
    """
    view = data.view_of_source if isinstance(data, Stored) else data
    part = view.as_strided((count,), (1,), view.storage_offset() + first)
    found = data.source.read(part) if isinstance(data, Stored) else part
    return found.clone() if found.untyped_storage().nbytes() > found.nbytes else found


class WeightParts:
    """The parts of a model's weights that this rank keeps, and requests for those of other ranks.

    Args:
        ranks: the group, with this one: each weight is cut into as many parts.

    Attributes:
        index: of this rank in the group, from 0.
        received: bytes that other ranks have sent.
    """

    def __init__(self, processes: Processes, ranks: range) -> None:
        self.processes, self.ranks, self.index = processes, ranks, ranks.index(processes.rank)
        self.received = 0
        self._weights: list[InParts] = []
        self._requests: Requests | None = None

    @property
    def kept(self) -> int:
        """Bytes of the parts that this rank keeps."""
        return sum(each.own.nbytes for each in self._weights)

    def keep(self, data: Tensor, kind: torch.dtype) -> InParts:
        """This rank's part of a weight, in a type. All ranks call it for the same weights in one order."""
        self._weights.append(InParts(self, len(self._weights), data, kind))
        return self._weights[-1]

    def serve(self, content: str) -> None:
        """Give the other ranks what they ask for, from now on until the run ends; together with all ranks.

        content: a hash of the model's weights. Raises DistributedError where ranks have others.
        """
        layouts = [each.layout for each in self._weights]
        facts = [[list(each.shape), list(each.stride()), str(each.dtype)] for each in layouts]
        digest = hashlib.sha256(json.dumps([content, facts]).encode()).digest()
        own = {"digest": torch.frombuffer(bytearray(digest), dtype=torch.uint8)}
        every = self.processes.gathered("parts of the weights", own)
        for rank, other in enumerate(every):
            if not torch.equal(other["digest"], every[0]["digest"]):
                raise DistributedError(
                    f"rank {rank} has another model, or other weights, than rank 0",
                    expected="the same on all ranks, as each keeps a part of each weight",
                    cause="a checkpoint that differs between machines, or a factory that draws weights at"
                    " random",
                    next_step="name one checkpoint that all machines see, or set engine.parameters: resident",
                )
        self._requests = self.processes.requests(self.ranks, self._answer)

    def request(self, questions: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        """Fill these tensors with what the ranks at these places of the group answer."""
        if not questions:
            return
        assert self._requests is not None, "an operator reads a weight before all ranks have their parts"
        asked = {self.ranks[place]: question for place, question in questions.items()}
        found = {self.ranks[place]: _bytes(tensor) for place, tensor in into.items()}
        self._requests.request(asked, found)
        self.received += sum(each.nbytes for each in found.values())

    def _answer(self, question: Tensor) -> Tensor:
        return _bytes(self._weights[int(question[1])].answer(question))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def shard(
    model: nn.Module, dtype: torch.dtype, frozen: str, parts: WeightParts, *, trained_too: bool = True
) -> nn.Module:
    """The model itself; of each large parameter this process keeps its part alone. It is to be placed then.

    dtype, frozen, trained_too: as for `place`.
    """
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(parameter_store(module).items()):
            if parameter is None or not (trained_too or not parameter.requires_grad):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _sharded(parameter, narrowed_to(parameter, dtype, frozen), parts)
            if made[id(parameter)] is not parameter:
                setattr(module, name, made[id(parameter)])
    return model


def _sharded(parameter: nn.Parameter, narrow: Any, parts: WeightParts) -> nn.Parameter:
    data = parameter.detach()
    if not is_plain(parameter) or data.nbytes < WHOLE_BELOW:
        return parameter
    layout = data.view_of_source if isinstance(data, Stored) else data  # of which nothing is read
    if torch.empty_like(layout, device="meta").stride() != data.stride():  # with gaps, or expanded
        return parameter
    saved = data.stored_dtype if isinstance(data, Stored) else data.dtype
    kept = parts.keep(data, saved if narrow is None else narrow)
    return nn.Parameter(Stored(kept, data.dtype), requires_grad=parameter.requires_grad)
