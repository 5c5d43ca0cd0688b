"""``python -m benchmarks.speed``: options, output and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.speed import run as running
from benchmarks.speed.__main__ import main
from benchmarks.speed.contenders import NAMES, wanted
from benchmarks.speed.settings import SIZES, Settings, all_threads, make_parser, make_settings
from dynorm.errors import DynormError

SMALL = ["--sizes", "4x8", "--quick", "--threads", "1", "--no-block", "--seconds", "0.01"]


def settings(*words: str) -> Settings:
    return make_settings(make_parser().parse_args(words))


def test_json_out_and_plot_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "new" / "speed.json", tmp_path / "speed.png"
    main([*SMALL, "--json", "--out", str(out), "--plot", str(plot)])
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert document["settings"]["compiled"] is False
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["speed.json", "speed.png"]


def test_tables_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--only", "DyISRU*", "--out", str(tmp_path / "a.json")])
    printed = capsys.readouterr().out
    assert "forward + backward through autograd, float32, 1 thread" in printed
    assert "DyISRU eager" in printed
    assert "Derf eager" not in printed
    assert "Ratios, 1 thread" in printed
    contenders = json.loads((tmp_path / "a.json").read_text())["operations"][0]["contenders"]
    assert {"copy", "copy, output given", "F.layer_norm", "nn.LayerNorm", "DyISRU"} <= set(
        contenders
    )
    assert not [name for name in contenders if name.startswith(("DyT", "Derf", "linear", "F.rms"))]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--sizes", "16"], "rows x channels, such as 512x768, got '16'"),
        (["--sizes", "0x8"], "at least 1 row, 2 channels"),
        (["--sizes", "4x8,8x1"], "at least 1 row, 2 channels"),
        (["--sizes", "1000000x1000"], "at most 134,217,728 elements"),
        (["--dtypes", "int8"], "one of float32, bfloat16, float16, float64, got 'int8'"),
        (["--threads", "0"], "'all' or from 1 to"),
        (["--threads", "many"], "'all' or from 1 to"),
        (["--threads", "100000"], "'all' or from 1 to"),
        (["--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["--only", "DyTT*"], "must match a contender, got 'DyTT*'"),
        (["--seconds", "0"], "seconds must be a positive number"),
        (["--seconds", "nan"], "seconds must be a positive number"),
    ],
)
def test_bad_usage_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    match: str,
) -> None:
    monkeypatch.setattr(running, "measure", None)
    with pytest.raises(SystemExit) as stopped:
        main(["--no-block", *arguments])
    assert stopped.value.code == 2
    assert match in capsys.readouterr().err


def test_no_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        settings("--device", "cuda")
    assert "there is no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "match"), [("--out", "cannot be written"), ("--plot", "cannot be written"),
                                              ("--model", "config.json")])  # fmt: skip
def test_files_that_will_not_do_are_refused_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, match: str
) -> None:
    monkeypatch.setattr(running, "measure", None)
    with pytest.raises(SystemExit, match=match):
        main([*SMALL, option, str(tmp_path)])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.slow
def test_a_failed_compilation_names_the_way_out() -> None:
    import torch._inductor.config as inductor

    chosen = settings(
        "--sizes", "4x8", "--dtypes", "float32", "--threads", "1", "--only", "LayerNorm compiled"
    )
    with (
        inductor.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.raises(
            DynormError,
            match=r"C\+\+ compiler.*--no-compile",
        ),
    ):
        running.run(chosen, block=False)


def test_settings_by_default_and_when_quick() -> None:
    full = settings()
    assert (full.sizes, full.dtypes, full.compiled) == (SIZES, ("float32", "bfloat16"), True)
    assert full.threads == tuple(dict.fromkeys((all_threads(), 1)))
    quick = settings("--quick", "--sizes", "3 x 5, 16x384,3x5", "--dtypes", "bfloat16")
    assert (quick.sizes, quick.dtypes, quick.compiled) == (
        ((3, 5), (16, 384)),
        ("bfloat16",),
        False,
    )
    assert quick.threads == (all_threads(),)
    assert (quick.rounds, quick.seconds) < (full.rounds, full.seconds)


def test_globs_keep_what_others_are_compared_with() -> None:
    kept = [name for name in NAMES if wanted(name, ["* eager"])]
    assert kept == ["copy, output given", "copy", "F.layer_norm", "nn.LayerNorm", "DyISRU eager", "DyT eager",
                    "Derf eager", "linear eager"]  # fmt: skip
