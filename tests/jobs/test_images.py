"""Models of images: the data for fitting and measuring, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTForImageClassification, ViTModel

from dynorm.errors import DataError, DynormError
from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.images import Crop, find_images
from dynorm.jobs.inputs import CROPS, ShuffledBatches, image_inputs
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.recipe import Recipe

QUICK = Recipe(steps=0, held_out=8, batch=4, calibration=16)
SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 32, "width": 32},
    "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}  # fmt: skip


def save(model: Any, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Dinov2Model(Dinov2Config(**SIZE, mlp_ratio=2))
    return save(model, tmp_path_factory.mktemp("models") / "tiny-dinov2")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for i in range(24):
        coarse = Image.fromarray(draw.integers(0, 255, (4, 5, 3), dtype=np.uint8))
        coarse.resize((60, 48), Image.Resampling.BICUBIC).save(folder / f"{i:02}.png")
    return folder


def test_an_encoder_is_distilled_and_compared_by_its_class_token(
    vision: Path, images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    recipe = replace(QUICK, steps=20, lr=1e-3)
    report = convert_pretrained(vision, out, recipe, images=[images])
    assert report.output.kind == "encoder"
    assert len(report.sites) == 5
    counts = [report.meta[name] for name in ("images_to_fit", "crops", "images_held_out")]
    assert counts == [16, CROPS, 8]
    first, *_, last = (
        stage["output"] for stage in report.meta["stages"].values() if "output" in stage
    )
    assert last["cosine_mean"] > first["cosine_mean"]
    worst = Crop(images / report.meta["worst_sample"])
    batch = image_inputs(load_pretrained(vision), [], [], {}).batches([worst], 1)[0]
    tokens = []
    for place in (out / "model", vision):
        with torch.no_grad():
            tokens.append(load_pretrained(place).model(**batch).last_hidden_state[:, 0])
    cosine = torch.cosine_similarity(*tokens).item()
    assert cosine == pytest.approx(report.output.cosine_min, abs=1e-6)
    assert (out / "model" / "preprocessor_config.json").is_file()


def test_a_classifier_is_compared_by_its_classes(images: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig(**SIZE, intermediate_size=64, num_labels=5)
    source = save(ViTForImageClassification(config), tmp_path / "tiny-vit")
    report = convert_pretrained(source, tmp_path / "out", QUICK, images=[images])
    assert report.output.kind == "tensor"
    assert report.output.agreement is not None
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "ViTForImageClassification.from_pretrained" in card


def test_a_pooler_that_is_random_is_not_measured(images: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig(**SIZE, intermediate_size=64)
    source = save(ViTModel(config, add_pooling_layer=False), tmp_path / "source")
    loaded = load_pretrained(source)
    assert loaded.model.pooler is None
    assert "Do not use the pooler" in loaded.remarks[0]
    report = convert_pretrained(source, tmp_path / "out", QUICK, images=[images])
    assert report.output.kind == "encoder"
    saved = load_pretrained(tmp_path / "out" / "model").model.state_dict()
    assert not any("pooler" in name for name in saved)


def test_images_are_held_out_by_file_and_fitted_to_in_crops(vision: Path, images: Path) -> None:
    first, *files = sorted(images.iterdir())[:4]
    inputs = image_inputs(load_pretrained(vision), files, [first], {})
    assert inputs.held_out == [Crop(first)]
    crops = inputs.fit
    assert crops[:4] == [*(Crop(file) for file in files), Crop(files[0], 1)]
    assert len({np.asarray(crop.read()).tobytes() for crop in crops}) > 2 * CROPS
    whole, part = Crop(files[0]).read(), Crop(files[0], 1).read()
    assert whole.size == (60, 48)
    assert part.size[0] == part.size[1]
    assert 24 <= part.size[0] <= 49
    assert part.tobytes() == Crop(files[0], 1).read().tobytes()


def test_batches_are_read_when_they_are_taken(vision: Path, images: Path, tmp_path: Path) -> None:
    inputs = image_inputs(load_pretrained(vision), [], [], {})
    image = Crop(images / "00.png")
    batches = inputs.batches([image] * 3 + [Crop(tmp_path / "gone.png")], 3)
    assert len(batches) == 2
    assert batches[0]["pixel_values"].shape == (3, 3, 32, 32)
    assert len(batches[:1]) == 1
    with pytest.raises(FileNotFoundError, match="gone"):
        batches[1]
    crops = [Crop(image.file, number) for number in range(8)]
    shuffled = ShuffledBatches(inputs.batches, crops, 2, 0)
    first, second = (torch.cat([batch["pixel_values"] for batch in shuffled]) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.allclose(first.sum(0), second.sum(0), atol=1e-4)


def test_images_that_cannot_be_read_are_named(images: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(images, tmp_path / "mixed")
    whole = (images / "00.png").read_bytes()
    (mixed / "again.png").write_bytes(whole)
    (mixed / "notes.txt").write_text("of another kind")
    assert len(find_images([mixed])) == 24
    for name, data in (("a.png", whole[: len(whole) // 2]), ("a.jpg", b"words"), ("a.webp", b"")):
        (mixed / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"images.*{name} is not.*remove it"):
            find_images([mixed])
        (mixed / name).unlink()


def test_images_are_turned_as_the_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(tmp_path / "a.jpg", exif=exif)
    Image.new("LA", (20, 10)).save(tmp_path / "b.png")
    assert Crop(tmp_path / "a.jpg").read().size == (10, 20)
    assert Crop(tmp_path / "b.png").read().mode == "RGB"


def test_paths_without_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "words.png").write_text("no image")
    for name, words in (
        ("nowhere", r"images.*exist"),
        ("folder", "folder has none"),
        ("words.png", r"words\.png is not"),
    ):
        with pytest.raises(DataError, match=words):
            find_images([tmp_path / name])


@pytest.mark.parametrize(("given", "recipe", "words"), [
    ({}, QUICK, "images.*Dinov2Model.*, got none"),
    ({"texts": ["a.txt"], "images": ["."]}, QUICK, "images.*Dinov2Model.*, got texts"),
    ({"images": ["."]}, replace(QUICK, max_length=16), r"max_length.*images.*got 16"),
    ({"images": [f"{i:02}.png" for i in range(7)]}, QUICK, r"images.*8.*got 7"),
])  # fmt: skip
def test_wrong_samples_are_refused(
    vision: Path,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    recipe: Recipe,
    words: str,
) -> None:
    monkeypatch.chdir(images)
    with pytest.raises(DynormError, match=words):
        convert_pretrained(vision, tmp_path / "out", recipe, **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("processor", "words"), [
    (None, r"read.*image processor"),
    ("{", r"read.*image processor"),
    (json.dumps(PROCESSOR | {"do_resize": False}), r"image processor.*batch"),
])  # fmt: skip
def test_a_damaged_processor_is_refused(
    vision: Path, images: Path, tmp_path: Path, processor: str | None, words: str
) -> None:
    source = shutil.copytree(vision, tmp_path / "source")
    file = source / "preprocessor_config.json"
    file.unlink() if processor is None else file.write_text(processor)
    # Images of another size make no batch without being resized.
    other = shutil.copytree(images, tmp_path / "images")
    Image.new("RGB", (20, 10)).save(other / "small.png")
    with pytest.raises(DynormError, match=words):
        convert_pretrained(source, tmp_path / "out", QUICK, images=[other])
    assert not (tmp_path / "out").exists()


def test_the_command_line_takes_images(
    vision: Path,
    images: Path,
    tmp_path: Path,
    status: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick = ["--batch", 4, "--steps", 0, "--held-out", 6, "--json"]
    files = [word for i in range(12) for word in ("--images", images / f"{i:02}.png")]
    assert status("convert", vision, tmp_path / "out", *quick, *files) == 0
    assert json.loads(capsys.readouterr().out)["output"]["samples"] == 6
    assert status("convert", vision, tmp_path / "new", *quick) == 2
    assert "images must be given for Dinov2Model (--images), got none" in capsys.readouterr().err
    assert status("fold", vision, tmp_path / "folded") == 0
    assert (tmp_path / "folded" / "model" / "preprocessor_config.json").is_file()


def test_inspection_takes_images(vision: Path, images: Path) -> None:
    found = inspect_pretrained(vision, Recipe(batch=4, held_out=8), images=[images])
    assert len(found.sites) == 5
    assert found.meta["images_held_out"] == 8
