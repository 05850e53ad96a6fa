"""Rows of unequal length beside rows of one length, and beside the library's own forward and backward pass.

    python benchmarks/ragged.py [--rows 256] [--rounds 5] [--padded] [--json FILE]
    python benchmarks/ragged.py --models bert gpt2 [--layers 12] [--model-rows 4] [--rounds 5]

The first comparison: gradient norms of ragged texts of 8 to 512 tokens, through psgrad's stream as
`psgrad analyze` uses it, and of as many texts that all have the mean length. Both have the same number of
tokens; the sum of squared lengths, which attention takes, differs, and is printed. With --padded also the
ragged texts in chunks padded to their longest row, without buckets.

The second: norms of transformers' BERT and GPT-2 of their published widths, random weights, beside the plain
forward and backward pass of the same batch. Needs the extra `hugging-face`.

The ways take turns in one process, round after round. Numbers are processor time of this process, as other
programs may run beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from norms import Timing, machine, time_in_turn
from script import command_line, print_facts, write_json
from torch import Tensor, nn

from psgrad.engine.execution.buckets import ModelSize
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Forward, Objective
from psgrad.engine.gradients import per_sample_square_norms
from psgrad.ragged import Block, RaggedAxes

VOCABULARY, SHORTEST, LONGEST = 8192, 8, 512
BARS = {"ragged": 1.15, "norms": 1.1}
AXES = RaggedAxes((((0, 0),), ((0, 0),), ()), (0, 0, 0), masked=True)


def bert(width: int, layers: int, labels: int = 4) -> nn.Module:
    """A classifier in eval mode."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        num_labels=labels,
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model.eval()


def gpt2(width: int, layers: int) -> nn.Module:
    """A language model in eval mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=width // 64, n_positions=LONGEST, **ends
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model.eval()


FORWARD = Forward(("input_ids", "attention_mask"), lambda output: output.logits)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def texts(lengths: Tensor) -> Block:
    """Random texts of these lengths [n], padded."""
    mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()
    ids = torch.randint(1, VOCABULARY, mask.shape) * mask
    return Block((ids, mask), torch.randint(4, (len(ids),)), lengths.unsqueeze(1), AXES)


def norms_of(objective: Objective, block: Block, chunk_size: int | str = "auto") -> Callable[[], Tensor]:
    """All rows' norms [n], chunk by chunk."""
    options = {"model_size": ModelSize.of(objective.model), "chunk_size": chunk_size}

    def run() -> Tensor:
        examples = Examples(objective, block, options)
        return torch.cat([found["square_norm"] for _, found in examples.norms()])

    return run


def lengths_of(rows: int) -> tuple[Tensor, Tensor]:
    """(lengths spread evenly from SHORTEST to LONGEST in random order, as many of their mean)."""
    spread = torch.linspace(SHORTEST, LONGEST, rows).long()[torch.randperm(rows)]
    return spread, torch.full((rows,), round(float(spread.double().mean())))


def ragged_contest(rows: int, width: int, layers: int, with_padded: bool) -> dict[str, Callable[[], Any]]:
    """The ways through the same model, after a check that buckets change no number."""
    torch.manual_seed(0)
    objective = Objective(bert(width, layers), F.cross_entropy, forward=FORWARD)
    spread, equal = lengths_of(rows)
    print(f"  tokens {int(spread.sum()):,} ragged, {int(equal.sum()):,} equal;", end=" ")
    print(f"sums of squared lengths {float(spread.square().sum() / equal.square().sum()):.2f} : 1")
    block = texts(spread)
    few = block.at(slice(0, 8))
    alone = [norms_of(objective, few.at(slice(row, row + 1)))() for row in range(8)]
    torch.testing.assert_close(norms_of(objective, few)(), torch.cat(alone), rtol=1e-4, atol=0)
    ways = {
        "plain": norms_of(objective, replace(texts(equal), lengths=None, ragged=None)),
        "ragged": norms_of(objective, block),
    }
    if with_padded:
        ways["padded"] = norms_of(objective, replace(block, lengths=None, ragged=None))
    return ways


def model_contest(kind: str, layers: int, rows: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """Norms of a batch, and its plain forward and backward pass."""
    torch.manual_seed(0)
    model = {"bert": bert, "gpt2": gpt2}[kind](768, layers)
    ids = torch.randint(1, VOCABULARY, (rows, tokens))
    inputs = ids, torch.ones_like(ids)
    target = torch.randint(4, (rows,)) if kind == "bert" else torch.randint(VOCABULARY, (rows, tokens))
    loss = F.cross_entropy if kind == "bert" else token_loss
    objective = Objective(model, loss, forward=FORWARD)

    def plain() -> None:
        model.zero_grad()
        loss(FORWARD(model, *inputs), target).backward()

    def norms() -> Any:
        return per_sample_square_norms(objective.loss, objective.params, inputs, target, has_aux=True)

    return {"plain": plain, "norms": norms}


def print_table(timings: dict[str, Timing]) -> None:
    print(f"  {'':<10}{'median':>10}{'quartiles':>22}{'ratio':>8}   bar")
    for name, timing in timings.items():
        quartiles = f"{timing.lower_quartile:.2f} .. {timing.upper_quartile:.2f}"
        verdict = ""
        if name in BARS:
            verdict = f"at most {BARS[name]:.2f}: {'pass' if timing.ratio <= BARS[name] else 'FAIL'}"
        print(f"  {name:<10}{timing.median:>8.2f} s{quartiles:>22}{timing.ratio:>8.2f}   {verdict}".rstrip())


def parse_arguments() -> argparse.Namespace:
    parser = command_line("Time rows of unequal length, and large language models.", rounds=5)
    parser.add_argument("--rows", type=int, default=256, help="texts (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the ragged model (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="its layers (default: %(default)s)")
    parser.add_argument("--padded", action="store_true", help="time the texts without buckets, too")
    parser.add_argument("--models", nargs="*", choices=("bert", "gpt2"), default=["bert", "gpt2"])
    parser.add_argument("--layers", type=int, default=12, help="of those models (default: %(default)s)")
    parser.add_argument("--model-rows", type=int, default=4, help="their batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="a row of it (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    facts = machine(device)
    print_facts(facts, arguments)
    found: dict[str, dict[str, Timing]] = {}
    if arguments.rows:
        title = f"{arguments.rows} texts, BERT {arguments.depth} x {arguments.width}"
        print(title)
        ways = ragged_contest(arguments.rows, arguments.width, arguments.depth, arguments.padded)
        found[title] = time_in_turn(ways, arguments.rounds, device, time.process_time)
        print_table(found[title])
    for kind in arguments.models:
        title = f"{kind} {arguments.layers} x 768, {arguments.model_rows} x {arguments.tokens} tokens"
        print(title)
        ways = model_contest(kind, arguments.layers, arguments.model_rows, arguments.tokens)
        found[title] = time_in_turn(ways, arguments.rounds, device, time.process_time)
        print_table(found[title])
    seconds = {title: {name: asdict(t) for name, t in each.items()} for title, each in found.items()}
    content = {"machine": facts, "rounds": arguments.rounds, "seconds": seconds}
    write_json(arguments, content)


if __name__ == "__main__":
    main()
