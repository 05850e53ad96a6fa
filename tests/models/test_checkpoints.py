"""Checkpoints: what is read, what is refused without being executed, and what fits a model."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from psgrad.errors import EXIT_RUNTIME, EXIT_USAGE, CheckpointError, ConfigError, PsgradError
from psgrad.models.checkpoint_files import checkpoint_files, read_checkpoint, require_checkpoint
from psgrad.models.checkpoints import load_into

TENSORS = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "steps": torch.tensor(7),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(path).tensors


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(
        got[name].dtype == expected[name].dtype and torch.equal(got[name], expected[name])
        for name in expected
    )


def torch_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_index(folder: Path, weight_map: dict[str, Any]) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


# -- Reading -------------------------------------------------------------------------------------------------


def test_safetensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert same(read_state_dict(tmp_path / "model.safetensors"), TENSORS)
    assert checkpoint_files(tmp_path / "model.safetensors") == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".PT"])
def test_torch(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    torch.save(TENSORS, path)
    assert same(read_state_dict(path), TENSORS)


def test_sharded(tmp_path: Path) -> None:
    save_file({"weight": TENSORS["weight"], "not_listed": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "more").mkdir()
    save_file({"steps": TENSORS["steps"]}, tmp_path / "more" / "b.safetensors")
    index = write_index(tmp_path, {"weight": "a.safetensors", "steps": "more/b.safetensors"})

    assert same(read_state_dict(index), {"weight": TENSORS["weight"], "steps": TENSORS["steps"]})
    assert checkpoint_files(index) == [index, tmp_path / "a.safetensors", tmp_path / "more" / "b.safetensors"]


def test_sharded_through_links_as_in_a_download_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"steps": TENSORS["steps"]}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "a.safetensors").symlink_to("../blobs/0123")

    assert same(
        read_state_dict(write_index(tmp_path / "snapshot", {"steps": "a.safetensors"})),
        {"steps": TENSORS["steps"]},
    )


def test_sharded_with_a_shard_or_a_tensor_missing(tmp_path: Path) -> None:
    index = write_index(tmp_path, {"weight": "a.safetensors"})
    with pytest.raises(ConfigError, match=r"there is no shard .*a\.safetensors"):
        read_state_dict(index)
    save_file({"steps": TENSORS["steps"]}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="weight"):
        read_state_dict(index)


# -- Not executed, not followed ------------------------------------------------------------------------------


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.canary),))


def repacked(archive: bytes, pickled: bytes) -> bytes:
    """A torch.save archive with another pickle in the place of its own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(buffer, "w") as new:
        for record in old.infolist():
            new.writestr(
                record.filename, pickled if record.filename.endswith("data.pkl") else old.read(record)
            )
    return buffer.getvalue()


def hostile_files(canary: Path) -> dict[str, bytes]:
    payload = Payload(canary)
    whole = torch_bytes({"weight": torch.ones(2), "extra": payload})
    legacy = io.BytesIO()
    torch.save({"weight": payload}, legacy, _use_new_zipfile_serialization=False)
    return {
        "saved_by_torch.pt": whole,
        "hidden_in_an_archive.pth": repacked(torch_bytes(TENSORS), pickle.dumps({"state_dict": payload})),
        "bare_pickle.pt": pickle.dumps(payload),
        "bare_pickle_protocol_0.pt": pickle.dumps(payload, protocol=0),
        "legacy.ckpt": legacy.getvalue(),
        "renamed_archive.safetensors": whole,
        "renamed_pickle.safetensors": pickle.dumps(payload),
    }


@pytest.mark.parametrize("name", sorted(hostile_files(Path())))
def test_a_pickle_payload_is_never_executed(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / name
    path.write_bytes(hostile_files(canary)[name])

    with pytest.raises(PsgradError) as caught:
        read_state_dict(path)
    assert "Traceback" not in str(caught.value)
    assert not canary.exists()


def test_the_payload_would_have_been_executed_by_pickle(tmp_path: Path) -> None:
    pickle.loads(hostile_files(tmp_path / "canary")["bare_pickle.pt"])
    assert (tmp_path / "canary").exists()


def test_a_payload_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(hostile_files(tmp_path / "canary")["saved_by_torch.pt"])
    with pytest.raises(CheckpointError) as caught:
        read_state_dict(path)

    message = str(caught.value)
    named = f"(it refers to {os.mkdir.__module__}.mkdir, which is code); nothing in it was executed"
    assert f"holds more than tensors and plain values {named}" in message
    assert "weights_only" not in message  # torch's advice is how to switch the safety off
    assert caught.value.exit_code == EXIT_RUNTIME


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000)
    (tmp_path / "bomb.pt").write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match="is compressed"):
        read_state_dict(tmp_path / "bomb.pt")


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "a/../../secret.safetensors",
        "a/../secret.safetensors",
        "/etc/secret.safetensors",
        "..\\secret.safetensors",
        "C:secret.safetensors",
        "C:/secret.safetensors",
        "\\\\host\\secret.safetensors",
        "a\0.safetensors",
        "secret.bin",
        "secret.safetensors/",
        "",
        None,
        3,
        ["a.safetensors"],
    ],
)
def test_an_index_reaches_nothing_outside_its_folder(
    tmp_path: Path, shard: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    save_file({"weight": torch.ones(1)}, tmp_path / "secret.safetensors")
    save_file({"good": torch.ones(1)}, tmp_path / "inside" / "good.safetensors")
    index = write_index(tmp_path / "inside", {"good": "good.safetensors", "weight": shard})
    opened: list[object] = []
    monkeypatch.setattr("safetensors.safe_open", lambda *args, **kwargs: opened.append(args))

    for read in (read_state_dict, checkpoint_files):
        with pytest.raises(CheckpointError, match=r"sends 'weight' to .*; no file was opened"):
            read(index)
    assert not opened


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000]
)
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"is empty|is not valid JSON|has no weight_map"):
        read_state_dict(path)


