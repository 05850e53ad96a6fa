"""How many bytes each measure reduces between processes: counted as they are sent, against closed forms."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.distributed_c10d import PrefixStore

from psgrad.commands.analyze import analyze
from psgrad.config import load_config
from psgrad.engine.execution import rank_tensors
from psgrad.engine.execution.process_group import RankGroup
from tests.commands.test_all_by_processes import of_a_model, with_checkpoints, with_tokens
from tests.forked_ranks import run_in_group
from tests.workplace import CLASSES, FEATURES, ROWS, Workplace

CHUNK = 4
SENDS = ("send", "isend")
LAYERS = [(FEATURES + 1) * 5, (5 + 1) * 3]  # parameters of the model
TENSORS, PARAMETERS = 4, sum(LAYERS)
OF_THE_MEAN = {"cosine_to_mean", "covariance_spectrum", "loo_mean_change", "noise_scale", "signal_to_noise"}
NAMES = 100  # bytes, at most, for the name of a parameter tensor and how its norms are computed
FRAME = 1_000  # bytes, at most, for the names and shapes of what is sent, and for its length


def sums(groups: int) -> int:
    """Bytes of gradients' sums in float64 for so many groups of rows, of how many rows they are, and of one
    number a parameter tensor.
    """
    return 8 * (groups * PARAMETERS + groups + TENSORS)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "prepare",
    [of_a_model, *(pytest.param(each, marks=pytest.mark.sweep) for each in (with_checkpoints, with_tokens))],
)
def test_bytes_that_each_measure_reduces(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Workplace], None]
) -> None:
    """Sums of gradients are as large as the model, whatever the number of rows. All else is small."""
    prepare(workplace)
    found = bytes_sent(workplace, monkeypatch)
    for name, sent in found.items():
        wire = sent.pop("wire")
        assert sum(sent.values()) < wire < sum(sent.values()) + FRAME, name
        tensors = 3 if prepare is with_tokens else TENSORS
        assert sent.pop("norms.numbers") == 48 * tensors, name
        assert 16 * tensors <= sent.pop("norms.bins") <= 16 * ROWS * tensors, name
        assert sent.pop("norms.words") <= NAMES * tensors, name
        assert sent.pop("stream") <= 32, name
        runs_of_chunks, bins = sent.pop("chunks", 0), sent.pop("bins", 0)
        assert runs_of_chunks <= 24 * ROWS / CHUNK, name
        assert bins <= (16 * ROWS * TENSORS if name == "relative_norm" else 0), name
        expected = {
            **dict.fromkeys(OF_THE_MEAN, sums(1)),
            "cosine_to_class_mean": sums(1 + CLASSES),
            "relative_norm": 48 * TENSORS,
        }
        assert sum(sent.values()) == expected.get(name, 0), (name, sent)


def bytes_sent(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """Measure -> what rank 1 of 2 sends in a run of it alone: `wire`, all bytes; `stream`, those of the chunk
    size; `norms.*`, those that each run sends for its table of parameters; and those of the measure's state
    by their last name.
    """
    files = {}
    for measure in place.config["analyze"].pop("measures"):
        name = measure if isinstance(measure, str) else measure["name"]
        place.config["engine"] = {"chunk_size": CHUNK, "verify": 0}
        place.config["output"] = f"of_{name}"
        place.config["analyze"] |= {"measures": [measure]}
        files[name] = place.folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump(place.config))
    sent = {name: Counter[str]() for name in files}

    def work(group: RankGroup) -> None:
        send_state, own_send = rank_tensors.send, {each: getattr(dist, each) for each in SENDS}
        for name, file in files.items():

            def count_state(arrays: Mapping[str, torch.Tensor], to: Sequence[int], of: str = name) -> None:
                for key, value in arrays.items():
                    measure, _, last = key.rpartition(".")
                    if measure == "stream":
                        last = measure
                    elif key.startswith("0."):  # the first measure is of each run
                        last = f"norms.{last}"
                    sent[of][last] += value.nbytes
                send_state(arrays, to)  # type: ignore[arg-type]

            def count_tensor(each: str, value: torch.Tensor, to: int, of: str = name) -> object:
                sent[of]["wire"] += value.nbytes
                return own_send[each](value, to)

            monkeypatch.setattr(rank_tensors, "send", count_state)
            for each in SENDS:
                monkeypatch.setattr(dist, each, partial(count_tensor, each))
            # A run needs keys of its own.
            own = RankGroup(PrefixStore(name, group._store._store), group.rank, group.size)
            analyze(load_config(file), report=False, processes=own)
            own.answer_to_the_end()
            own.heartbeats.stopped.set()
        Path(f"sent-{group.rank}").write_text(json.dumps(sent))

    ended = run_in_group(place.folder, 2, work)
    assert [rank.code for rank in ended] == [0, 0], ended
    found = json.loads((place.folder / "sent-1").read_text())
    return {name: Counter(each) for name, each in found.items()}
