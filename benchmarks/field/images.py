"""ImageNet: k-NN and a linear classifier on the frozen features of an encoder of images."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot
from torch.utils.data import DataLoader, Dataset

from benchmarks.field.pair import Figure, Result, of_both
from dynorm.errors import ArgumentError, DataError, require_library
from dynorm.jobs.checkpoint import Pretrained, load_pretrained
from dynorm.jobs.images import Crop

LAYOUT = "a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG, as torchvision's ImageFolder reads"
ENDINGS = (".jpg", ".jpeg", ".png")
# Neighbours, and the temperature of their votes, as in the k-NN of DINO and DINOv2.
NEIGHBOURS = 20
TEMPERATURE = 0.07
# Images that are looked up at a time.
CHUNK = 256
# The linear classifier is trained for this number of passes over the images, and at least this
# number of steps.
EPOCHS = 10
STEPS = 1000
LINEAR_BATCH = 1024
RATE = 1e-3


def add_options(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--data", type=Path, required=True, help=LAYOUT)
    parser.add_argument("--per-class", type=int, help="images of a class in train at most")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=8, help="processes that read images")


@dataclass(frozen=True)
class Images(Dataset[tuple[Tensor, int]]):
    """Image files with the numbers of their classes, read by a model's processor."""

    files: list[Path]
    labels: list[int]
    processor: Any

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Crop(self.files[index]).read()
        processed = self.processor(image, return_tensors="pt")
        return processed["pixel_values"][0], self.labels[index]


def run(sources: tuple[str, str], options: Namespace) -> Result:
    """Return the accuracies of both models, and the class that lost most by k-NN."""
    require_library("PIL.Image", "reading images", "plots")
    names = class_names(options.data)
    load = partial(load_pretrained, device=options.device)
    measure = partial(answers, options=options, names=names)
    original, converted = of_both(load, measure, sources)
    figures = []
    for method in ("k-NN", "linear"):
        before = float(original[method].double().mean())
        after = float(converted[method].double().mean())
        figures.append(Figure(f"{method}, top-1 accuracy", before, after, True))
    parts = []
    for number, name in enumerate(names):
        of_class = original["labels"] == number
        before = float(original["k-NN"][of_class].double().mean())
        after = float(converted["k-NN"][of_class].double().mean())
        parts.append(Figure(f"class {name}, k-NN accuracy", before, after, True))
    facts = {
        "data": options.data.name,
        "classes": len(names),
        "train": original["train"],
        "val": len(original["labels"]),
        "neighbours": original["neighbours"],
    }
    return Result(figures, parts, facts)


def class_names(data: Path) -> list[str]:
    """Return the classes, the sorted folders of train; val must have the same ones."""
    classes = {}
    for part in ("train", "val"):
        folder = data / part
        if not folder.is_dir():
            raise DataError(f"the data must be {LAYOUT}, but there is no folder {folder}")
        folders = [path for path in folder.iterdir() if path.is_dir()]
        classes[part] = sorted(path.name for path in folders)
    train = classes["train"]
    val = classes["val"]
    if len(train) < 2 or train != val:
        raise DataError(
            f"the data must be {LAYOUT}, with the same two or more classes in both, but train has "
            f"{len(train)} and val {len(val)}, of which {len(set(train) & set(val))} are the same"
        )
    return train


@torch.inference_mode(False)
def answers(pretrained: Pretrained, options: Namespace, names: list[str]) -> dict[str, Any]:
    """Return for each image of val whether each method has its class right."""
    train, train_labels = features(pretrained, options, "train", names, options.per_class)
    val, labels = features(pretrained, options, "val", names, None)
    neighbours = min(NEIGHBOURS, len(train))
    return {
        "k-NN": by_neighbours(train, train_labels, val, neighbours) == labels,
        "linear": by_classifier(train, train_labels, val, len(names)) == labels,
        "labels": labels,
        "train": len(train),
        "neighbours": neighbours,
    }


@torch.no_grad()
def features(
    pretrained: Pretrained,
    options: Namespace,
    part: str,
    names: list[str],
    most: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the class token of each image as the model pools it, and the numbers of the classes."""
    files: list[Path] = []
    labels: list[int] = []
    for number, name in enumerate(names):
        folder = options.data / part / name
        images = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
        if not images:
            raise DataError(
                f"each class must have images ({', '.join(ENDINGS)}): {folder} has none"
            )
        images = images[:most]
        files += images
        labels += [number] * len(images)
    images = Images(files, labels, pretrained.tokenizer)
    model = pretrained.model
    device = next(model.parameters()).device
    rows = []
    for pixels, _ in DataLoader(images, options.batch, num_workers=options.workers):
        output = model(pixel_values=pixels.to(device))
        rows.append(_class_token(output).float().cpu())
    return torch.cat(rows), torch.tensor(labels)


def _class_token(output: Any) -> Tensor:
    """Return the pooled output of an encoder, or its first token."""
    pooled = getattr(output, "pooler_output", None)
    if pooled is not None:
        return pooled
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        raise ArgumentError(
            "the models must be encoders of images without a head, such as Dinov2Model, but one "
            f"returns {type(output).__name__}"
        )
    return hidden[:, 0]


def by_neighbours(train: Tensor, labels: Tensor, val: Tensor, neighbours: int) -> Tensor:
    """Return the class with most votes of the nearest images, each weighted by its similarity."""
    known = normalize(train, dim=1)
    votes_of = one_hot(labels).to(known)
    classes = []
    for part in normalize(val, dim=1).split(CHUNK):
        similarity, nearest = (part @ known.T).topk(neighbours)
        weight = (similarity / TEMPERATURE).exp()
        votes = (weight[..., None] * votes_of[nearest]).sum(1)
        classes.append(votes.argmax(1))
    return torch.cat(classes)


def by_classifier(train: Tensor, labels: Tensor, val: Tensor, classes: int) -> Tensor:
    """Return the classes by a linear classifier that is trained on the features, seeded."""
    center = train.mean(0)
    spread = train.std(0).clamp_min(1e-6)
    train = (train - center) / spread
    val = (val - center) / spread
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(train.shape[1], classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.AdamW(head.parameters(), RATE)
    in_a_pass = math.ceil(len(train) / LINEAR_BATCH)
    for _ in range(max(EPOCHS, math.ceil(STEPS / in_a_pass))):
        order = torch.randperm(len(train), generator=generator)
        for index in order.split(LINEAR_BATCH):
            optimizer.zero_grad()
            cross_entropy(head(train[index]), labels[index]).backward()
            optimizer.step()
    with torch.no_grad():
        return head(val).argmax(1)