# -- Damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.safetensors.index.json"])
def test_missing_empty_and_pointer_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError, match="there is no checkpoint") as caught:
        read_state_dict(path)
    assert caught.value.exit_code == EXIT_USAGE
    path.touch()
    with pytest.raises(CheckpointError, match="is empty"):
        read_state_dict(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n")
    with pytest.raises(
        CheckpointError, match=r"is a git-lfs pointer, not the file itself[^$]*run `git lfs pull` in "
    ):
        read_state_dict(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        read_state_dict(path)


@pytest.mark.parametrize("name", ["model.pt2", "model.bin", "model.pkl", "model"])
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(torch_bytes(TENSORS))
    with pytest.raises(
        ConfigError, match=r"has a suffix that psgrad does not read; expected \.safetensors, "
    ):
        read_state_dict(tmp_path / name)


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)], {}, {1: torch.ones(2)}, {"a": 3}])
def test_a_torch_file_without_a_state_dict(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is no state dict"):
        read_state_dict(tmp_path / "model.pt")


def test_truncated(tmp_path: Path) -> None:
    for name, content in (("model.safetensors", save(TENSORS)), ("model.pt", torch_bytes(TENSORS))):
        path = tmp_path / name
        path.write_bytes(content[:-3])
        with pytest.raises(
            CheckpointError, match=rf"is damaged: [^$]*{len(content) - 3} bytes[^$]*interrupted copy"
        ):
            read_state_dict(path)


WHOLE = {".safetensors": save(TENSORS), ".pt": torch_bytes(TENSORS)}


@pytest.mark.parametrize("suffix", sorted(WHOLE))
@given(data=st.data())
def test_any_damage_is_read_or_reported(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    content = bytearray(WHOLE[suffix])
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    path.write_bytes(content[:end])
    try:
        state_dict = read_state_dict(path)
    except PsgradError:
        return
    assert all(isinstance(tensor, Tensor) for tensor in state_dict.values())


# -- What trainers write beside the weights ------------------------------------------------------------------


def test_weights_at_a_usual_key_are_taken(tmp_path: Path) -> None:
    """Beside hyperparameters in a Namespace, as Lightning writes them."""
    for key in ("state_dict", "model_state_dict"):
        content = {"epoch": 3, "hyper_parameters": {"args": argparse.Namespace(lr=0.1)}, key: TENSORS}
        torch.save(content, tmp_path / "run.ckpt")
        found = read_checkpoint(tmp_path / "run.ckpt")
        assert same(found.tensors, TENSORS)
        assert found.notes == (f"took the weights {key!r} of run.ckpt",)


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": TENSORS, "model_state_dict": TENSORS},
        {"epoch": 3, "ema": TENSORS, "optimizer": {"state": {}}},
    ],
    ids=["two candidates", "another key"],
)
def test_weights_are_not_guessed(content: dict[str, Any], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"is no state dict.*\n  hint: .*save the state dict alone"):
        read_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize("key", [None, "state_dict"])
def test_a_whole_module_is_code(key: str | None, tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 1) if key is None else {key: nn.Linear(2, 1)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear, which is code"):
        read_checkpoint(tmp_path / "model.pt")


def test_a_folder_of_sharded_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    with pytest.raises(ConfigError, match="of sharded training make one file first"):
        require_checkpoint(tmp_path)


# -- Loading -------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embedding.weight


def random_state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.rand_like(tensor) if tensor.is_floating_point() else torch.full_like(tensor, 5)
        for name, tensor in model.state_dict().items()
    }


