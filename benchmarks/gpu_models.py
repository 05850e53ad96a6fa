"""What gpu.py measures of language models: private steps, ragged texts, and adapters on large bases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from dp_contenders import RIVALS, plain, psgrad
from dp_step import able, pose, timed
from models import Block, Llama, LlamaBlock
from norms import Case, draw_tokens, time_in_turn
from torch import Tensor, nn

from psgrad.engine.execution.buckets import ModelSize
from psgrad.engine.execution.chunk_replay import NOT_REPLAYED, PAYS_FROM, ChunkReplay
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import per_sample_square_norms
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.ragged import Block as Rows
from psgrad.ragged import RaggedAxes

Facts = dict[str, Any]
Way = Callable[[], Any]
# Tokens a second that bergson reaches for full gradients of 7 billion parameters, by its authors.
BERGSON = 13_000


def medians(timings: dict[str, Any]) -> Facts:
    return {name: asdict(timing) for name, timing in timings.items()}


def peak(device: torch.device, way: Way) -> int | None:
    """Bytes on the GPU at most while `way` runs; None on another device."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    way()
    return torch.cuda.max_memory_allocated(device)


# -- private steps -------------------------------------------------------------------------------------------


def private_steps(cases: dict[str, Case], device: torch.device, rounds: int) -> Facts:
    """Whole private steps beside steps without privacy, and Opacus's."""
    found: Facts = {}
    for name, case in cases.items():
        training, data = pose(case, device)
        rivals, reasons, errors = able(training, data)
        builds = {"plain": plain, "psgrad": psgrad, **{each: RIVALS[each] for each in rivals}}
        ways = {each: timed(build(training), data) for each, build in builds.items()}
        found[name] = {
            "seconds": medians(time_in_turn(ways, rounds, device)),
            "relative errors": errors,
            "rivals that are not timed": reasons,
        }
    return found


# -- ragged texts --------------------------------------------------------------------------------------------


