"""Whether tensors are the same, bit for bit, by sums of their bits: of any size, on any device, however they
were written into.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROW = 1 << 12  # words in a row
_WORD = 8  # bytes that are read as one whole number: four times as fast as single float32 numbers


@dataclass(frozen=True, eq=False)
class BitSums:
    """The sums of a tensor's bits, as words of 8 bytes, along the rows and down the columns of a table.

    A write of other numbers, or of the same in another order, changes some of these sums, except by chance.

    Attributes:
        kind: type and shape of the tensor.
        rows, columns, rest: int64, int64, and the bytes behind the last whole row.
    """

    kind: tuple[torch.dtype, torch.Size]
    rows: Tensor
    columns: Tensor
    rest: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> BitSums:
        """Those of a dense tensor of any type and device."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
        size = plain.element_size()
        whole = len(plain) - len(plain) % (_ROW * _WORD // size)
        words = plain[:whole]
        if words.storage_offset() * size % _WORD:
            words = words.clone()
        table = words.view(torch.int64).view(-1, _ROW)
        return cls(
            (tensor.dtype, tensor.shape), table.sum(1), table.sum(0), plain[whole:].view(torch.uint8).clone()
        )

    def same(self, other: BitSums) -> bool:
        """Whether the other ones are of the same bits."""
        return self.kind == other.kind and all(
            torch.equal(mine, theirs)
            for mine, theirs in (
                (self.rows, other.rows),
                (self.columns, other.columns),
                (self.rest, other.rest),
            )
        )


def has_bits(tensor: Tensor) -> bool:
    """Whether a tensor is a dense one with memory."""
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
