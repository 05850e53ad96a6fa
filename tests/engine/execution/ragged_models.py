"""Models with rows of unequal length, and the gradients of each row alone, unpadded, by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.execution.objective import BY_POSITION, Criterion, Forward, Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.ragged import Block, RaggedAxes, joined

VOCABULARY = 23
Row = tuple[tuple[Tensor, ...], Tensor]
"""The inputs and the target of one row, without a sample axis, unpadded."""


@dataclass(frozen=True)
class Case:
    """A model that takes rows of any length.

    row: a length to a row.
    """

    model: nn.Module
    criterion: Criterion
    row: Callable[[int], Row]
    ragged: RaggedAxes
    forward: Forward = BY_POSITION

    @property
    def objective(self) -> Objective:
        return Objective(self.model, self.criterion, forward=self.forward)

    def rows(self, lengths: Sequence[int], seed: int = 0) -> list[Row]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return [self.row(length) for length in lengths]

    def block(self, rows: Sequence[Row]) -> Block:
        """These rows, padded."""
        return joined([self._alone(*row) for row in rows])

    def stream(self, rows: Sequence[Row], **options: Any) -> Stream:
        objective = self.objective
        return Stream(objective.loss, objective.params, self.block(rows), **options)

    def gradients(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """name -> [n, *shape], each row alone."""
        params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        found = []
        for inputs, target in rows:
            inputs = tuple(self._placed(x)[None] for x in inputs)
            loss = self.criterion(self.forward(self.model, *inputs)[0], self._placed(target))
            found.append(torch.autograd.grad(loss, list(params.values()), materialize_grads=True))
        return {
            name: torch.stack(column) for name, column in zip(params, zip(*found, strict=True), strict=True)
        }

    def losses(self, rows: Sequence[Row]) -> Tensor:
        """[n], each row alone."""
        with torch.no_grad():
            outputs = [
                (self.forward(self.model, *(self._placed(x)[None] for x in inputs))[0], self._placed(target))
                for inputs, target in rows
            ]
            return torch.stack([self.criterion(*each) for each in outputs])

    def _placed(self, x: Tensor) -> Tensor:
        return x.to(next(self.model.parameters()).dtype) if x.is_floating_point() else x

    def _alone(self, inputs: tuple[Tensor, ...], target: Tensor) -> Block:
        columns: dict[int, int] = {}
        for x, axes in zip((*inputs, target), self.ragged.axes, strict=True):
            columns |= {column: x.shape[axis] for axis, column in axes}
        lengths = torch.tensor([[columns[column] for column in sorted(columns)]])
        return Block(tuple(x[None] for x in inputs), target[None], lengths, self.ragged)


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """[n, p]"""
    return torch.cat([value.flatten(1) for value in gradients.values()], 1)


LINE, NONE = ((0, 0),), ()


def tokens(length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (length,))


def with_mask(length: int) -> tuple[Tensor, Tensor]:
    return tokens(length), torch.ones(length, dtype=torch.int64)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=-100, reduction="sum") / (target != -100).sum().clamp(
        1
    )


def hugging_face(kind: str, dtype: torch.dtype = torch.float64) -> Case:
    """bert and distil-bert-like classifiers, gpt2 and llama language models, t5."""
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 64, "pad_token_id": 0}
    own: dict[str, dict[str, Any]] = {
        "bert": sizes,
        "llama": {**sizes, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2},
        "gpt2": {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
        "t5": {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
    }
    config = transformers.AutoConfig.for_model(kind, **own[kind])
    auto = {"bert": "SequenceClassification", "t5": "Seq2SeqLM"}.get(kind, "CausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = getattr(transformers, f"AutoModelFor{auto}").from_config(config).eval().to(dtype)
    pick: Callable[[Any], Any] = lambda output: output.logits
    if kind == "bert":
        ragged = RaggedAxes((LINE, LINE, NONE), (0, 0, 0), masked=True)
        forward = Forward(("input_ids", "attention_mask"), pick)
        return Case(model, F.cross_entropy, lambda n: (with_mask(n), torch.tensor(n % 2)), ragged, forward)
    if kind == "t5":

        def pair(length: int) -> Row:
            target = tokens(1 + length // 2)
            return (*with_mask(length), torch.cat([torch.zeros(1, dtype=torch.int64), target[:-1]])), target

        other = ((0, 1),)
        ragged = RaggedAxes((LINE, LINE, other, other), (0, 0, 0, -100), masked=True)
        forward = Forward(("input_ids", "attention_mask", "decoder_input_ids"), pick)
        return Case(model, token_loss, pair, ragged, forward)
    ragged = RaggedAxes((LINE, LINE, LINE), (0, 0, -100), masked=True)
    forward = Forward(("input_ids", "attention_mask"), pick)
    return Case(model, token_loss, lambda n: (with_mask(n), tokens(n)), ragged, forward)


class Recurrent(nn.Module):
    """The last state of an LSTM over rows of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Packed(Recurrent):
    """The same over rows whose lengths are given, packed."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][0])


class Convolutional(nn.Module):
    """A convolution over rows of numbers and the mean of its output: zeros at the end change it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(3, 5, 3, padding=1), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x.transpose(1, 2))).mean(2))


class Mean(nn.Module):
    """The mean over the positions of a mask: with a table, a weight that is used twice, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6)
        self.norm, self.head, self.unused = nn.LayerNorm(6), nn.Linear(6, 2), nn.Linear(2, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(torch.tanh(self.hidden(self.table(ids)))))
        counted = mask.unsqueeze(-1).to(x.dtype)
        return self.head((self.norm(x) * counted).sum(1) / counted.sum(1))


def own(kind: str, dtype: torch.dtype = torch.float64) -> Case:
    """'mean' with a mask; 'lstm', 'packed' and 'conv' without."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = {"mean": Mean, "lstm": Recurrent, "packed": Packed, "conv": Convolutional}[kind]()
    model = model.eval().to(dtype)
    if kind == "mean":
        ragged = RaggedAxes((LINE, LINE, NONE), (0, 0, 0), masked=True)
        return Case(model, F.cross_entropy, lambda n: (with_mask(n), torch.tensor(n % 2)), ragged)
    inputs: Callable[[int], tuple[Tensor, ...]] = lambda n: (torch.randn(n, 3),)
    axes: tuple[Any, ...] = (LINE,)
    if kind == "packed":
        inputs, axes = lambda n: (torch.randn(n, 3), torch.tensor(n)), (LINE, NONE)
    ragged = RaggedAxes((*axes, NONE), (0.0,) * (len(axes) + 1), masked=False)
    return Case(model, F.cross_entropy, lambda n: (inputs(n), torch.tensor(n % 2)), ragged)


def case(kind: str, dtype: torch.dtype = torch.float64) -> Case:
    return (hugging_face if kind in ("bert", "gpt2", "llama", "t5") else own)(kind, dtype)
