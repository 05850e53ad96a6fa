"""Sequences of unequal length: norms per second of psgrad, beside a loop of PyTorch's autograd over samples.

All ways run in turn in one process, in processor time. Recurrent layers get packed sequences, each of its own
length; BERT gets texts padded to one length, with the mask. `loop` gives each sample to the network alone,
without padding.

    python benchmarks/sequences.py
    python benchmarks/sequences.py --only lstm --samples 256 --rounds 5 --json FILE
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from norms import machine
from script import command_line, write_json
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from psgrad.engine.gradients import per_sample_square_norms
from psgrad.engine.transforms import functional_call

VOCABULARY, CLASSES = 1000, 5


class Recurrent(nn.Module):
    """Words to logits by the last state of packed sequences, or by the mean of all states, unpacked."""

    def __init__(self, layer: type[nn.RNNBase], unpack: bool = False, width: int = 64) -> None:
        super().__init__()
        self.unpack = unpack
        self.words = nn.Embedding(VOCABULARY, width)
        self.layer = layer(width, width, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states, end = self.layer(packed)
        if self.unpack:
            return self.head(pad_packed_sequence(states, batch_first=True)[0].mean(1))
        return self.head((end[0] if isinstance(end, tuple) else end)[-1])


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            num_labels=CLASSES,
        )
        self.model = BertForSequenceClassification(config)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(words.shape[1]) < lengths[:, None]).long()
        return self.model(input_ids=words, attention_mask=mask).logits


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "unpacked": lambda: Recurrent(nn.LSTM, unpack=True),
    "bert": Bert,
}
# How many lengths there are: all of 5 to 100, some, one.
LENGTHS = {"each": range(5, 101), "eight": range(9, 101, 13), "one": range(52, 53)}


def loop(network: nn.Module, words: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
    found = []
    for row, length, label in zip(words, lengths, target, strict=True):
        output = network(row[None, : int(length)], length[None])
        gradients = torch.autograd.grad(F.cross_entropy(output, label[None]), list(network.parameters()))
        found.append(torch.stack([g.square().sum() for g in gradients]).sum())
    return torch.stack(found)


def psgrad(network: nn.Module, words: Tensor, lengths: Tensor, target: Tensor, chunk: int) -> Tensor:
    params = {name: value.detach() for name, value in network.named_parameters()}

    def loss(params: dict[str, Tensor], row: Tensor, length: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, params, (row[None], length[None])), label[None])

    order = lengths.argsort(stable=True)  # rows of like length make a chunk
    found = torch.empty(len(words), dtype=torch.float64)
    for rows in order.split(chunk):
        width = int(lengths[rows].max())
        batch = words[rows, :width], lengths[rows], target[rows]
        found[rows] = per_sample_square_norms(loss, params, *batch).square_norms()
    return found


def main() -> None:
    parser = command_line((__doc__ or "").partition("\n")[0], only=NETWORKS, rounds=5)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored: dict[str, dict[str, dict[str, float]]] = {name: {} for name in options.only}
    print(f"{options.samples} samples; rows per second of processor time, medians")
    print(f"{'network':8} {'lengths':8} {'loop':>8} {'psgrad':>8} {'largest error':>14}")
    for name in options.only:
        for kind, lengths_of in LENGTHS.items():
            torch.manual_seed(0)
            network = NETWORKS[name]().eval()
            lengths = torch.tensor(lengths_of)[torch.randint(len(lengths_of), (options.samples,))]
            words = torch.randint(1, VOCABULARY, (options.samples, int(lengths.max())))
            target = torch.randint(CLASSES, (options.samples,))
            ways = {
                "loop": lambda: loop(network, words, lengths, target),  # noqa: B023
                "psgrad": lambda: psgrad(network, words, lengths, target, options.chunk),  # noqa: B023
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            found: dict[str, Tensor] = {}
            for _ in range(options.rounds + 1):
                for way, run in ways.items():
                    start = time.process_time()
                    found[way] = run()
                    times[way].append(time.process_time() - start)
            rates = [options.samples / statistics.median(times[way][1:]) for way in ways]
            error = (found["psgrad"].sqrt() / found["loop"].double().sqrt() - 1).abs().max().item()
            print(f"{name:8} {kind:8} {rates[0]:8.0f} {rates[1]:8.0f} {error:14.1e}", flush=True)
            stored[name][kind] = {"loop": rates[0], "psgrad": rates[1], "largest_error": error}
    content = {
        "machine": machine(torch.device("cpu")),
        "samples": options.samples,
        "chunk": options.chunk,
        "rounds": options.rounds,
        "rows_per_second": stored,
    }
    write_json(options, content)


if __name__ == "__main__":
    main()