class MaskedBlock(Block):
    """A block that attends to the positions that a mask [n, t] names."""

    mask: Tensor

    def attend(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        query, key, value = (
            part.view(n, t, self.heads, -1).transpose(1, 2)
            for part in self.query_key_value(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask[:, None, None, :])
        return self.attention_out(mixed.transpose(1, 2).reshape(n, t, width))  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """Masked blocks behind an embedding, and a head at the first position: BERT's shape."""

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(MaskedBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            block.mask = mask.bool()
            x = block(x)
            del block.mask
        found: Tensor = self.head(x[:, 0])
        return found


def ragged_texts(device: torch.device, small: bool) -> Facts:
    """Norms of texts of 8 to 512 tokens: programs of few lengths, chunks by themselves, a plain pass of each
    chunk padded to its longest text, and torch.func's norms of these.
    """
    words, width, layers, heads = (100, 32, 2, 2) if small else (30_522, 768, 12, 12)
    rows, each, shortest, longest = (40, 4, 2, 15) if small else (768, 32, 8, 512)
    torch.manual_seed(0)
    model = Classifier(words, width, layers, heads).to(device)
    lengths = torch.linspace(shortest, longest - 1, rows).long()[torch.randperm(rows)]
    mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()
    target = torch.randint(4, (rows,))
    axes = RaggedAxes((((0, 0),), ((0, 0),), ()), (0, 0, 0), masked=True, limit=longest)
    block = Rows((torch.randint(1, words, mask.shape) * mask, mask), target, lengths.unsqueeze(1), axes)
    objective, counts = Objective(model, F.cross_entropy), dict[str, Any]()
    params = {name: value.detach() for name, value in model.named_parameters()}

    def stream(capture: str) -> Way:
        options: Facts = {"chunk_size": each, "capture": capture, "model_size": ModelSize.of(model)}
        made = Stream(objective.loss, objective.params, block, **options)

        def way() -> Tensor:
            found = [columns.values["grad_norm"] for columns in made.run(rows, [GradientNorms()])]
            counts[capture] = made.counts.facts()
            return torch.cat(found)

        return way

    def padded(run: Callable[[tuple[Tensor, ...], Tensor], Any]) -> Way:
        def way() -> Any:
            found = []
            for start in range(0, rows, each):
                some = block.at(slice(start, start + each))
                assert some.target is not None
                found.append(run(tuple(x.to(device) for x in some.inputs), some.target.to(device)))
            return found

        return way

    def backward(inputs: tuple[Tensor, ...], target: Tensor) -> None:
        model.zero_grad()
        F.cross_entropy(model(*inputs), target).backward()

    def loss_of_one(params: Any, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        output = torch.func.functional_call(model, params, tuple(x[None] for x in inputs))
        return F.cross_entropy(output[0], target)

    def torch_func(inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        with torch.no_grad():
            each = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))
            found = each(params, inputs, target)
            return torch.stack([value.flatten(1).norm(dim=1) for value in found.values()]).norm(dim=0)

    ways = {"plain": padded(backward), "programs": stream("auto"), "chunks by themselves": stream("off")}
    expected = ways["chunks by themselves"]().float()
    torch.testing.assert_close(ways["programs"]().float(), expected, rtol=1e-2, atol=0)
    others = {"torch.func": padded(torch_func)}
    reasons = {name: why for name, way in others.items() if (why := why_not(way)) is not None}
    ways |= {name: way for name, way in others.items() if name not in reasons}
    timings = medians(time_in_turn(ways, 1 if small else 2, device))
    return {
        "seconds": timings,
        "tokens a second": {name: int(lengths.sum()) / each["median"] for name, each in timings.items()},
        "chunks": counts,
        "rivals that are not timed": reasons,
    }


def why_not(way: Way) -> str | None:
    """Why a way does not go; None where it does."""
    try:
        way()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:150]
    return None


# -- adapters on large bases ---------------------------------------------------------------------------------

LLAMAS: dict[str, dict[str, int]] = {
    "1 billion": {
        "vocabulary": 128_256, "width": 2048, "layers": 16, "heads": 32, "keys": 8, "hidden": 8192
    },
    "8 billion": {
        "vocabulary": 128_256, "width": 4096, "layers": 32, "heads": 32, "keys": 8, "hidden": 14_336
    },
}  # fmt: skip
SMALL = {"vocabulary": 100, "width": 64, "layers": 2, "heads": 4, "keys": 2, "hidden": 64}


class WithAdapter(nn.Module):
    """A linear layer that is frozen, and a product of rank 16 that is trained."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        options: Facts = {"bias": False, "device": device, "dtype": torch.float32}
        self.down = nn.Linear(inputs, 16, **options)
        self.up = nn.Linear(16, outputs, **options)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.up(self.down(x))
        return found


def llama(device: torch.device, sizes: dict[str, int]) -> Llama:
    """Llama's shape, random, in bfloat16; drawn on the device, where that is quick."""
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(**sizes)
        torch.set_default_dtype(torch.float32)
    return model


def with_adapters(device: torch.device, sizes: dict[str, int], bits: bool) -> Llama:
    """A frozen model with adapters at the queries and values; its blocks' layers in 4 bits, as bitsandbytes
    keeps them, or in bfloat16.
    """
    model = llama(device, sizes).requires_grad_(False)
    if bits:
        import bitsandbytes

        for block in model.blocks:
            for name, layer in list(block.named_modules()):
                if isinstance(layer, nn.Linear):
                    made = bitsandbytes.nn.Linear4bit(
                        layer.in_features, layer.out_features, bias=False, quant_type="nf4"
                    )
                    weight = layer.weight.data
                    made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
                    block.set_submodule(name, made.to(device))
    for block in model.blocks:
        assert isinstance(block, LlamaBlock)
        width = sizes["width"]
        block.query = WithAdapter(block.query, width, width, device)  # type: ignore[assignment]
        outputs = width // sizes["heads"] * sizes["keys"]
        block.value = WithAdapter(block.value, width, outputs, device)  # type: ignore[assignment]
    return model


def _half(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16)


def adapters(device: torch.device, small: bool) -> Facts:
    """Norms of adapters of rank 16 at the queries and values of frozen models, computed in bfloat16 as
    `engine.dtype: auto` does; tokens a second.
    """
    sizes = {"small": SMALL} if small else LLAMAS
    found: Facts = {"tokens a second of bergson, full gradients of 7 billion parameters": BERGSON}
    for name, each in sizes.items():
        for kind in ("bfloat16", "4 bits"):
            if kind == "4 bits" and find_spec("bitsandbytes") is None:
                found[f"{name}, {kind}"] = "bitsandbytes is not installed"
            else:
                found[f"{name}, {kind}"] = _of_adapters(device, each, kind == "4 bits", small)
    return found


def _of_adapters(device: torch.device, sizes: dict[str, int], bits: bool, small: bool) -> Facts:
    n, t = (2, 8) if small else (8, 512)
    model = with_adapters(device, sizes, bits)
    inputs, target = (value.to(device) for value in draw_tokens(n, t, sizes["vocabulary"]))
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}

    def plain_step() -> None:
        model.zero_grad()
        with _half(device):
            F.cross_entropy(model(inputs).flatten(0, 1), target.flatten()).backward()

    def loss_of_one(params: Any, inputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (inputs[None],))[0], target)

    def torch_func() -> Tensor:
        params = {name: value.detach() for name, value in trained.items()}
        with torch.no_grad(), _half(device):
            each = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(params, inputs, target)
        return torch.stack([value.flatten(1).norm(dim=1) for value in each.values()]).norm(dim=0)

    ways: dict[str, Way] = {"plain": plain_step, "torch.func": torch_func}
    reasons = {name: why for name, way in ways.items() if (why := why_not(way)) is not None}
    before = {name: way for name, way in ways.items() if name not in reasons}
    rounds = 1 if small else 3
    timings = time_in_turn(before, rounds, device) if "plain" in before else {}
    # From here on the weights are psgrad's.
    norms, replayed, counts = _our_norms(model, device, bits, inputs, target)
    ours = time_in_turn({"plain": norms, "recorded": replayed}, rounds, device)
    timings |= {"norms": ours["plain"], "norms, recorded": ours["recorded"]}
    return {
        "seconds": {name: timing.median for name, timing in timings.items()},
        "tokens a second": {name: n * t / timing.median for name, timing in timings.items()},
        "chunks": counts(),
        "rivals that are not timed": reasons,
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained": sum(each.numel() for each in trained.values()),
        "peak bytes": peak(device, norms),
    }


def _our_norms(
    model: nn.Module, device: torch.device, bits: bool, inputs: Tensor, target: Tensor
) -> tuple[Way, Way, Callable[[], Facts]]:
    """Norms by a chunk itself, and by its program, which has the same ones; and how often it was replayed."""
    if bits:
        from psgrad.models.quantised import store_weights

        store_weights(model)
    place(model, device, torch.float32, "as-saved")
    objective = Objective(model, F.cross_entropy, autocast=torch.bfloat16)

    def norms(params: Any, inputs: Any, target: Any) -> Tensor:
        return per_sample_square_norms(objective.loss, params, inputs, target, has_aux=True).square_norms()

    def way() -> Tensor:
        return norms(objective.params, (inputs,), target)

    replay = ChunkReplay(norms, objective.params)

    def program() -> Any:
        return replay((inputs,), target, PAYS_FROM)

    for _ in range(NOT_REPLAYED):
        program()
    torch.testing.assert_close(program(), way(), rtol=1e-2, atol=0)
    return way, program, replay.counts.facts
