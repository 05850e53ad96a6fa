"""Images: folders, columns of paths and bytes, modes, preparation, and what is wrong with them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from psgrad.config import DataConfig
from psgrad.config.config import LossConfig
from psgrad.data import image_files
from psgrad.data import image_samples as samples_of_images
from psgrad.data.loss import resolve_loss
from psgrad.data.previews import input_of
from psgrad.data.sources.load import Samples, load_data, open_rows
from psgrad.errors import ConfigError, DataError, PsgradError
from psgrad.models.pretrained import Pretrained

GENERATOR = np.random.default_rng(0)


def pixels(height: int = 8, width: int = 8, channels: int = 3) -> np.ndarray[Any, Any]:
    return GENERATOR.integers(0, 256, (height, width, channels), dtype=np.uint8)


def save(path: Path, values: np.ndarray[Any, Any], mode: str | None = None) -> np.ndarray[Any, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values.squeeze())
    (image if mode is None else image.convert(mode)).save(path)
    return values


def load(folder: Path, pretrained: Pretrained | None = None, **options: Any) -> Samples:
    criterion = resolve_loss(LossConfig(name="cross_entropy"), folder)
    return load_data(DataConfig(**options), folder, pretrained=pretrained, criterion=criterion)


def error(folder: Path, kind: type[PsgradError] = DataError, rows: int = 1, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load(folder, **options).take(range(rows))
    return str(caught.value)


def expected(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.tensor(values.transpose(2, 0, 1).astype(np.float32) / 255)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, label in (("b1", "dog"), ("a2", "dog"), ("c", "cat")):
        save(tmp_path / "images" / label / f"{name}.png", pixels())
    (tmp_path / "images" / "dog" / "notes.txt").write_text("no image")
    return tmp_path


# -- Where images are ----------------------------------------------------------------------------------------


def test_a_folder_for_each_class(folder: Path) -> None:
    samples = load(folder, images="images")
    assert samples.targets.tolist() == [0, 1, 1]
    assert samples.class_names == ("cat", "dog")
    assert samples.ids.tolist() == ["cat/c.png", "dog/a2.png", "dog/b1.png"]
    assert samples.notes[0] == "label: labels in sorted order: 0 cat, 1 dog"
    block = samples.take(range(3))
    assert block.target.tolist() == [0, 1, 1]
    for row, name in enumerate(("cat/c", "dog/a2", "dog/b1")):
        values = np.asarray(Image.open(folder / "images" / f"{name}.png"))
        assert torch.equal(block.inputs[0][row], expected(values))
    assert torch.equal(samples.take(np.array([2, 0])).inputs[0], block.inputs[0][[2, 0]])
    original = samples.picture(1)
    assert np.array_equal(np.asarray(original), np.asarray(Image.open(folder / "images" / "dog" / "a2.png")))
    assert load(folder, images="images", id="image").ids.tolist() == [
        "cat/c.png",
        "dog/a2.png",
        "dog/b1.png",
    ]
    assert load(folder, images="images", class_names=["dog", "cat"]).targets.tolist() == [1, 0, 0]  # type: ignore[union-attr]


def test_table_in_a_folder_of_images_is_read_in_place_of_the_folder(folder: Path) -> None:
    rows = [{"file_name": "dog/b1.png", "y": 2, "uid": "u0"}, {"file_name": "cat/c.png", "y": 0, "uid": "u1"}]
    lines = ["file_name,y,uid", *(",".join(map(str, row.values())) for row in rows)]
    (folder / "images" / "metadata.csv").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"data\.path: .*metadata\.csv, with image: file_name"):
        load(folder, images="images", target="y")
    samples = load(folder, path="images/metadata.csv", image="file_name", target="y", id="uid")
    assert samples.ids.tolist() == ["u0", "u1"]
    assert samples.targets.tolist() == [2, 0]
    values = np.asarray(Image.open(folder / "images" / "cat" / "c.png"))
    assert torch.equal(samples.take(range(1, 2)).inputs[0][0], expected(values))


@pytest.mark.parametrize("stored", ["path", "bytes", "struct", "struct of a path"])
def test_columns_of_images(tmp_path: Path, stored: str) -> None:
    images = [save(tmp_path / "sub" / f"{row}.png", pixels()) for row in range(3)]
    paths = [f"sub/{row}.png" for row in range(3)]
    contents = [(tmp_path / path).read_bytes() for path in paths]
    column: list[Any] = {
        "path": paths,
        "bytes": contents,
        "struct": [{"bytes": each, "path": None} for each in contents],
        "struct of a path": [{"bytes": None, "path": each} for each in paths],
    }[stored]
    pq.write_table(pa.table({"image": column, "y": [0, 1, 0], "w": [1.0, 2.0, 3.0]}), tmp_path / "a.parquet")
    samples = load(tmp_path, path="a.parquet", image="image", target="y", weight="w")
    assert torch.equal(samples.take(range(3)).inputs[0], torch.stack([expected(each) for each in images]))
    assert samples.take(range(3)).inputs[1].tolist() == [1.0, 2.0, 3.0]
    both = load(
        tmp_path, path="a.parquet", image="image", inputs={"pixel_values": "image", "scale": "w"}, target="y"
    )
    assert both.keywords == ("pixel_values", "scale")
    assert [list(x.shape) for x in both.take(range(2)).inputs] == [[2, 3, 8, 8], [2]]


def test_images_of_the_datasets_library(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths = sorted((folder / "images" / "dog").glob("*.png"))
    rows = {"image": [str(path) for path in paths], "label": [1, 0]}
    kinds = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    datasets.Dataset.from_dict(rows, kinds).save_to_disk(folder / "set")
    samples = load(folder, dataset="set", image="image", target="label")
    assert torch.equal(samples.take(range(1)).inputs[0][0], expected(np.asarray(Image.open(paths[0]))))
    assert samples.class_names == ("a", "b")


def test_the_fingerprint_covers_the_pixels_the_labels_and_the_preparation(folder: Path) -> None:
    before = load(folder, images="images").fingerprint
    assert load(folder, images="images").fingerprint == before
    assert load(folder, images="images", size=4).fingerprint != before
    (folder / "images" / "cat").rename(folder / "images" / "emu")
    renamed = load(folder, images="images").fingerprint
    assert renamed != before
    save(folder / "images" / "emu" / "c.png", pixels())
    assert load(folder, images="images").fingerprint != renamed


def test_images_are_read_when_their_row_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[bytes] = []
    decode = image_files.decoded
    monkeypatch.setattr(samples_of_images, "decoded", lambda *args: loads.append(args[0]) or decode(*args))
    samples = load(folder, images="images")
    loads.clear()
    samples.take(range(1, 2))
    assert len(loads) == 1


# -- Preparation ---------------------------------------------------------------------------------------------


def test_an_image_that_is_changed_between_two_passes_is_named(folder: Path) -> None:
    samples = load(folder, images="images")
    before = samples.take(range(2)).inputs[0]
    file = sorted(folder.rglob("*.png"))[1]
    content = file.read_bytes()
    save(file, 255 - pixels())
    assert torch.equal(samples.take(range(1)).inputs[0], before[:1])
    with pytest.raises(DataError, match=f"{file.name}.* was changed while the run read it"):
        samples.take(range(2))
    file.write_bytes(content)
    assert torch.equal(samples.take(range(2)).inputs[0], before)


def test_a_folder_is_listed_in_order_with_links_to_classes_and_without_hidden_files(tmp_path: Path) -> None:
    """In the order of the parts of paths, in which a folder comes before files whose names it begins."""
    images, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    kept = ["cat/a/2.png", "cat/a-1.png", "cat/b.PNG", "dog/0.png"]
    for name in [*kept, "cat/.hidden.png", "top.png", ".cache/3.png"]:
        save(images / name, pixels())
    (images / "cat" / "notes.txt").write_text("no image")
    save(elsewhere / "1.png", pixels())
    (images / "fox").symlink_to(elsewhere)
    (images / "cat" / "again").symlink_to(images)  # below a class no link to a folder is followed
    rows = open_rows(DataConfig(images="images"), tmp_path)
    assert rows.column("image").to_pylist() == [*kept, "fox/1.png"]
    assert rows.column("label").to_pylist() == ["cat", "cat", "cat", "dog", "fox"]


def test_size_crop_mean_and_std(tmp_path: Path) -> None:
    values = save(tmp_path / "images" / "a" / "0.png", pixels(20, 30))
    steps = {"size": 10, "crop": [6, 8], "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    found = load(tmp_path, images="images", **steps).take(range(1)).inputs[0][0]
    small = np.asarray(Image.fromarray(values).resize((15, 10), Image.Resampling.BILINEAR))[2:8, 3:11]
    wanted = (small / 255 - np.array(steps["mean"])) / np.array(steps["std"])
    np.testing.assert_allclose(found.numpy(), wanted.transpose(2, 0, 1), rtol=1e-5, atol=1e-6)
    exact = load(tmp_path, images="images", size=[4, 5]).take(range(1)).inputs[0]
    assert list(exact.shape) == [1, 3, 4, 5]


def test_a_pretrained_models_own_processor(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoImageProcessor
    made = transformers.ViTImageProcessor(size={"height": 6, "width": 5}, image_mean=[0.1, 0.2, 0.3])
    made.save_pretrained(folder / "model")
    config = transformers.ViTConfig(id2label={0: "dog", 1: "cat"}, label2id={"dog": 0, "cat": 1})
    pretrained = Pretrained(folder / "model", "image-classification", config)
    samples = load(folder, pretrained, images="images")
    assert samples.keywords == ("pixel_values",)
    assert samples.targets.tolist() == [1, 0, 0]  # the labels of the head, not of the sorted folders
    paths = ["cat/c.png", "dog/a2.png", "dog/b1.png"]
    images = [Image.open(folder / "images" / path) for path in paths]
    oracle = processor.from_pretrained(folder / "model", backend="pil")(images=images, return_tensors="pt")
    assert torch.equal(samples.take(range(3)).inputs[0], oracle["pixel_values"])
    with pytest.raises(ConfigError, match="a pretrained model's own image processor prepares its images"):
        load(folder, pretrained, images="images", size=[8, 8])
    (folder / "model" / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no image processor"):
        load(folder, pretrained, images="images")


def test_images_are_shown_as_in_the_dataset_too(tmp_path: Path) -> None:
    values = save(tmp_path / "images" / "a" / "0.png", pixels(20, 30))
    shown = input_of(load(tmp_path, images="images", size=10, crop=[6, 8]), 0)
    assert shown.image.shape == (3, 6, 8)
    assert np.array_equal(shown.original, values)
    large = save(tmp_path / "images" / "a" / "0.png", pixels(300, 600))
    small = input_of(load(tmp_path, images="images", size=10), 0).original
    assert small.shape == (96, 192, 3)
    assert abs(float(small.mean()) - float(large.mean())) < 2


def test_labels_outside_the_models_own(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ViTImageProcessor(size={"height": 6, "width": 5}).save_pretrained(folder / "model")
    config = transformers.ViTConfig(id2label={0: "dog", 1: "emu"}, label2id={"dog": 0, "emu": 1})
    with pytest.raises(DataError) as caught:
        load(folder, Pretrained(folder / "model", "image-classification", config), images="images")
    assert "the label 'cat' in row 0, 1 of 3 rows, is no class" in str(caught.value)


# -- Modes ---------------------------------------------------------------------------------------------------


def test_modes_become_colours_in_a_said_way(tmp_path: Path) -> None:
    place = tmp_path / "images" / "a"
    colour = save(place / "0.png", pixels())
    grey = save(place / "1.png", pixels(channels=1))
    clear = np.concatenate([pixels(), np.full((8, 8, 1), 51, np.uint8)], axis=2)
    save(place / "2.png", clear)
    palette = save(place / "3.png", np.repeat(pixels(1, 8), 8, axis=0), "P")
    deep = GENERATOR.integers(0, 65536, (8, 8), dtype=np.uint16)
    save(place / "4.png", deep)
    samples = load(tmp_path, images="images")
    found = samples.take(range(5)).inputs[0]
    assert torch.equal(found[0], expected(colour))
    assert torch.equal(found[1], expected(np.repeat(grey, 3, axis=2)))
    white = clear[..., :3] * 0.2 + 255 * 0.8
    np.testing.assert_allclose(found[2].numpy(), white.transpose(2, 0, 1) / 255, atol=1.1 / 255)
    np.testing.assert_allclose(found[3].numpy(), expected(palette).numpy(), atol=0.3)
    np.testing.assert_allclose(found[4][0].numpy(), deep / 65535, atol=0.51 / 255)


def test_grey_images_have_one_channel_unless_one_has_colours(tmp_path: Path) -> None:
    grey = save(tmp_path / "images" / "a" / "0.png", pixels(channels=1))
    found = load(tmp_path, images="images").take(range(1)).inputs[0]
    assert torch.equal(found[0], expected(grey))
    save(tmp_path / "images" / "a" / "1.png", pixels())
    assert list(load(tmp_path, images="images").take(range(2)).inputs[0].shape) == [2, 3, 8, 8]
    assert list(load(tmp_path, images="images", mean=[0.5, 0.5, 0.5]).take(range(2)).inputs[0].shape) == [
        2,
        3,
        8,
        8,
    ]


# -- What can't be used --------------------------------------------------------------------------------------


def test_broken_images_name_their_file_and_row(folder: Path) -> None:
    broken = folder / "images" / "dog" / "a2.png"
    content = broken.read_bytes()
    for given, words in (
        (content[: len(content) // 2], "can't be read: "),
        (b"no image", "can't be read: it is no image that Pillow knows"),
    ):
        broken.write_bytes(given)
        message = error(folder, rows=3, images="images")
        assert f"the image {broken} in row 1 {words}" in message
        assert "an interrupted copy or download" in message


def test_paths_that_are_not_there_and_rows_without_an_image(tmp_path: Path) -> None:
    save(tmp_path / "0.png", pixels())
    lines = ['{"image": "0.png", "y": 0}', '{"image": "1.png", "y": 1}', '{"image": null, "y": 1}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    samples = load(tmp_path, path="a.jsonl", image="image", target="y")
    with pytest.raises(DataError) as caught:
        samples.take(range(1, 2))
    assert f"the image {tmp_path / '1.png'} in row 1 can't be read" in str(caught.value)
    with pytest.raises(DataError, match=r"row 2 has no image; expected the path of an image"):
        samples.take(range(2, 3))


def test_images_of_unequal_size(tmp_path: Path) -> None:
    save(tmp_path / "images" / "a" / "0.png", pixels())
    save(tmp_path / "images" / "a" / "1.png", pixels(9, 8))
    message = error(tmp_path, rows=2, images="images")
    assert "in row 1 has the shape [3, 9, 8] once it is prepared, the first one [3, 8, 8]" in message
    assert "hint: set data.size to [height, width]" in message
    message = error(tmp_path, rows=2, images="images", crop=9)
    assert "has 8 x 8 pixels, and data.crop is 9 x 9" in message


def test_images_without_a_range(tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.fromarray(np.ones((4, 4), np.float32)).save(content, "tiff")
    pq.write_table(pa.table({"i": [content.getvalue()], "y": [0]}), tmp_path / "a.parquet")
    message = error(tmp_path, path="a.parquet", image="i", target="y")
    assert "the image in row 0 has the mode F, fractions without a range" in message


def test_folders_that_can_not_be_used(tmp_path: Path) -> None:
    assert "data.images: there is no folder" in error(tmp_path, ConfigError, images="nowhere")
    (tmp_path / "images" / "empty").mkdir(parents=True)
    assert "has no images" in error(tmp_path, images="images")
    save(tmp_path / "images" / "full" / "0.png", pixels())
    assert f"the folder {tmp_path / 'images' / 'empty'} has no images" in error(tmp_path, images="images")


def test_numbers_of_channels_that_are_none(folder: Path) -> None:
    assert "data.mean has 2 numbers" in error(folder, ConfigError, images="images", mean=[0.5, 0.5])
    message = error(folder, ConfigError, images="images", mean=[0.5], std=[0.5, 0.5, 0.5])
    assert "data.mean and data.std differ in length" in message


def test_what_timm_says_of_a_models_images(folder: Path) -> None:
    said = {"input_size": (3, 4, 4), "crop_pct": 0.5, "mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0)}
    criterion = resolve_loss(LossConfig(name="cross_entropy"), folder)
    samples = load_data(DataConfig(images="images"), folder, criterion=criterion, trained_on=said)
    values = np.asarray(Image.open(folder / "images" / "cat" / "c.png"))[2:6, 2:6]  # 4 / 0.5 is its own size
    wanted = expected(values) - torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    torch.testing.assert_close(samples.take(range(1)).inputs[0][0], wanted)
