"""The main job on tiny models: its files, its messages, and that bad input writes nothing."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import dynorm
from dynorm.cli import app, main
from dynorm.jobs.checkpoint import encode, load_pretrained, make_batches
from dynorm.jobs.convert import convert_pretrained
from dynorm.layers import AnnealedNorm
from dynorm.recipe import Recipe
from dynorm.replace.converted import dynorm_layers
from dynorm.report import ModelReport
from dynorm.train.callbacks import AnnealCallback
from dynorm.train.distill import distill_, distillation_rate

QUICK = Recipe(refine=4, held_out=16, max_length=16)


@dataclass(frozen=True)
class Converted:
    """A conversion by the quick recipe, for tests that only read it."""

    folder: Path
    report: ModelReport

    @property
    def without_meta(self) -> dict[str, object]:
        """The report without times."""
        return replace(self.report, meta={}).to_dict()


@pytest.fixture(scope="module")
def quick(encoder: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("quick")
    return Converted(folder, convert_pretrained(encoder, folder / "out", QUICK, texts=[texts]))


def test_writes_a_loadable_model_and_its_report(quick: Converted) -> None:
    report = quick.report
    out = quick.folder / "out"
    written = json.loads((out / "report.json").read_text())
    assert written == json.loads(json.dumps(report.to_dict()))
    assert len(written["sites"]) == 5
    assert written["output"]["samples"] == 16
    assert written["meta"]["stages"]["refine"]["steps"] == 4
    page = (out / "report.html").read_text()
    assert all(site["path"] in page for site in written["sites"])
    again = load_pretrained(out / "model")
    assert len(dynorm_layers(again.model)) == 5
    batch = again.tokenizer(["return the string"], return_tensors="pt")
    assert again.model(**batch).last_hidden_state.isfinite().all()


def test_the_report_is_the_same_for_the_same_seed(
    quick: Converted, encoder: Path, texts: Path, tmp_path: Path
) -> None:
    first = quick.report
    second = convert_pretrained(encoder, tmp_path / "b", QUICK, texts=[texts])
    assert quick.without_meta == Converted(tmp_path, second).without_meta
    other = convert_pretrained(
        encoder, tmp_path / "c", Recipe(**{**vars(QUICK), "seed": 1}), texts=[texts]
    )
    assert other.output != first.output
    half = convert_pretrained(
        encoder, tmp_path / "d", Recipe(**{**vars(QUICK), "bf16": True}), texts=[texts]
    )
    # Without a step of distillation, it is the refinement that was rounded.
    assert (
        first.output.cosine_mean
        != half.output.cosine_mean
        == pytest.approx(first.output.cosine_mean, rel=0.01)
    )


@pytest.mark.parametrize("stop", [{"steps": 60}, {"minutes": 1.0}])
def test_distillation_lessens_the_loss(
    quick: Converted,
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    stop: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A clock that goes on by a second each time it is asked, once a step: a busy machine fits no
    # fewer steps in.
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("dynorm.train.distill.time", clock)
    recipe = Recipe(**{**vars(QUICK), "lr": 3e-3, **stop})
    distilled = convert_pretrained(
        encoder, tmp_path / "distilled", recipe, texts=[texts], quiet=True
    )
    assert 40 <= distilled.meta["stages"]["distill"]["steps"] <= 60
    now, before = (
        [site.error_now for site in report.sites] for report in (distilled, quick.report)
    )
    assert sum(now) < 0.95 * sum(before)


# Of two steps one may well find that they made it worse.
@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_language_models_are_measured_by_their_loss(
    language_model: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = Recipe(**{**vars(QUICK), "steps": 2})
    report = convert_pretrained(language_model, tmp_path / "out", recipe, texts=[texts])
    assert report.output.kind == "language"
    assert report.output.loss_difference is not None
    assert len(report.sites) == 5
    # Texts are joined to blocks, of which the first tokens are continued by both models.
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(written["continuations"]) == min(16, report.output.samples)
    again = load_pretrained(tmp_path / "out" / "model")
    first = report.continuations[0]
    prompt = again.tokenizer(first.prompt, return_tensors="pt")["input_ids"]
    assert prompt.shape == (1, 8)
    found = again.model.generate(
        prompt, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0
    )
    assert again.tokenizer.decode(found[0, 8:]) == first.now
    assert 0 <= report.same <= 1
    assert "Likeliest continuations" in (tmp_path / "out" / "report.html").read_text()


def test_a_checkpoint_of_half_a_model_is_refused(
    language_model: Path, texts: Path, tmp_path: Path
) -> None:
    shutil.copytree(language_model, tmp_path / "half")
    weights = load_file(tmp_path / "half" / "model.safetensors")
    half = {name: value for name, value in weights.items() if "h.1" not in name}
    save_file(half, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        dynorm.errors.StorageError,
        match=r"weights of GPT2LMHeadModel.*transformer\.h\.1",
    ):
        convert_pretrained(tmp_path / "half", tmp_path / "out", QUICK, texts=[texts])
    with pytest.raises(dynorm.errors.ArgumentError, match=r"dtype.*auto"):
        load_pretrained(language_model, dtype="float17")
    assert load_pretrained(language_model, dtype="bfloat16").model.dtype == torch.bfloat16


def test_the_likeliest_tokens_are_those_whatever_the_model_would_generate(
    language_model: Path,
) -> None:
    pretrained, prompts = load_pretrained(language_model), [[5, 6, 7], [7, 6, 5]]
    plain = pretrained.greedy(pretrained.model, prompts, 4)
    own = pretrained.model.generation_config
    own.update(
        num_beams=2, num_return_sequences=2, return_dict_in_generate=True, stop_strings=["a"]
    )
    own.update(repetition_penalty=3.0, penalty_alpha=0.6, top_k=4)
    assert torch.equal(pretrained.greedy(pretrained.model, prompts, 4), plain)
    assert pretrained.model.generation_config is own


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_a_stopped_distillation_goes_on_from_its_checkpoint(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        **{**vars(QUICK), "steps": 4, "witnesses": 2, "checkpoints": str(tmp_path / "checkpoints")}
    )
    whole = convert_pretrained(encoder, tmp_path / "whole", recipe, texts=[texts])
    assert list((tmp_path / "checkpoints").glob("checkpoint-*"))
    longer = Recipe(**{**vars(recipe), "steps": 6})
    resumed = convert_pretrained(encoder, tmp_path / "resumed", longer, texts=[texts])
    assert whole.meta["stages"]["distill"]["steps"] == 4
    assert resumed.meta["stages"]["distill"]["steps"] == 6


def dynorm_channels(net: torch.nn.Module) -> int:
    (channels,) = {layer.channels for layer in dynorm_layers(net).values()}
    return channels


def test_a_student_on_the_path_is_distilled_to_its_end(encoder: Path, texts: Path) -> None:
    student = load_pretrained(encoder)
    teacher = copy.deepcopy(student.model)
    encoded = encode(student, texts.read_text("utf-8").split("\n\n"))
    batches = make_batches(student, encoded, 8)
    batch = batches[0]
    dynorm.convert_(student.model, dynorm.find_norms(student.model, **batch), to="annealed")
    for bad in (
        {"lr": -1e-3},
        {"lr": float("nan")},
        {"steps": 1.5},
        {"steps": None, "minutes": 0.0},
    ):
        with pytest.raises(dynorm.errors.ArgumentError, match=f"{list(bad)[-1]} must be"):
            distill_(student.model, batches, teacher=teacher, **{"steps": 10, **bad})
    with pytest.raises(dynorm.errors.DataError, match="one batch"):
        distill_(student.model, [], teacher=teacher, steps=1)
    callback = AnnealCallback(start=1, length=0.6)
    found = distill_(
        student.model, batches, teacher=teacher, steps=10, quiet=True, callbacks=[callback]
    )
    assert (
        found.lr
        == distillation_rate(student.model)
        == pytest.approx(1.5e-4 * 384 / dynorm_channels(student.model))
    )
    assert found.steps == 10
    assert {
        layer.position for layer in student.model.modules() if isinstance(layer, AnnealedNorm)
    } == {1.0}
    dynorm.finalize_(student.model)
    assert len(dynorm_layers(student.model)) == 5
    assert dynorm.measure(student.model, [batch], original=teacher).output.cosine_mean > 0.5


@pytest.mark.parametrize("most", [0, 1, 2])
def test_each_layer_may_have_so_many_witnesses(
    encoder: Path, texts: Path, tmp_path: Path, most: int
) -> None:
    recipe = Recipe(**{**vars(QUICK), "witnesses": most})
    report = convert_pretrained(encoder, tmp_path / "out", recipe, texts=[texts])
    assert report.meta["recipe"]["witnesses"] == most
    layers = dynorm_layers(load_pretrained(tmp_path / "out" / "model").model)
    for site in report.meta["stages"]["calibrate"]["sites"]:
        told = site["witnesses"]
        assert layers[site["path"]].witness_channels == (tuple(told["channels"]) if most else ())
    assert max(len(layer.witness_channels) for layer in layers.values()) == most


def test_each_site_may_get_its_own_layer(encoder: Path, texts: Path, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = Recipe(**{**vars(QUICK), "to": "auto", "tolerance": 10.0})
    report = convert_pretrained(encoder, tmp_path, recipe, texts=[texts], say=said.append)
    assert {(site.layer, site.witnesses) for site in report.sites} == {("linear", ())}
    fitted = report.meta["stages"]["calibrate"]
    assert fitted["tolerance"] == 10.0
    assert [len(site["errors"]) for site in fitted["sites"]] == [4] * len(report.sites)
    assert any("within 10 of the least" in line for line in said)
    assert f"{len(report.sites)} of them by linear layers that fold_ can remove" in (
        tmp_path / "report.html"
    ).read_text("utf-8")


def test_distillation_moves_the_gains(encoder: Path, texts: Path) -> None:
    student = load_pretrained(encoder)
    teacher = copy.deepcopy(student.model)
    encoded = encode(student, texts.read_text("utf-8").split("\n\n"))
    batch = make_batches(student, encoded, 8)[0]
    dynorm.convert_(student.model, dynorm.find_norms(student.model, **batch), witnesses=(0, 3))
    layers = dynorm_layers(student.model).values()
    before = [layer.get_parameter("log_gain").detach().clone() for layer in layers]
    distill_(student.model, [batch], teacher=teacher, steps=3)
    for layer, gain in zip(layers, before, strict=True):
        assert (layer.get_parameter("log_gain") != gain).all()
        assert layer.get_buffer("witnesses").tolist() == [0, 3]


def test_only_and_skip_choose_sites(encoder: Path, texts: Path, tmp_path: Path) -> None:
    recipe = Recipe(**{**vars(QUICK), "only": ("encoder.*",), "skip": ("*.attention.*",)})
    report = convert_pretrained(encoder, tmp_path / "out", recipe, texts=[texts])
    assert [site.path for site in report.sites] == [
        f"encoder.layer.{i}.output.LayerNorm" for i in range(2)
    ]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"to": "softmax"}, dynorm.errors.ArgumentError, "dyisru"),
        ({"to": "annealed_dyt"}, dynorm.errors.ArgumentError, "must be point-wise"),
        (
            {"steps": -1},
            dynorm.errors.ArgumentError,
            "steps.*got -1",
        ),
        (
            {"minutes": float("nan")},
            dynorm.errors.ArgumentError,
            "minutes.*got nan",
        ),
        (
            {"minutes": "5"},
            dynorm.errors.ArgumentError,
            "minutes.*got '5'",
        ),
        (
            {"seed": 2**32},
            dynorm.errors.ArgumentError,
            r"seed.*2\*\*32 - 1, got 4294967296",
        ),
        ({"steps": 1, "minutes": 1.0}, dynorm.errors.ArgumentError, "not both"),
        ({"lr": 0.0}, dynorm.errors.ArgumentError, "lr.*positive"),
        ({"lr": float("nan")}, dynorm.errors.ArgumentError, "lr.*positive"),
        (
            {"witnesses": -1},
            dynorm.errors.ArgumentError,
            "witnesses.*got -1",
        ),
        ({"witnesses": True}, dynorm.errors.ArgumentError, "least 0, got True"),
        ({"witnesses": "3"}, dynorm.errors.ArgumentError, "at least 0, got '3'"),
        ({"batch": 0}, dynorm.errors.ArgumentError, "batch.*least 1"),
        (
            {"tolerance": -0.1},
            dynorm.errors.ArgumentError,
            "tolerance.*got -0.1",
        ),
        (
            {"held_out": 1},
            dynorm.errors.ArgumentError,
            "held_out.*2, got 1",
        ),
        ({"only": ("nowhere.*",)}, dynorm.errors.ArgumentError, "nowhere"),
    ],
)
def test_bad_recipes_write_nothing(
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    changes: dict[str, object],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        convert_pretrained(
            encoder, tmp_path / "out", Recipe(**{**vars(QUICK), **changes}), texts=[texts]
        )
    assert not (tmp_path / "out").exists()


def test_bad_folders_are_refused_before_the_work(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(dynorm.errors.StorageError, match="can"):
            convert_pretrained(encoder, out, QUICK, texts=[texts])
    (tmp_path / "old" / "model").mkdir(parents=True)
    with pytest.raises(dynorm.errors.StorageError, match="--overwrite"):
        convert_pretrained(encoder, tmp_path / "old", QUICK, texts=[texts])
    # Somebody's folder, not a model's: known before the work, not after it.
    (tmp_path / "old" / "model" / "mine.txt").write_text("")
    with pytest.raises(dynorm.errors.StorageError, match=r"saved.*empty"):
        convert_pretrained(
            tmp_path / "nowhere", tmp_path / "old", QUICK, texts=[texts], overwrite=True
        )
    (tmp_path / "empty").mkdir()
    for model in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(dynorm.errors.StorageError, match=r"config\.json"):
            convert_pretrained(model, tmp_path / "out", QUICK, texts=[texts])
    (tmp_path / "empty" / "config.json").write_text("{}")
    # transformers 5.0 misses the tokenizer first.
    with pytest.raises(dynorm.errors.StorageError, match=r"transformers|tokenizer"):
        convert_pretrained(tmp_path / "empty", tmp_path / "out", QUICK, texts=[texts])


@pytest.mark.parametrize("inside", ["original", "."])
def test_a_source_in_the_output_folder_keeps_its_files(
    encoder: Path, texts: Path, tmp_path: Path, inside: str
) -> None:
    shutil.copytree(encoder, tmp_path / "out" / inside)
    for _ in range(2):
        convert_pretrained(
            tmp_path / "out" / inside, tmp_path / "out", QUICK, texts=[texts], overwrite=True
        )
        assert len(dynorm_layers(load_pretrained(tmp_path / "out" / "model").model)) == 5
    assert not (tmp_path / "out" / "model" / "model").exists()


def test_overwrite_replaces_the_old_model(encoder: Path, texts: Path, tmp_path: Path) -> None:
    convert_pretrained(encoder, tmp_path, QUICK, texts=[texts])
    # Of another model: with it, the new one's texts would be read by the wrong tokenizer.
    (tmp_path / "model" / "vocab.txt").write_text("old")
    convert_pretrained(
        encoder, tmp_path, Recipe(**{**vars(QUICK), "to": "dyt"}), texts=[texts], overwrite=True
    )
    kinds = {
        type(layer) for layer in dynorm_layers(load_pretrained(tmp_path / "model").model).values()
    }
    assert kinds == {dynorm.DyT}
    assert not (tmp_path / "model" / "vocab.txt").exists()


def command(*words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "dynorm", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command", [["convert", "a", "b"], ["inspect", "a"], ["fold", "a", "b"]], ids=lambda c: c[0]
)
def test_without_transformers_a_command_says_what_to_install(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, dynorm.errors.ArgumentError)
    assert "pip install 'dynorm[transformers]'" in str(error)


def test_without_matplotlib_nothing_is_begun(
    encoder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said: list[str] = []
    with pytest.raises(dynorm.errors.ArgumentError, match=r"pip install 'dynorm\[plots\]'"):
        convert_pretrained(encoder, tmp_path / "out", QUICK, texts=[texts], say=said.append)
    assert said == []
    assert not (tmp_path / "out").exists()


def test_the_command_line(
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick = ["--texts", texts, "--held-out", 16, "--max-length", 16, "--refine", 2]
    done = command("convert", encoder, tmp_path / "out", *quick, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["sites"]) == 5
    assert not report["meta"]["recipe"]["per_channel"]
    assert report["meta"]["recipe"]["witnesses"] is None
    layers = dynorm_layers(load_pretrained(tmp_path / "out" / "model").model).values()
    assert {layer.get_parameter("log_beta").numel() for layer in layers} == {1}
    # A third of 32 channels.
    assert max(len(layer.witness_channels) for layer in layers) == 10

    # The others run in this process, because a new one would load torch and transformers first.
    def status(*words: object) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["dynorm", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    code, _, said = status("convert", encoder, tmp_path / "out", *quick)
    assert code == 1
    assert said.startswith("dynorm: ")
    assert "--overwrite" in said
    code, printed, _ = status(
        "convert",
        encoder,
        tmp_path / "channel",
        *quick,
        "--per-channel",
        "--tolerance",
        0.02,
        "--json",
        "--witnesses",
        0,
    )
    assert code == 0
    recipe = json.loads(printed)["meta"]["recipe"]
    assert (recipe["per_channel"], recipe["tolerance"], recipe["witnesses"]) == (True, 0.02, 0)
    pure = dynorm_layers(load_pretrained(tmp_path / "channel" / "model").model).values()
    assert {layer.witness_channels for layer in pure} == {()}
    assert {layer.get_parameter("log_beta").numel() for layer in pure} == {32}
    code, _, said = status("convert", encoder, tmp_path / "new", *quick, "--witnesses", -1)
    assert (code, "witnesses must be an integer, at least 0, got -1" in said) == (2, True)
    assert status("convert", encoder, tmp_path / "new", *quick, "--to", "x")[0] == 2
    assert status("convert", encoder)[0] == 2


def test_help_has_an_example() -> None:
    assert "Example: dynorm convert" in CliRunner().invoke(app, ["convert", "--help"]).output
    assert dynorm.__version__ in CliRunner().invoke(app, ["--version"]).output


def test_torch_is_left_as_it_was(encoder: Path, texts: Path, tmp_path: Path) -> None:
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    convert_pretrained(encoder, tmp_path / "out", QUICK, texts=[texts])
    assert (torch.is_grad_enabled(), torch.get_num_threads()) == (grad, threads)


def test_the_recipe_is_saved_and_makes_the_same_model(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = QUICK.changed(sites={"embeddings.*": None, "*.attention.*": {"to": "dyt"}})
    lines: list[str] = []
    report = convert_pretrained(encoder, tmp_path / "a", recipe, texts=[texts], say=lines.append)
    saved = Recipe.load(tmp_path / "a" / "recipe.json")
    assert saved.to_dict() == report.meta["recipe"]
    assert str(saved) in lines
    assert (saved.witnesses, saved.lean, saved.max_length) == (None, 0.0, 16)
    file = str(tmp_path / "a" / "recipe.json")
    words = ["convert", str(encoder), str(tmp_path / "b"), "--texts", str(texts), "--json"]
    run = CliRunner().invoke(app, [*words, "--recipe", file])
    assert run.exit_code == 0, run.output
    assert Recipe.load(tmp_path / "b" / "recipe.json") == saved
    one = load_file(tmp_path / "a" / "model" / "model.safetensors")
    other = load_file(tmp_path / "b" / "model" / "model.safetensors")
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])


def test_a_recipe_with_an_annealed_layer_is_refused(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    for bad in ({"to": "annealed"}, {"sites": {"*.ln_f": {"to": "annealed"}}}):
        with pytest.raises(dynorm.errors.ArgumentError, match=r"'annealed'.*norm until"):
            convert_pretrained(encoder, tmp_path / "a", QUICK.changed(**bad), texts=[texts])


def test_a_wrong_recipe_file_has_an_error_of_the_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.json"
    for text, code, words in (
        ('{"witneses": 2}', 2, "do you mean 'witnesses'"),
        ('{"batch": "4"}', 2, "must be an integer, at least 1, got '4'"),
        ("{", 1, "recipe must be a JSON file"),
    ):
        file.write_text(text)
        monkeypatch.setattr("sys.argv", ["dynorm", "convert", "m", "out", "--recipe", str(file)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        assert words in capsys.readouterr().err
