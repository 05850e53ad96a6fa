"""The monitor as a callback of transformers' and of Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.monitoring.loops import Classifier, digits

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
from psgrad.monitoring.transformers_callback import GradientMonitor  # noqa: E402  # needs transformers

WORDS, USED, ROWS = 64, 20, 480


class Texts(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Texts of a chain of 20 words, 8 to 19 words long; those of `garbage` are of all words at random."""

    def __init__(self, garbage: tuple[int, ...] = ()) -> None:
        draw = np.random.default_rng(0)
        following = draw.dirichlet(np.full(USED, 0.1), size=USED)
        self.rows: list[list[int]] = []
        for row in range(ROWS):
            text = [int(draw.integers(USED))]
            for _ in range(int(draw.integers(7, 19))):
                text.append(int(draw.choice(USED, p=following[text[-1]])))
            self.rows.append(draw.integers(0, WORDS, 15).tolist() if row in garbage else text)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(lists: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([each + [value] * (longest - len(each)) for each in lists])

    texts = [row["input_ids"] for row in rows]
    mask = padded([[1] * len(text) for text in texts], 0)
    return {"input_ids": padded(texts, 0), "attention_mask": mask, "labels": padded(texts, -100)}


def trained(folder: Path, data: Texts, callback: GradientMonitor | None = None, **options: Any) -> Any:
    """The Trainer of a small GPT-2 after an epoch."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "num_train_epochs": 1,
            "save_strategy": "no",
            "report_to": [],
            "learning_rate": 3e-3,
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        }
    )
    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collated)
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return trainer


def test_trainer_same_weights_ids_sources_and_log(tmp_path: Path) -> None:
    data = Texts()
    names = [{"uid": f"row {row}", "from": "even" if row % 2 == 0 else "odd"} for row in range(ROWS)]
    callback = GradientMonitor(every=10, log=True, data=names, id="uid", source="from")
    plain, watched = trained(tmp_path / "plain", data), trained(tmp_path / "watched", data, callback)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, watched.model.state_dict()[name]), name
    folder = tmp_path / "watched" / "monitor"
    rows, steps = pd.read_parquet(folder / "rows"), pd.read_parquet(folder / "steps")
    assert steps["step"].tolist() == [10, 20, 30, 40, 50, 60]
    assert ((rows["source"] == "even") == rows["id"].str[4:].astype(int).mod(2).eq(0)).all()
    assert {*pd.read_parquet(folder / "sources")["source"]} == {"even", "odd"}
    logged = [each["step"] for each in watched.state.log_history if "psgrad/grad_norm_max" in each]
    assert logged == steps["step"].tolist()
    # The last step's rows, by the model before it: the numbers of a row come from that row of the dataset.
    last = rows[rows["step"] == 60]
    model = watched.model.eval()
    own = [float(model(**collated([data[int(name[4:])]])).loss) for name in last["id"]]
    assert np.corrcoef(own, last["loss"])[0, 1] > 0.99


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 3}, {"bf16": True}])
def test_trainer_accumulation_and_mixed_precision(options: dict[str, Any], tmp_path: Path) -> None:
    callback = GradientMonitor(every=5)
    trained(tmp_path, Texts(), callback, **options)
    assert callback.monitor is not None
    assert not callback.monitor.stopped
    rows = pd.read_parquet(tmp_path / "monitor" / "rows")
    each = 8 * options.get("gradient_accumulation_steps", 1)
    assert rows.groupby("step").size().unique().tolist() == [each]
    assert rows["grad_norm"].gt(0).all()
    assert rows["id"].astype(int).duplicated().sum() == 0


def test_trainer_names_garbage_texts_by_their_ids(tmp_path: Path) -> None:
    order = trained(tmp_path / "order", Texts(), GradientMonitor(every=1))
    del order
    drawn = pd.read_parquet(tmp_path / "order" / "monitor" / "rows")
    late = tuple(drawn[drawn["step"].isin([30, 45])].groupby("step")["id"].first().astype(int))
    trained(tmp_path / "run", Texts(garbage=late), GradientMonitor(every=1))
    rows = pd.read_parquet(tmp_path / "run" / "monitor" / "rows")
    assert sorted(rows[rows["reason"].notna()]["id"].astype(int)) == sorted(late)


def test_trainer_resumed_in_an_epoch_gives_no_wrong_ids(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 30}
    trained(tmp_path, Texts(), GradientMonitor(every=1), **options)
    whole = pd.read_parquet(tmp_path / "monitor" / "rows")
    again = GradientMonitor(every=1, output=tmp_path / "again")
    trained(tmp_path, Texts(), again, **options, resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    rows = pd.read_parquet(tmp_path / "again" / "rows")
    assert rows["step"].min() == 31
    assert rows["id"].isna().all()
    np.testing.assert_allclose(rows["loss"], whole[whole["step"] > 30]["loss"], rtol=1e-5)


def test_trainer_of_a_model_without_a_loss_warns_and_trains(tmp_path: Path) -> None:
    class Own(transformers.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            return F.cross_entropy(model(inputs["images"]), inputs["labels"])

    images, labels = digits()
    rows = [{"images": image, "labels": label} for image, label in zip(images[:64], labels[:64], strict=True)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        save_strategy="no",
        max_steps=3,
    )
    trainer = Own(Classifier(), arguments, train_dataset=rows)
    trainer.add_callback(GradientMonitor(every=1))
    with pytest.warns(UserWarning, match="training goes on"):
        trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning_same_weights_and_steps(accumulated: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from psgrad.monitoring.lightning_callback import LightningMonitor

    def compute_loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(module.net(batch[0]), batch[1])  # type: ignore[operator]

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Classifier()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return compute_loss(self, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def weights(*callbacks: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module, (images, labels) = Module(), digits()
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(images[:320], labels[:320]), batch_size=32, shuffle=True
        )
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            callbacks=[*callbacks],
            accumulate_grad_batches=accumulated,
            default_root_dir=tmp_path,
            **quiet,
        )
        trainer.fit(module, loader)
        return module.state_dict()

    plain, watched = weights(), weights(LightningMonitor(compute_loss, every=4))
    assert all(torch.equal(value, watched[name]) for name, value in plain.items())
    steps = pd.read_parquet(tmp_path / "monitor" / "steps")
    assert steps["step"].tolist() == [*range(4, 20 // accumulated + 1, 4)]
    assert steps["rows"].unique().tolist() == [32 * accumulated]
