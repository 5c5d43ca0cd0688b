"""FlashNorm: fold the weights of RMSNorms in the files of a checkpoint, one file at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dynorm.dtypes import HALVES
from dynorm.errors import ModelError, StorageError, readable
from dynorm.files import write_text
from dynorm.find import find_norms
from dynorm.fold import FoldReport
from dynorm.fold.fold import require_foldable, traced
from dynorm.fold.graph import Slot
from dynorm.fold.operators import Reader
from dynorm.fold.plan import Options, decide_affine
from dynorm.fold.report import FOLDED, NOTHING
from dynorm.fold.site import SiteFold
from dynorm.fold.trace import Graph
from dynorm.jobs.checkpoint import Checkpoint, example_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of the example, on whose number the graph does not depend: a model may be large.
_LENGTH = 2
_INDEX = "model.safetensors.index.json"

Change = Callable[[Tensor], Tensor]


def fold_files(
    checkpoint: Checkpoint, *, untie: bool
) -> tuple[PreTrainedModel, FoldReport, Callable[[Path], None]]:
    """Fold the weights of the RMSNorms in a checkpoint's files, one file at a time.

    The graph of a sketch of the model decides which. Returned are the sketch, the report, and the
    function that writes the files into a folder.
    """
    files = WeightFiles(checkpoint.source)
    if checkpoint.kind != "texts":
        raise ModelError(
            f"with --format a model must take texts, but {checkpoint.source} takes "
            f"{checkpoint.takes}: fold it without --format"
        )
    if getattr(checkpoint.config, "quantization_config", None):
        raise ModelError(
            f"a model must be folded before it is quantized, but {checkpoint.source} has a "
            "quantization_config: fold the original"
        )
    model = _sketch(files, checkpoint)
    require_foldable(model)
    tokens = example_of(model, checkpoint.kind)
    example = {name: ids[:, :_LENGTH] for name, ids in tokens.items()}
    sites = find_norms(model, **example)
    chosen = []
    for site in sites:
        if site.kind == "rmsnorm" and site.bias_name is None:
            chosen.append(site.path)
    if not chosen:
        raise ModelError(
            f"with --format a model must have RMSNorms, but {type(model).__name__} has none: fold it "
            "without --format"
        )
    options = Options(affine=True, untie=untie)
    graph, folds = traced(model, ((), example), sites, chosen, options)
    decide_affine(graph, folds, options)
    untied = files.change_as(graph, folds)
    # Layers that the class leaves out may have norms that an engine computes.
    if files.file_of.keys() <= model.state_dict().keys():
        files.config |= _marks(folds, model.config.get_text_config().hidden_size)
    return model, FoldReport([fold.row() for fold in folds], untied=untied), files.save


class WeightFiles:
    """The safetensors of a checkpoint, and the changes with which they are written again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        # For the name of a stored tensor, the tensors to write in its place.
        self.changes: dict[str, dict[str, Change]] = {}
        self.config: dict[str, object] = {}
        self.documents: dict[str, dict[str, object]] = {}
        with readable(f"{folder} must hold safetensors"):
            for path in sorted(folder.glob("model*.safetensors")):
                with safe_open(path, "pt") as file:
                    self.file_of |= dict.fromkeys(file.keys(), path)
            for name in ("config.json", _INDEX):
                if (folder / name).is_file():
                    self.documents[name] = json.loads((folder / name).read_text("utf-8"))
        if not self.file_of:
            raise StorageError(
                f"{folder} must be a folder with model*.safetensors, but has none: load it with "
                "from_pretrained (with gguf_file= if that is what it is), and save it with "
                "save_pretrained"
            )

    def change_as(self, graph: Graph, folds: Sequence[SiteFold]) -> list[str]:
        """Plan the changes that a fold decides on, and return the names of the untied tensors."""
        changed: dict[Slot, Change] = {}
        for fold in folds:
            if fold.is_absorbed and fold.weight is not None:
                part = fold.affine_parts["weight"]
                own = graph.slots[part.tensor]
                changed[own] = partial(torch.full_like, fill_value=part.neutral)
                for slot, reader in fold.readers.items():
                    changed[slot] = partial(_scaled, slot.name, reader, fold.weight)
        first = {slot: tie[0] for tie in graph.ties for slot in tie}
        if changed.keys().isdisjoint(first):
            first = {}
        else:
            # A config says whether all weights are tied or none.
            self.config["tie_word_embeddings"] = False
        untied = [slot.name for slot in first if slot is not first[slot]]
        for slot in changed | first:
            source = slot.name
            # A stored head may differ from the embedding, although the config ties them.
            if source not in self.file_of:
                source = first[slot].name
            change = changed.get(slot, Tensor.clone)
            self.changes.setdefault(source, {})[slot.name] = change
        return untied

    def save(self, target: Path) -> None:
        """Write the files with their changes; the memory is that of one file."""
        target.mkdir()
        written: dict[str, str] = {}
        for path in dict.fromkeys(self.file_of.values()):
            tensors = {}
            with safe_open(path, "pt") as file:
                names: list[str] = file.keys()
                for name in names:
                    changes = self.changes.get(name, {name: torch.detach})
                    for new, change in changes.items():
                        tensors[new] = change(file.get_tensor(name))
            save_file(tensors, target / path.name, {"format": "pt"})
            written |= dict.fromkeys(tensors, path.name)
        index: dict[str, object] = {"weight_map": written}
        values = {"config.json": self.config, _INDEX: index}
        for name, old in self.documents.items():
            write_text(target / name, json.dumps(old | values[name], indent=2) + "\n")