def test_an_exact_match_is_copied_buffers_included() -> None:
    model = network()
    state_dict = random_state(model)

    assert load_into(model, state_dict, "model.pt") is None
    assert same(dict(model.state_dict()), state_dict)
    assert model.state_dict()["1.num_batches_tracked"].item() == 5


def test_a_wider_type_is_converted() -> None:
    model = nn.Linear(2, 1)
    load_into(
        model,
        {"weight": torch.ones(1, 2, dtype=torch.bfloat16), "bias": torch.ones(1, dtype=torch.float64)},
        "model.pt",
    )
    assert (model.weight.dtype, model.bias.dtype) == (torch.float32, torch.float32)
    assert torch.equal(model.weight, torch.ones(1, 2))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "model.model."])
def test_a_prefix_is_stripped_where_that_makes_the_match_exact(prefix: str) -> None:
    model = network()
    state_dict = random_state(model)

    note = load_into(model, {prefix + name: tensor for name, tensor in state_dict.items()}, "model.pt")

    assert note == f"stripped the prefix {prefix!r} from the {len(state_dict)} names of model.pt"
    assert same(dict(model.state_dict()), state_dict)


def test_a_prefix_is_stripped_where_tensors_of_others_lack_it() -> None:
    model, others = network(), {"criterion.weight": torch.ones(3), "val_acc.total": torch.ones(1)}
    state_dict = random_state(model)
    note = load_into(model, {f"model.{name}": each for name, each in state_dict.items()} | others, "run.ckpt")
    assert note is not None
    assert note.endswith("left out 2 others: criterion.weight, val_acc.total")
    assert same(dict(model.state_dict()), state_dict)
    with pytest.raises(CheckpointError, match="1 unexpected"):
        load_into(model, state_dict | {"criterion.weight": torch.ones(3)}, "run.ckpt")


def test_a_prefix_is_kept_where_the_model_has_it() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 1)})
    assert load_into(model, random_state(model), "model.pt") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("module.0.bias"),
        lambda state: state.update({"module.4.weight": torch.ones(1)}),
        lambda state: state.update({"0.weight": state.pop("module.0.weight")}),
        lambda state: state.update({"module.3.bias": torch.ones(4)}),
    ],
)
def test_a_prefix_is_not_stripped_otherwise_and_nothing_is_copied(change: Any) -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state_dict = {f"module.{name}": tensor for name, tensor in random_state(model).items()}
    change(state_dict)

    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_into(model, state_dict, "model.pt")
    assert same(dict(model.state_dict()), before)


def test_one_name_of_a_tied_tensor_is_enough() -> None:
    for name in ("embedding.weight", "head.weight"):
        model = Tied()
        assert load_into(model, {name: torch.full((5, 2), 3.0)}, "model.pt") is None
        assert model.head.weight is model.embedding.weight
        assert (model.head.weight == 3).all()


def test_tied_names_with_two_different_tensors() -> None:
    model = Tied()
    assert (
        load_into(model, {"embedding.weight": torch.ones(5, 2), "head.weight": torch.ones(5, 2)}, "model.pt")
        is None
    )
    with pytest.raises(
        CheckpointError,
        match=r"the model ties embedding\.weight and head\.weight, but .* two different tensors",
    ):
        load_into(model, {"embedding.weight": torch.ones(5, 2), "head.weight": torch.zeros(5, 2)}, "model.pt")
    assert (model.head.weight == 1).all()


def test_a_missing_name_that_is_not_tied_is_missing() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(torch.zeros(5, 2))
    with pytest.raises(CheckpointError, match="1 missing"):
        load_into(model, {"embedding.weight": torch.ones(5, 2)}, "model.pt")


def test_what_does_not_fit_is_listed_with_the_nearest_names() -> None:
    state_dict = {
        "0.weigth": torch.ones(2, 1, 3, 3),
        "0.bias": torch.ones(4),
        "1.running_mean": torch.ones(2),
        "1.running_var": torch.ones(2),
        "1.weight": torch.ones(2, dtype=torch.complex64),
        "1.bias": torch.ones(2),
        "1.num_batches_tracked": torch.tensor(1.5),
        "3.weight": torch.ones(3, 8),
    }
    with pytest.raises(CheckpointError) as caught:
        load_into(network(), state_dict, "model.pt")

    assert str(caught.value).splitlines() == [
        "the checkpoint model.pt does not fit the model: 2 missing, 1 unexpected, 3 of another shape or type",
        "    missing:",
        "      0.weight (nearest: 0.weigth)",
        "      3.bias",
        "    unexpected:",
        "      0.weigth (nearest: 0.weight)",
        "    of another shape or type:",
        "      0.bias: [4] in the checkpoint, [2] in the model",
        "      1.weight: complex64 in the checkpoint, float32 in the model",
        "      1.num_batches_tracked: float32 in the checkpoint, int64 in the model",
        "  hint: the factory's kwargs differ from those that the model was trained with",
    ]
