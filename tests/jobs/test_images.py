"""Models of images: the data for fitting and measuring, and refusals."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTForImageClassification, ViTModel

from dynorm.errors import ArgumentError, DataError, StorageError
from dynorm.jobs.checkpoint import ShuffledBatches, load_pretrained
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.convert_model import convert_model
from dynorm.jobs.images import Crop, find_images
from dynorm.jobs.inputs import CROPS, image_inputs
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.recipe import Recipe
from dynorm.replace.converted import dynorm_layers
from dynorm.report import ModelReport
from dynorm.report.output import OutputComparison
from dynorm.train.distill import output_loss

QUICK = Recipe(refine=2, held_out=8, batch=4, calibration=16)
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
    torch.manual_seed(0)
    return save(
        Dinov2Model(Dinov2Config(**SIZE, mlp_ratio=2)),
        tmp_path_factory.mktemp("models") / "tiny-dinov2",
    )


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = ViTConfig(**SIZE, intermediate_size=64, num_labels=5)
    return save(ViTForImageClassification(config), tmp_path_factory.mktemp("models") / "tiny-vit")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for i in range(24):
        coarse = Image.fromarray(draw.integers(0, 255, (4, 5, 3), dtype=np.uint8))
        coarse.resize((60, 48), Image.Resampling.BICUBIC).save(folder / f"{i:02}.png")
    return folder


@pytest.fixture(scope="module")
def converted(
    vision: Path, images: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ModelReport]:
    out = tmp_path_factory.mktemp("converted") / "out"
    return out, convert_pretrained(vision, out, QUICK, images=[images])


def test_an_encoder_is_compared_by_its_class_token(
    vision: Path, images: Path, converted: tuple[Path, ModelReport]
) -> None:
    out, report = converted
    assert report.output.kind == "encoder"
    assert len(report.sites) == 5
    assert (report.meta["images_to_fit"], report.meta["crops"], report.meta["images_held_out"]) == (
        16,
        CROPS,
        8,
    )
    assert (
        report.meta["recipe"]
        | {"batch": 4, "max_length": None, "witnesses": None, "per_channel": False}
        == report.meta["recipe"]
    )
    assert report.meta["worst_sample"] in {file.name for file in images.iterdir()}
    found, original = (load_pretrained(place).model for place in (out / "model", vision))
    worst = Crop(images / report.meta["worst_sample"])
    held_out = image_inputs(load_pretrained(vision), [], [], {}).batches([worst], 1)[0]
    with torch.no_grad():
        a, b = (model(**held_out).last_hidden_state[:, 0] for model in (found, original))
    assert torch.cosine_similarity(a, b).item() == pytest.approx(report.output.cosine_min, abs=1e-6)
    page = (out / "report.html").read_text()
    assert "same nearest neighbour" in page
    card = (out / "model" / "README.md").read_text()
    assert "crops of 16 images, refined together on" in card
    assert f", from {images}." in card
    assert "Measured on other images" in card
    assert (out / "model" / "preprocessor_config.json").is_file()


def test_a_classifier_is_compared_by_its_classes(
    classifier: Path, images: Path, tmp_path: Path
) -> None:
    report = convert_pretrained(classifier, tmp_path / "out", QUICK, images=[images])
    assert report.output.kind == "tensor"
    assert (
        "ViTForImageClassification.from_pretrained"
        in (tmp_path / "out" / "model" / "README.md").read_text()
    )
    held_out = {file.name for file in images.iterdir()}
    assert report.meta["worst_sample"] in held_out
    assert report.output.agreement is not None
    assert f"same likeliest class {report.output.agreement:.1%}" in str(report)
    assert "same likeliest class" in (tmp_path / "out" / "report.html").read_text()


def test_agreement_counts_equal_classes() -> None:
    original = {"logits": torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1]])}
    now = {"logits": torch.tensor([[2.0, 0], [1, 0], [1, 0], [0, 2]])}
    comparison = OutputComparison()
    comparison.add(
        torch.zeros(4, 2), original, now, lambda batch: pytest.fail(f"{batch} is run again")
    )
    assert comparison.report().agreement == 0.75


def test_images_are_held_out_by_file_and_fitted_to_in_crops(vision: Path, images: Path) -> None:
    first, *files = sorted(images.iterdir())[:4]
    inputs = image_inputs(load_pretrained(vision), files, [first], {})
    assert inputs.held_out == [Crop(first)]
    crops = inputs.fit
    assert [(crop.file, crop.number) for crop in crops[:4]] == [
        *((file, 0) for file in files),
        (files[0], 1),
    ]
    assert len({np.asarray(crop.read()).tobytes() for crop in crops}) > 2 * CROPS
    whole, part = Crop(files[0]).read(), Crop(files[0], 1).read()
    assert whole.size == (60, 48)
    assert part.size[0] == part.size[1]
    assert 24 <= part.size[0] <= 49
    assert part.tobytes() == Crop(files[0], 1).read().tobytes()


def test_batches_are_read_when_they_are_taken(vision: Path, images: Path, tmp_path: Path) -> None:
    shutil.copy(images / "00.png", tmp_path / "a.png")
    inputs, missing = image_inputs(load_pretrained(vision), [], [], {}), Crop(tmp_path / "gone.png")
    batches = inputs.batches([Crop(tmp_path / "a.png")] * 3 + [missing], 3)
    assert len(batches) == 2
    assert batches[0]["pixel_values"].shape == (3, 3, 32, 32)
    assert len(batches[:1]) == 1
    with pytest.raises(Exception, match="gone"):
        batches[1]
    shuffled = ShuffledBatches(
        inputs.batches, [Crop(tmp_path / "a.png", i) for i in range(8)], 2, 0
    )
    first, second = (torch.cat([batch["pixel_values"] for batch in shuffled]) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.allclose(first.sum(0), second.sum(0), atol=1e-4)


def test_images_that_cannot_be_read_are_named_and_left_out(
    vision: Path, images: Path, tmp_path: Path
) -> None:
    mixed = shutil.copytree(images, tmp_path / "mixed")
    whole = (images / "00.png").read_bytes()
    (mixed / "cut.png").write_bytes(whole[: len(whole) // 2])
    (mixed / "words.jpg").write_text("no image")
    (mixed / "empty.webp").write_bytes(b"")
    (mixed / "again.png").write_bytes(whole)
    (mixed / "notes.txt").write_text("of another kind")
    said: list[str] = []
    report = convert_pretrained(vision, tmp_path / "out", QUICK, images=[mixed], say=said.append)
    bad = [str(mixed / name) for name in ("cut.png", "empty.webp", "words.jpg")]
    assert report.meta["images_that_cannot_be_read"] == bad
    assert f"left out 3 files of images that cannot be read: {', '.join(bad)}" in said
    assert report.meta["images_to_fit"] + report.meta["images_held_out"] == 24


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
    with pytest.raises(DataError, match=r"images.*exist"):
        find_images([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="none, of 0"):
        find_images([tmp_path / "folder"])
    with pytest.raises(DataError, match=r"words\.png has none, of 1"):
        find_images([tmp_path / "words.png"])


@pytest.mark.parametrize(("kind", "given", "error", "words"), [
    ("vision", {}, ArgumentError, "images.*Dinov2Model, got none"),
    ("vision", {"texts": ["a.txt"]}, ArgumentError, "images.*Dinov2Model, got texts"),
    ("vision", {"texts": ["a.txt"], "images": ["."]}, ArgumentError, "images.*Dinov2Model, got texts"),
    ("encoder", {"images": ["."]}, ArgumentError, "texts.*BertModel, got images"),
    ("language_model", {"images": ["."], "texts": ["."]}, ArgumentError, "texts.*GPT2LMHeadModel"),
])  # fmt: skip
def test_inputs_of_another_kind_are_refused(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kind: str,
    given: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    source = request.getfixturevalue(kind)
    for job in (
        lambda: convert_pretrained(source, tmp_path / "out", QUICK, **given),
        lambda: inspect_pretrained(source, QUICK, **given),
    ):
        with pytest.raises(error, match=words):
            job()
    assert not (tmp_path / "out").exists()


def test_what_images_need_is_checked_first(vision: Path, images: Path, tmp_path: Path) -> None:
    few = [images / f"{i:02}.png" for i in range(7)]
    with pytest.raises(DataError, match=r"images.*8.*got 7"):
        convert_pretrained(vision, tmp_path / "out", QUICK, images=few)
    with pytest.raises(ArgumentError, match=r"max_length.*images.*got 16"):
        convert_pretrained(vision, tmp_path / "out", Recipe(max_length=16), images=[images])
    source = shutil.copytree(vision, tmp_path / "source")
    (source / "preprocessor_config.json").write_text("{")
    with pytest.raises(StorageError, match=r"read.*image processor"):
        load_pretrained(source)
    (source / "preprocessor_config.json").unlink()
    with pytest.raises(StorageError, match=r"image processor.*pre.*\.json"):
        convert_pretrained(source, tmp_path / "out", QUICK, images=[images])
    whole = json.loads((vision / "preprocessor_config.json").read_text())
    (source / "preprocessor_config.json").write_text(json.dumps(whole | {"do_resize": False}))
    with pytest.raises(DataError, match=r"image processor.*batch"):
        convert_pretrained(source, tmp_path / "out", QUICK, images=[images])
    assert not (tmp_path / "out").exists()


def test_a_model_of_another_input_is_refused(tmp_path: Path) -> None:
    from transformers import TimeSeriesTransformerConfig

    TimeSeriesTransformerConfig(architectures=["TimeSeriesTransformerModel"]).save_pretrained(
        tmp_path / "series"
    )
    with pytest.raises(ArgumentError, match="TimeSeriesTransformerModel takes past_values"):
        convert_pretrained(tmp_path / "series", tmp_path / "out", QUICK)


def test_a_pooler_that_is_random_is_not_measured(images: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = save(
        ViTModel(ViTConfig(**SIZE, intermediate_size=64), add_pooling_layer=False),
        tmp_path / "source",
    )
    loaded = load_pretrained(source)
    assert loaded.model.pooler is None
    assert "Do not use the pooler" in loaded.remarks[0]
    report = convert_pretrained(source, tmp_path / "out", QUICK, images=[images])
    assert report.output.kind == "encoder"
    assert not any(
        "pooler" in name for name in load_pretrained(tmp_path / "out" / "model").model.state_dict()
    )


def test_the_loss_of_images_is_that_of_the_class_token() -> None:
    batch = {"pixel_values": torch.zeros(4, 3, 8, 8)}
    theirs = {"last_hidden_state": torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))}
    ours = copy.deepcopy(theirs)
    ours["last_hidden_state"][:, 1:] += 1
    assert output_loss(ours, theirs, batch) == 0
    ours["last_hidden_state"][:, 0] = theirs["last_hidden_state"][:, 0].mean(0)
    assert output_loss(ours, theirs, batch) == pytest.approx(1, abs=1e-5)
    # Texts are compared by the mean.
    assert output_loss(ours, theirs, {}) > 0.1


def test_distillation_and_inspection_take_images(
    vision: Path, images: Path, converted: tuple[Path, ModelReport], tmp_path: Path
) -> None:
    recipe = Recipe(**{**vars(QUICK), "steps": 20, "lr": 1e-3})
    _, plain = converted
    report = convert_pretrained(vision, tmp_path / "out", recipe, images=[images], quiet=True)
    assert report.meta["stages"]["distill"]["samples"] == 80
    assert report.output.cosine_mean > plain.output.cosine_mean
    found = inspect_pretrained(vision, Recipe(batch=4), images=[images], samples=8)
    assert len(found.sites) == 5
    assert found.meta["images_held_out"] == 8


def test_the_command_line_takes_images(
    vision: Path,
    images: Path,
    tmp_path: Path,
    status: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick = ["--batch", 4, "--refine", 0, "--held-out", 6, "--json"]
    files = [word for i in range(12) for word in ("--images", images / f"{i:02}.png")]
    assert status("convert", vision, tmp_path / "out", *quick, *files) == 0
    assert json.loads(capsys.readouterr().out)["output"]["samples"] == 6
    assert status("convert", vision, tmp_path / "new", *quick) == 2
    assert "--images must be given for Dinov2Model, got none" in capsys.readouterr().err
    assert status("fold", vision, tmp_path / "folded") == 0
    assert (tmp_path / "folded" / "model" / "preprocessor_config.json").is_file()


def test_in_python_a_model_of_images_gets_one_constant_per_layer_and_many_witnesses(
    vision: Path,
) -> None:
    model = load_pretrained(vision).model
    batches = [{"pixel_values": torch.randn(2, 3, 32, 32)} for _ in range(4)]
    report = convert_model(model, batches, refine=0)
    assert report.output.neighbours is None
    assert {layer.get_parameter("log_beta").numel() for layer in dynorm_layers(model).values()} == {
        1
    }
    # At most a third of the channels.
    for layer in dynorm_layers(model).values():
        assert 0 < len(layer.witness_channels) <= max(4, layer.channels // 3)