def _sketch(files: WeightFiles, checkpoint: Checkpoint) -> PreTrainedModel:
    """Return a model with its true vectors, and matrices that repeat one row in no memory."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = checkpoint.auto.from_config(checkpoint.config)
    model.tie_weights()
    for name, parameter in list(model.named_parameters()):
        if name not in files.file_of:
            raise StorageError(
                f"{files.folder} must hold each weight by its name in {type(model).__name__}, but "
                f"has no {name}: a shard is missing, or the class stores other tensors than it "
                "has (fold it without --format)"
            )
        with safe_open(files.file_of[name], "pt") as file:
            stored = file.get_slice(name)
            shape: list[int] = stored.get_shape()
            if shape != list(parameter.shape):
                raise StorageError(
                    f"{name} must have the config's shape {list(parameter.shape)}, but has {shape} "
                    f"in {files.file_of[name]}: correct config.json"
                )
            values = stored[:1] if parameter.ndim > 1 else stored[:]
        path, _, leaf = name.rpartition(".")
        # A copy, because all tensors of a file share one memory.
        values = values.clone()
        # In half precision products with a repeated row take 30 times as long.
        if values.dtype in HALVES:
            values = values.float()
        values = values.expand(parameter.shape)
        setattr(model.get_submodule(path), leaf, nn.Parameter(values, requires_grad=False))
    model.tie_weights()
    return model.eval()


def _scaled(name: str, reader: Reader, factor: Tensor, weight: Tensor) -> Tensor:
    """Return the weight that takes a norm's; the product is exact enough to be rounded once."""
    wide = torch.float64 if weight.element_size() > 2 else torch.float32
    product = reader.scaled(weight.to(wide), factor.to(wide)).to(weight.dtype)
    if not product.isfinite().all():
        raise ModelError(
            f"{name} must be finite when it takes a norm's weight, but is not in {product.dtype}: "
            "save the model in bfloat16 or float32 first"
        )
    return product


def _marks(folds: Sequence[SiteFold], width: int) -> dict[str, bool]:
    """Return the keys by which engines know that the norms of the stream have no weight.

    With ``flash_norm`` only the last one may have one, the norm before the head.
    """
    kept = []
    for fold in folds:
        if fold.refused is not None or fold.site.normalized_shape == (width,):
            kept.append(fold.affine.state not in (FOLDED, NOTHING))
    return {"flashnorm_folded": not any(kept), "flash_norm": not any(kept[:-1])}
