"""The benchmarks that others publish figures of, on tiny models and made-up data.

The evaluators are stand-ins with the signatures of lm-evaluation-harness 0.4.13 (commit 4e7e0d47f) and
mteb 2.20.0 (commit a905523d0), as read in their sources, so an argument that they do not take fails here.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model

import dynorm
from benchmarks.field import table, text
from benchmarks.field.__main__ import BENCHMARKS, main
from benchmarks.field.images import by_classifier, by_neighbours
from benchmarks.field.pair import Figure, worst
from dynorm.jobs.checkpoint import load_pretrained
from tests.jobs.conftest import TEXTS, save, tiny_bert
from tests.jobs.test_images import PROCESSOR, SIZE

Pair = tuple[Path, Path]
Run = Callable[..., dict[str, Any]]


def converted(folder: Path, batch: dict[str, torch.Tensor], out: Path) -> Path:
    """Replace the norms of a saved model and save it, with the other files of its folder."""
    pretrained = load_pretrained(folder)
    model = pretrained.model
    dynorm.convert_(model, dynorm.find_norms(model, **batch))
    dynorm.calibrate_(model, [batch])
    model.save_pretrained(out)
    pretrained.tokenizer.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def language_models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("language")
    config = GPT2Config(
        vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=2
    )  # fmt: skip
    original = save(GPT2LMHeadModel(config), folder / "original")
    batch = {"input_ids": torch.randint(3, 256, (16, 32))}
    return original, converted(original, batch, folder / "converted")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from transformers import BertModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoders")
    original = save(BertModel(tiny_bert()), folder / "original")
    batch = {"input_ids": torch.randint(3, 256, (16, 16))}
    return original, converted(original, batch, folder / "converted")


@pytest.fixture(scope="module")
def vision_models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vision")
    Dinov2Model(Dinov2Config(**SIZE, mlp_ratio=2)).save_pretrained(folder / "original")
    (folder / "original" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    batch = {"pixel_values": torch.randn(16, 3, 32, 32)}
    return folder / "original", converted(folder / "original", batch, folder / "converted")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the command, and returns the row that it wrote."""

    def ran(name: str, pair: Pair, *words: object) -> dict[str, Any]:
        out = tmp_path / "field.json"
        main([name, *map(str, pair), "--out", str(out), *map(str, words)])
        [row] = json.loads(out.read_text("utf-8"))["rows"]
        assert row["benchmark"] == name
        assert (row["original"], row["converted"]) == tuple(map(str, pair))
        return dict(row)

    return ran


def fails(*words: object) -> str:
    """Run the command, which must fail without a traceback, and return its message."""
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, words), "--out", "unused.json"])
    assert not Path("unused.json").exists()
    assert isinstance(stopped.value.code, str)
    return stopped.value.code


# A text on which losses can be computed by hand.


def own_losses(folder: Path, ids: np.ndarray, length: int) -> list[float]:
    """Return the mean loss of each block, one token at a time."""
    model = load_pretrained(folder).model
    losses = []
    for start in range(0, len(ids) - length, length):
        block = torch.from_numpy(ids[start : start + length + 1].astype(np.int64))
        nats = []
        for position in range(length):
            with torch.no_grad():
                logits = model(block[None, : position + 1]).logits[0, -1]
            nats.append(float(-logits.double().log_softmax(0)[block[position + 1]]))
        losses.append(sum(nats) / length)
    return losses


