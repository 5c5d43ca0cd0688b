"""``dynorm bench``: options, output and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dynorm.bench import run as running
from dynorm.bench.contenders import NAMES, wanted
from dynorm.bench.settings import SIZES, all_threads, make_settings
from dynorm.cli import app
from dynorm.cli._app import main
from dynorm.errors import ArgumentError, DynormError

SMALL = ["--sizes", "4x8", "--quick", "--threads", "1", "--no-block", "--seconds", "0.01"]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_json_out_and_plot_say_the_same(tmp_path: Path) -> None:
    out, plot = tmp_path / "new" / "speed.json", tmp_path / "speed.png"
    result = bench(*SMALL, "--json", "--out", str(out), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads(out.read_text())
    assert document["settings"]["compiled"] is False
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["speed.json", "speed.png"]


def test_tables_are_printed(tmp_path: Path) -> None:
    result = bench(*SMALL, "--only", "DyISRU*", "--out", str(tmp_path / "a.json"))
    assert result.exit_code == 0, result.output
    assert "forward + backward through autograd, float32, 1 thread" in result.stdout
    assert "DyISRU eager" in result.stdout
    assert "Derf eager" not in result.stdout
    assert "What is asked for" in result.stdout
    contenders = json.loads((tmp_path / "a.json").read_text())["operations"][0]["contenders"]
    assert {"copy", "copy, output given", "F.layer_norm", "nn.LayerNorm", "DyISRU"} <= set(contenders)
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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], match: str
) -> None:
    monkeypatch.setattr("sys.argv", ["dynorm", "bench", "--no-block", *arguments])
    monkeypatch.setattr(running, "measure", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert match in capsys.readouterr().err


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ArgumentError, match="there is no GPU"):
        make_settings(device="cuda")


def test_what_cannot_be_written_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "measure", None)
    for option in ("--out", "--plot"):
        monkeypatch.setattr("sys.argv", ["dynorm", "bench", *SMALL, option, str(tmp_path)])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 1
        assert "cannot be written" in capsys.readouterr().err


def test_a_missing_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dynorm", "bench", *SMALL, "--model", str(tmp_path)])
    monkeypatch.setattr(running, "measure", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.slow
def test_a_failed_compilation_names_the_way_out() -> None:
    import torch._inductor.config as inductor

    settings = make_settings(sizes=["4x8"], dtypes=["float32"], threads=["1"], only=["LayerNorm compiled"])
    with (
        inductor.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.raises(DynormError, match=r"must work here.*No working C\+\+ compiler.*--no-compile leaves it out"),
    ):
        running.run(settings, block=False)


def test_settings_by_default_and_when_quick() -> None:
    full = make_settings()
    assert (full.sizes, full.dtypes, full.compiled) == (SIZES, ("float32", "bfloat16"), True)
    assert full.threads == tuple(dict.fromkeys((all_threads(), 1)))
    quick = make_settings(quick=True, sizes=["3 x 5, 16x384", "3x5"], dtypes=["bfloat16"])
    assert (quick.sizes, quick.dtypes, quick.compiled) == (((3, 5), (16, 384)), ("bfloat16",), False)
    assert quick.threads == (all_threads(),)
    assert (quick.rounds, quick.seconds) < (full.rounds, full.seconds)


def test_globs_keep_what_others_are_compared_with() -> None:
    kept = [name for name in NAMES if wanted(name, ["* eager"])]
    assert kept == ["copy, output given", "copy", "F.layer_norm", "nn.LayerNorm", "DyISRU eager", "DyT eager",
                    "Derf eager", "linear eager"]  # fmt: skip
