"""What all random projections have in common: their description, their columns, and sums that don't lose digits."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch

from psgrad.engine.gradients.placed import DeferredGradient
from psgrad.engine.gradients.projections.entries import VERSION
from psgrad.engine.gradients.terms import BLOCK_BYTES, accumulating_dtype
from psgrad.errors import TransformArgumentError

Per = Literal["total", "parameter"]
# Products that are summed in their own precision before the sum goes into float64.
_TOGETHER = 32


class Projection(ABC):
    """A random linear map P of gradients to few numbers, with E[<Px, Py>] = <x, y> over the seeds. Its kinds are frozen dataclasses.

    The map is a function of its description and of the parameters' names and shapes alone: the same for every sample, chunk, device and
    machine, so that gradients projected in different runs may be compared.

    With per='total' all parameters are projected into the same k columns, each by a map of its own, and the results are summed:
    [n, k], of which inner products estimate those of whole gradients. With per='parameter' each parameter has k columns of its own,
    side by side in the order of the names (`columns`): inner products within a block estimate the parameter's own, and over the whole
    row their sum, with less noise than 'total' has in as many columns a parameter, as nothing of different parameters meets.
    """

    kind: ClassVar[str]
    seed: int
    per: Per
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of columns: in all, or with per='parameter' of each parameter."""

    @abstractmethod
    def add(self, sums: Sums, name: str, gradient: DeferredGradient) -> None:
        """Add a parameter's projected gradients, but for `scale`, to sums of `width` columns."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """What the sums are multiplied by in the end."""

    @torch.no_grad()
    def apply(self, gradients: Mapping[str, DeferredGradient], samples: int, device: torch.device) -> torch.Tensor:
        """[n, width], or [n, parameters * width]: what `PerSampleGradients.project` gives."""
        types = [accumulating_dtype(gradient.dtype) for gradient in gradients.values()]
        dtype = torch.float64 if torch.float64 in types else torch.float32
        sums = [Sums(samples, self.width, dtype, device) for _ in range(1 if self.per == "total" else len(gradients))]
        for place, (name, gradient) in enumerate(gradients.items()):
            if gradient.shape.numel():
                self.add(sums[place if len(sums) > 1 else 0], name, gradient)
        found = [(each.total() * self.scale).to(dtype) for each in sums]
        return torch.cat(found, 1) if found else torch.zeros(samples, 0, dtype=dtype, device=device)

    def columns(self, names: Iterable[str]) -> dict[str, slice]:
        """name -> its columns in the projection of gradients of these parameters; with per='total' all of them for every name."""
        start = 0 if self.per == "total" else self.width
        return {name: slice(place * start, place * start + self.width) for place, name in enumerate(names)}

    def describe(self) -> dict[str, Any]:
        """Plain values for a manifest, from which `projection_from` makes the same projection."""
        return {"kind": self.kind, **asdict(self), "version": VERSION}

    @property
    def fingerprint(self) -> str:
        """A hash of the description: projections of the same fingerprint may be compared."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()

    def _check(self, **sizes: int) -> None:
        """Refuse sizes that are no positive whole numbers, an unknown `per`, a seed that is no whole number."""
        title = type(self).__name__
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise TransformArgumentError(f"{title}: {name}={size!r}", expected="a whole number, at least 1")
        if self.per not in ("total", "parameter"):
            raise TransformArgumentError(f"{title}: per={self.per!r}", expected="'total' or 'parameter'")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TransformArgumentError(
                f"{title}: seed={self.seed!r}", expected="a whole number", cause="a float would seed by its rounding"
            )


class Sums:
    """[n, k]: sums over many slices. float32 products are added up a few at a time, and these sums in float64: a single float32 sum
    over ten thousands of slices would lose digits."""

    def __init__(self, samples: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device, self.columns = dtype, device, columns
        self._part = torch.zeros(samples, columns, dtype=dtype, device=device)
        self._total = torch.zeros(samples, columns, dtype=torch.float64, device=device) if dtype != torch.float64 else None
        self._added = 0

    def part(self) -> torch.Tensor:
        """[n, k] to add one slice's contribution to, in place."""
        self._added += 1
        if self._added > _TOGETHER and self._total is not None:
            self._total += self._part
            self._part.zero_()
            self._added = 1
        return self._part

    def add(self, samples: slice | torch.Tensor, contribution: torch.Tensor) -> None:
        """Add [m, k] to the rows of these samples."""
        if isinstance(samples, torch.Tensor):
            self.part().index_add_(0, samples, contribution)
        else:
            self.part()[samples] += contribution

    def add_product(self, samples: slice | torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left [m, q] @ right [q, k] to the rows of these samples."""
        if isinstance(samples, torch.Tensor):
            self.add(samples, left @ right)
        else:
            self.part()[samples].addmm_(left, right)

    def total(self) -> torch.Tensor:
        return self._part if self._total is None else self._total + self._part


def room_of(device: torch.device, dtype: torch.dtype) -> int:
    """How many elements an intermediate may have."""
    return BLOCK_BYTES.get(device.type, BLOCK_BYTES["cuda"]) // dtype.itemsize