def test_the_loss_of_a_file_of_tokens(language_models: Pair, run: Run, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(3, 250, 5 * 8 + 1).astype(np.uint16)
    ids.tofile(tmp_path / "val.bin")
    row = run("openwebtext", language_models, "--data", tmp_path / "val.bin", "--length", 8)
    before, after = (own_losses(folder, ids, 8) for folder in language_models)
    loss, perplexity = row["figures"]
    assert loss["original"] == pytest.approx(np.mean(before), abs=1e-5)
    assert loss["converted"] == pytest.approx(np.mean(after), abs=1e-5)
    assert loss["difference"] == pytest.approx(np.mean(after) - np.mean(before), abs=2e-5)
    assert perplexity["original"] == pytest.approx(math.exp(np.mean(before)), rel=1e-5)
    grown = np.array(after) - np.array(before)
    assert row["worst"]["name"] == f"block {grown.argmax()}, nats per token"
    assert row["worst"]["difference"] == pytest.approx(grown.max(), abs=2e-5)
    error = grown.std(ddof=1) / math.sqrt(5)
    assert row["standard_error_of_the_difference"] == pytest.approx(error, abs=1e-5)
    assert (row["blocks"], row["length"], row["data"]) == (5, 8, "val.bin")


def test_a_text_file_is_tokenized_by_the_model(
    language_models: Pair, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "val.txt").write_text("\n\n".join(TEXTS[:8]), "utf-8")
    row = run("openwebtext", language_models, "--data", tmp_path / "val.txt", "--length", 16)
    tokenizer = load_pretrained(language_models[0]).tokenizer
    ids = tokenizer("\n\n".join(TEXTS[:8]), add_special_tokens=False)["input_ids"]
    np.array(ids, np.uint16).tofile(tmp_path / "val.bin")
    again = run("openwebtext", language_models, "--data", tmp_path / "val.bin", "--length", 16)
    assert again["figures"] == row["figures"]


def test_blocks_are_spread_evenly() -> None:
    blocks = text.blocks_of(np.arange(101), 10, 4)
    assert blocks[:, 0].tolist() == [0, 30, 60, 90]
    assert blocks[-1].tolist() == list(range(90, 101))
    assert len(text.blocks_of(np.arange(100), 10, 100)) == 9


def test_a_text_that_cannot_be_used_is_refused(
    language_models: Pair, encoders: Pair, tmp_path: Path
) -> None:
    file = tmp_path / "val.bin"
    base = ("openwebtext", *language_models, "--data")
    assert "prepare.py writes val.bin, but" in fails(*base, file)
    np.arange(300, dtype=np.uint16).tofile(file)
    assert "below the model's vocabulary of 256" in fails(*base, file, "--length", 8)
    assert "must fill two blocks of 32 tokens" in fails(*base, short(tmp_path), "--length", 32)
    assert "at most the model's 32 positions, got 64" in fails(*base, file, "--length", 64)
    file.write_bytes(b"\x00" * 33)
    assert "half a token" in fails(*base, file, "--length", 8)
    words = ("openwebtext", *encoders, "--data", short(tmp_path), "--length", 8)
    assert "must be language models, got BertModel" in fails(*words)
    assert "must be at least 2" in fails(*base, file, "--blocks", 1)


def short(folder: Path) -> Path:
    np.arange(40, dtype=np.uint16).tofile(folder / "short.bin")
    return folder / "short.bin"


# ImageNet.


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Three classes of one colour each, with noise."""
    draw = np.random.default_rng(0)
    colours = {"n01": (200, 40, 40), "n02": (40, 200, 40), "n03": (40, 40, 200)}
    for part, count in (("train", 8), ("val", 4)):
        for name, colour in colours.items():
            folder = tmp_path / "imagenet" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                noise = draw.integers(-30, 30, (40, 48, 3))
                pixels = (np.array(colour) + noise).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.JPEG")
    return tmp_path / "imagenet"


def test_both_models_see_the_classes(vision_models: Pair, run: Run, imagenet: Path) -> None:
    row = run("imagenet", vision_models, "--data", imagenet, "--workers", 0, "--batch", 5)
    names = [figure["name"] for figure in row["figures"]]
    assert names == ["k-NN, top-1 accuracy", "linear, top-1 accuracy"]
    assert row["figures"][0]["original"] == 1.0
    assert row["figures"][0]["converted"] >= 0.75
    assert (row["classes"], row["train"], row["val"], row["neighbours"]) == (3, 24, 12, 20)
    assert row["worst"]["name"].startswith("class n0")
    few = run("imagenet", vision_models, "--data", imagenet, "--workers", 0, "--per-class", 2)
    assert (few["train"], few["val"], few["neighbours"]) == (6, 12, 6)


def test_a_class_that_is_lost_is_the_worst(
    vision_models: Pair, run: Run, imagenet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.field import images

    answers = images.answers

    def without_a_class(pretrained: Any, options: Any, names: list[str]) -> dict[str, Any]:
        right = answers(pretrained, options, names)
        if pretrained.source == vision_models[1]:
            right["k-NN"] = right["labels"] != 1
        return right

    monkeypatch.setattr(images, "answers", without_a_class)
    row = run("imagenet", vision_models, "--data", imagenet, "--workers", 0)
    assert row["worst"]["name"] == "class n02, k-NN accuracy"
    assert (row["worst"]["original"], row["worst"]["converted"]) == (1.0, 0.0)
    assert row["figures"][0]["converted"] == pytest.approx(2 / 3, abs=1e-6)


def test_the_neighbours_vote_by_their_similarity() -> None:
    train = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8], [-1.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 2])
    val = torch.tensor([[2.0, 0.0]])
    # One neighbour of similarity 1, two of .6: exp(1 / .07) is above 2 exp(.6 / .07).
    assert by_neighbours(train, labels, val, 3).tolist() == [0]
    # Two of similarity .98 outvote it: exp(.02 / .07) is below 2.
    train[1:3] = torch.tensor([[0.98, 0.199], [0.98, -0.199]])
    assert by_neighbours(train, labels, val, 3).tolist() == [1]


def test_the_classifier_learns_a_direction_that_neighbours_miss() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2000, 16, generator=generator)
    features[:, 1:] *= 10
    labels = (features[:, 0] > 0).long()
    train, val = features[:1500], features[1500:]
    accuracy = (by_classifier(train, labels[:1500], val, 2) == labels[1500:]).float().mean()
    neighbours = (by_neighbours(train, labels[:1500], val, 20) == labels[1500:]).float().mean()
    assert accuracy > 0.8
    assert neighbours < 0.65


def test_another_layout_is_refused(
    vision_models: Pair,
    language_models: Pair,
    imagenet: Path,
) -> None:
    words = ("imagenet", *vision_models, "--workers", 0, "--data")
    assert "there is no folder" in fails(*words, imagenet / "train")
    for file in (imagenet / "val" / "n03").iterdir():
        file.unlink()
    assert "n03 has none" in fails(*words, imagenet)
    (imagenet / "val" / "n03").rmdir()
    assert "train has 3 and val 2, of which 2 are the same" in fails(*words, imagenet)


# lm-eval and MTEB, by stand-ins.


def lm_eval_module() -> tuple[ModuleType, ModuleType]:
    """Return stand-ins of lm_eval and lm_eval.models.huggingface: two tasks, computed by the model."""
    package = ModuleType("lm_eval")
    wrappers = ModuleType("lm_eval.models.huggingface")

    class HFLM:
        def __init__(
            self, pretrained: Any, backend: Any = "default", revision: Any = "main",
            subfolder: Any = "", tokenizer: Any = None, truncation: Any = False,
            logits_cache: Any = True, max_length: Any = None, device: Any = "cuda",
            dtype: Any = "auto", softmax_dtype: Any = None, mixed_precision_dtype: Any = None,
            batch_size: Any = 1, max_batch_size: Any = 64, trust_remote_code: Any = False,
        ) -> None:  # fmt: skip
            assert isinstance(batch_size, int)
            assert device == "cpu"
            self.model = pretrained
            self.tokenizer = tokenizer

    def simple_evaluate(
        model: Any, model_args: Any = None, tasks: Any = None, num_fewshot: Any = None,
        batch_size: Any = None, max_batch_size: Any = None, device: Any = None,
        use_cache: Any = None, cache_requests: Any = False, rewrite_requests_cache: Any = False,
        delete_requests_cache: Any = False, limit: Any = None, samples: Any = None,
        bootstrap_iters: int = 100000, check_integrity: Any = False, write_out: Any = False,
        log_samples: Any = True, evaluation_tracker: Any = None, system_instruction: Any = None,
        apply_chat_template: Any = False, fewshot_as_multiturn: Any = True, gen_kwargs: Any = None,
        task_manager: Any = None, verbosity: Any = None, predict_only: Any = False,
        random_seed: int = 0, numpy_random_seed: int = 1234, torch_random_seed: int = 1234,
        fewshot_random_seed: int = 1234, confirm_run_unsafe_code: Any = False, metadata: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        assert isinstance(model, HFLM)
        assert (num_fewshot, limit) == (0, 7)
        ids = torch.tensor([model.tokenizer(TEXTS[0])["input_ids"][:16]])
        with torch.no_grad():
            loss = float(model.model(ids, labels=ids).loss)
        results = {}
        for number, task in enumerate(tasks):
            results[task] = {
                "name": task,
                "alias": task,
                "sample_len": 7,
                "acc,none": (number + 1) / loss,
                "acc_stderr,none": "N/A",
                "perplexity,none": math.exp(loss),
                "exact_match,strict-match": 0.5,
            }
        directions = {"acc": True, "perplexity": False, "exact_match": None}
        return {
            "results": results,
            "higher_is_better": {task: dict(directions) for task in tasks},
            "lm_eval_version": "0.4.13",
        }

    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    wrappers.HFLM = HFLM  # type: ignore[attr-defined]
    return package, wrappers


def test_the_harness_evaluates_both_models(
    language_models: Pair, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, wrappers = lm_eval_module()
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.models", ModuleType("lm_eval.models"))
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", wrappers)
    row = run("lm-eval", language_models, "--tasks", "one", "two", "--limit", 7)
    figures = {figure["name"]: figure for figure in row["figures"]}
    assert list(figures) == [
        *("one acc", "one perplexity", "one exact_match,strict-match"),
        *("two acc", "two perplexity", "two exact_match,strict-match"),
    ]
    losses = []
    for folder in language_models:
        pretrained = load_pretrained(folder)
        ids = torch.tensor([pretrained.tokenizer(TEXTS[0])["input_ids"][:16]])
        with torch.no_grad():
            losses.append(float(pretrained.model(ids, labels=ids).loss))
    before, after = losses
    assert before != after
    assert figures["two acc"]["original"] == pytest.approx(2 / before, abs=1e-5)
    assert figures["two acc"]["converted"] == pytest.approx(2 / after, abs=1e-5)
    assert figures["one perplexity"]["converted"] == pytest.approx(math.exp(after), rel=1e-4)
    assert figures["two exact_match,strict-match"]["higher_is_better"] is None
    # The task that lost most, among the accuracies: the second has twice the difference.
    assert row["worst"]["name"] == ("two acc" if after > before else "one acc")
    assert row["evaluator"] == "0.4.13"


class Mteb(ModuleType):
    """Stands in for mteb: the similarity of two texts is the score of a task."""

    __version__ = "2.20.0"

    def get_tasks(
        self, tasks: Any = None, languages: Any = None, script: Any = None, domains: Any = None,
        task_types: Any = None, categories: Any = None, exclude_superseded: Any = True,
        eval_splits: Any = None, exclusive_language_filter: Any = False, modalities: Any = None,
        exclusive_modality_filter: Any = False, exclude_aggregate: Any = False,
        exclude_private: Any = True, *, exclude_beta: Any = True,
    ) -> tuple[str, ...]:  # fmt: skip
        return tuple(tasks)

    def get_benchmark(self, benchmark_name: str) -> tuple[str, ...]:
        assert benchmark_name == "MTEB(eng, v2)"
        return ("a", "b", "c")

    def evaluate(
        self, model: Any, tasks: Any, *, co2_tracker: Any = None, raise_error: Any = True,
        encode_kwargs: Any = None, cache: Any = "default", overwrite_strategy: Any = "only-missing",
        prediction_folder: Any = None, show_progress_bar: Any = True, public_only: Any = None,
        num_proc: Any = None, timer: Any = None,
    ) -> SimpleNamespace:  # fmt: skip
        # The cache would give the original's scores to a conversion of the same name.
        assert cache is None
        results = []
        for number, task in enumerate(tasks):
            pair = model.encode([TEXTS[number], TEXTS[number + 1]], **encode_kwargs)
            score = float(np.dot(*pair) / np.linalg.norm(pair[0]) / np.linalg.norm(pair[1]))
            results.append(SimpleNamespace(task_name=task, get_score=lambda score=score: score))
        return SimpleNamespace(task_results=results)


@pytest.mark.parametrize("words", [("--tasks", "a", "b", "c"), ("--benchmark", "MTEB(eng, v2)")])
def test_mteb_scores_both_models(
    words: tuple[str, ...], encoders: Pair, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mteb", Mteb("mteb"))
    row = run("mteb", encoders, *words)
    mean, *figures = row["figures"]
    assert [figure["name"] for figure in figures] == ["a", "b", "c"]
    assert mean["name"] == "mean"
    assert mean["original"] == pytest.approx(np.mean([f["original"] for f in figures]), abs=2e-6)
    assert any(figure["difference"] != 0 for figure in figures)
    lost = min(figures, key=lambda figure: figure["difference"])
    assert row["worst"]["name"] == lost["name"]
    assert row["evaluator"] == "2.20.0"


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("lm-eval", "lm_eval", "lm-eval>=0.4.9"), ("mteb", "mteb", "mteb>=2")],
)
def test_a_missing_package_is_named(
    name: str,
    module: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    message = fails(name, "missing/original", "missing/converted")
    assert f"{module} must be installed" in message
    assert f"pip install '{package}'" in message


# The results.


def test_a_result_replaces_that_of_the_same_models(
    language_models: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.random.default_rng(0).integers(3, 250, 60).astype(np.uint16).tofile(tmp_path / "val.bin")
    out = tmp_path / "field.json"
    words = ["--data", str(tmp_path / "val.bin"), "--length", "8", "--out", str(out)]
    first, second = map(str, language_models)
    main(["openwebtext", first, second, *words])
    main(["openwebtext", first, first, *words])
    main(["openwebtext", first, second, *words, "--blocks", "3"])
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["blocks"] for row in rows] == [7, 3]
    assert rows[0]["figures"][0]["difference"] == 0.0
    monkeypatch.setattr(table, "RESULTS", out)
    lines = table.field_table().splitlines()
    assert len(lines) == 2 + len(BENCHMARKS) + 1
    [measured] = [line for line in lines if f"{second}<br>" in line]
    assert f"{rows[1]['figures'][0]['converted']:.4g}" in measured
    assert sum("not measured here" in line for line in lines) == len(BENCHMARKS) - 1


def test_the_table_has_every_benchmark() -> None:
    assert table.ABOUT.keys() == BENCHMARKS.keys()


def test_the_worst_is_the_one_that_lost_most() -> None:
    fell = Figure("accuracy", 0.9, 0.5, True)
    grew = Figure("loss", 1.0, 1.3, False)
    better = Figure("loss", 2.0, 1.0, False)
    unknown = Figure("length", 1.0, 9.0, None)
    assert worst([grew, better, unknown]) is grew
    assert worst([grew, fell, better]) is fell
