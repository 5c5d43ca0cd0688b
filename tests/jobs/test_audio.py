"""Models of audio: inputs and transcripts, the data for fitting and measuring, and refusals."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import types
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperModel,
    WhisperTokenizer,
)

from dynorm.errors import ArgumentError, DataError, StorageError
from dynorm.jobs.audio import Clip, find_audio, resampled
from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.convert_model import convert_model
from dynorm.jobs.inputs import audio_inputs
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.jobs.speech import Listener, word_errors
from dynorm.jobs.texts import split_audio
from dynorm.recipe import Recipe
from dynorm.replace.converted import dynorm_layers
from dynorm.report import ModelReport

QUICK = Recipe(refine=2, held_out=8, batch=4, calibration=8)
RATE = 16000
END, START, WORDS = 0, 1, 40
TOKENS = {"vocab_size": WORDS, "pad_token_id": END, "eos_token_id": END, "bos_token_id": START,
          "decoder_start_token_id": START, "suppress_tokens": None, "begin_suppress_tokens": None}  # fmt: skip
SIZE = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 20,
        "max_target_positions": 12}  # fmt: skip


def write(file: Path, samples: Any, rate: int = RATE, width: int = 2) -> Path:
    """Write samples from -1 to 1, (N,) or (N, channels), as a WAV file of whole numbers of ``width`` bytes."""
    samples = np.asarray(samples)
    samples = samples[:, None] if samples.ndim == 1 else samples
    whole = np.round(samples * (2 ** (8 * width - 1) - 1)).astype("<i4")
    data = (
        (whole + 128).astype(np.uint8)
        if width == 1
        else whole.view(np.uint8).reshape(*whole.shape, 4)[..., :width]
    )
    with wave.open(str(file), "wb") as opened:
        opened.setparams((samples.shape[1], width, rate, 0, "NONE", ""))
        opened.writeframes(np.ascontiguousarray(data).tobytes())
    return file


def tone(number: int, seconds: float = 0.8, rate: int = RATE) -> Any:
    return 0.4 * np.sin(2 * np.pi * 150 * (1 + number) * np.arange(int(seconds * rate)) / rate)


def save(model: Any, folder: Path, *others: Any) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    for each in (model, *others):
        each.save_pretrained(folder)
    return folder


def extractor() -> Any:
    return WhisperFeatureExtractor(
        feature_size=8, sampling_rate=RATE, hop_length=400, chunk_length=1, n_fft=800
    )


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    words = {"<|endoftext|>": END, "<|startoftranscript|>": START} | {
        f"Ġ{chr(97 + i % 26)}{i}": i for i in range(2, WORDS)
    }
    tokenizer = WhisperTokenizer(
        vocab=words, merges=[], bos_token="<|startoftranscript|>", pad_token="<|endoftext|>"
    )
    model = WhisperForConditionalGeneration(WhisperConfig(**SIZE, **TOKENS))
    model.generation_config.update(max_length=12, return_timestamps=False, is_multilingual=False)
    return save(model, tmp_path_factory.mktemp("models") / "tiny-whisper", extractor(), tokenizer)


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio")
    for i in range(24):
        write(folder / f"{i:02}.wav", tone(i, 0.5 + i / 50))
    return folder


@pytest.fixture(scope="module")
def converted(
    whisper: Path, audio: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ModelReport]:
    out = tmp_path_factory.mktemp("converted") / "out"
    return out, convert_pretrained(whisper, out, QUICK, audio=[audio])


def test_speech_is_compared_word_by_word_and_token_by_token(
    whisper: Path, audio: Path, converted: tuple[Path, ModelReport]
) -> None:
    out, report = converted
    assert len(report.sites) == 2 * 1 + 1 + 3 * 2 + 1
    assert (report.output.kind, report.output.samples) == ("language", 8)
    assert report.output.agreement is not None
    assert (report.meta["audio_to_fit"], report.meta["audio_held_out"]) == (16, 8)
    assert (
        report.meta["recipe"] | {"batch": 4, "witnesses": None, "per_channel": False, "lean": 0.0}
        == report.meta["recipe"]
    )
    assert "audio_at_another_rate" not in report.meta
    before, now = (load_pretrained(place) for place in (whisper, out / "model"))
    clips, _ = find_audio([audio])
    wrong = words = 0
    for found in report.continuations:
        clip = next(clip for clip in clips if str(clip.file).endswith(found.prompt))
        listener = Listener(before, before.model)
        batch = listener.batch([clip])
        first, second = (
            listener.text(listener.write(each.model, batch)[0]) for each in (before, now)
        )
        assert (found.original, found.now) == (first, second)
        errors, count = word_errors(second, first)
        wrong, words = wrong + errors, words + count
    assert len({found.original for found in report.continuations}) > 1
    assert report.same == pytest.approx(1 - wrong / words)
    assert f"greedy transcripts, words equal to the original: {report.same:.1%}" in str(report)
    page = (out / "report.html").read_text()
    assert "Likeliest transcripts" in page
    assert report.continuations[0].now in page
    card = (out / "model" / "README.md").read_text()
    assert "fitted on 8 audio files, refined together on 8, from" in card
    assert f", from {audio}." in card
    assert "Measured on other audio" in card
    assert "WhisperForConditionalGeneration.from_pretrained" in card


def test_a_decoder_is_given_the_originals_transcript(whisper: Path, audio: Path) -> None:
    loaded = load_pretrained(whisper)
    listener, (clips, _) = Listener(loaded, loaded.model), find_audio([audio])
    batch = listener.batch(clips[:3])
    assert batch["input_features"].shape == (3, 8, 40)
    heard = loaded.tokenizer.feature_extractor(
        clips[1].read(RATE).numpy(), sampling_rate=RATE, return_tensors="pt"
    )
    assert torch.equal(batch["input_features"][1:2], heard.input_features)
    for i, clip in enumerate(clips[:3]):
        alone = listener.batch([clip])
        ids = batch["decoder_input_ids"][i][batch["decoder_attention_mask"][i] == 1]
        assert torch.equal(ids, alone["decoder_input_ids"][0])
        assert ids[0] == START
        with torch.no_grad():
            likeliest = loaded.model(**alone).logits.argmax(-1)[0]
        assert torch.equal(likeliest[:-1], ids[1:])


def test_without_a_head_a_decoder_is_given_its_first_token(
    whisper: Path, audio: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(whisper, tmp_path / "source")
    load_pretrained(whisper).model.model.save_pretrained(source)
    loaded = load_pretrained(source)
    assert type(loaded.model) is WhisperModel
    listener, (clips, _) = Listener(loaded, loaded.model), find_audio([audio])
    assert listener.batch(clips[:2])["decoder_input_ids"].tolist() == [[START], [START]]
    report = convert_pretrained(source, tmp_path / "out", QUICK, audio=[audio])
    assert (report.output.kind, report.continuations) == ("encoder", [])


# Every file is another tone, and eight of them are too few to know the sizes of the others.
@pytest.mark.filterwarnings("ignore:the measured inputs must be like those of the fit")
def test_letters_are_written_without_a_decoder(audio: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    convolutions = {
        "conv_dim": (8, 8),
        "conv_kernel": (400, 2),
        "conv_stride": (320, 2),
        "feat_extract_norm": "layer",
    }
    config = Wav2Vec2Config(
        **size,
        **convolutions,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        vocab_size=32,
    )
    (tmp_path / "vocab.json").write_text(
        json.dumps({"[PAD]": 0, "[UNK]": 1, "|": 2} | {chr(97 + i): i + 3 for i in range(26)})
    )
    tokenizer = Wav2Vec2CTCTokenizer(tmp_path / "vocab.json", pad_token="[PAD]", unk_token="[UNK]")
    source = save(
        Wav2Vec2ForCTC(config), tmp_path / "source", Wav2Vec2FeatureExtractor(), tokenizer
    )
    report = convert_pretrained(source, tmp_path / "out", QUICK, audio=[audio])
    assert report.output.kind == "tensor"
    assert len(report.continuations) == 8
    assert report.same is not None
    listener, (clips, _) = (
        Listener(loaded := load_pretrained(source), loaded.model),
        find_audio([audio]),
    )
    assert listener.batch(clips[:3])["input_values"].shape == (3, int(0.5 * RATE))


@pytest.mark.parametrize(("found", "wanted", "errors"), [
    ("", "", (0, 0)), ("one two", "", (2, 0)), ("", "one two", (2, 2)), ("One, two.", "one two", (0, 2)),
    ("one three", "one two three", (1, 3)), ("two one two", "one two", (1, 2)), ("it's so", "its so", (1, 2)),
])  # fmt: skip
def test_word_errors_are_the_fewest_changes(
    found: str, wanted: str, errors: tuple[int, int]
) -> None:
    assert word_errors(found, wanted) == errors


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width_and_two_channels_are_read(tmp_path: Path, width: int) -> None:
    left, right = tone(0), tone(3)
    file = write(tmp_path / "a.wav", np.stack([left, right], 1), width=width)
    (clip,), _ = find_audio([file])
    assert (clip.rate, clip.seconds) == (RATE, 0.8)
    assert torch.allclose(
        clip.read(RATE), torch.tensor((left + right) / 2).float(), atol=2 ** (2 - 8 * width) + 1e-6
    )


@pytest.mark.parametrize("rate", [8000, 22050, 48000])
def test_a_tone_is_the_same_at_another_rate(tmp_path: Path, rate: int) -> None:
    file = write(tmp_path / "other.wav", tone(4, 1, rate), rate)
    sound = resampled(torch.tensor(tone(4, 1, rate)).float(), rate, RATE)
    assert torch.allclose(sound, torch.tensor(tone(4, 1)).float(), atol=1e-3)
    assert torch.allclose(Clip(file, rate, 1).read(RATE), sound, atol=1e-3)


def test_audio_that_cannot_be_read_or_has_another_rate_is_named(
    whisper: Path, audio: Path, tmp_path: Path
) -> None:
    mixed, whole = shutil.copytree(audio, tmp_path / "mixed"), (audio / "00.wav").read_bytes()
    (mixed / "cut.wav").write_bytes(whole[: len(whole) // 2])
    (mixed / "empty.wav").write_bytes(b"")
    (mixed / "words.wav").write_text("no sound at all, but words")
    (mixed / "other.flac").write_bytes(b"fLaC")
    (mixed / "again.wav").write_bytes(whole)
    (mixed / "notes.txt").write_text("of another kind")
    write(mixed / "silent.wav", np.zeros(0))
    (mixed / "timeless.wav").write_bytes(whole[:24] + bytes(4) + whole[28:])
    write(mixed / "other.wav", tone(4, 1, 8000), 8000)
    said: list[str] = []
    report = convert_pretrained(whisper, tmp_path / "out", QUICK, audio=[mixed], say=said.append)
    bad = [str(mixed / name) for name in ("cut.wav", "empty.wav", "other.flac", "silent.wav", "timeless.wav",
                                        "words.wav")]  # fmt: skip
    assert report.meta["audio_that_cannot_be_read"] == bad
    assert any(line.startswith("left out 6 files of audio that cannot be read: ") for line in said)
    assert report.meta["audio_to_fit"] + report.meta["audio_held_out"] == 25
    assert report.meta["audio_at_another_rate"] == {8000: 1}
    assert "resampled to 16,000 Hz, as the model takes it: 1 files of 8,000 Hz" in said


def test_soundfile_reads_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.flac").write_bytes(b"sound")
    with pytest.raises(
        DataError,
        match=r"only WAV.*soundfile",
    ):
        find_audio([tmp_path])
    library: Any = types.ModuleType("soundfile")
    library.__spec__ = types.SimpleNamespace(name="soundfile")
    library.read = lambda file, **options: (np.float32([[0.5, 0], [0, 0.5]]), 2)
    monkeypatch.setitem(sys.modules, "soundfile", library)
    (clip,), damaged = find_audio([tmp_path])
    assert (clip.rate, clip.seconds, damaged) == (2, 1, [])
    assert clip.read(2).tolist() == [0.25, 0.25]
    library.read = lambda file, **options: (np.float32([[0.5], [np.nan]]), 2)
    with pytest.raises(DataError, match=r"soundfile.*none, of 1"):
        find_audio([tmp_path])


def test_whole_folders_are_held_out_where_there_are_eight() -> None:
    clips = [Clip(Path(f"speaker{i % 10}", f"{i}.wav"), RATE, 1) for i in range(40)]
    fit, held_out = split_audio(clips, 8)
    assert sorted([*fit, *held_out], key=str) == sorted(clips, key=str)
    assert len(held_out) == 8
    assert not {clip.file.parent for clip in fit} & {clip.file.parent for clip in held_out}
    assert [clip.file.parent for clip in fit[:4]].count(fit[0].file.parent) < 4
    few = [clip for clip in clips if clip.file.parent.name < "speaker5"]
    fit, held_out = split_audio(few, 5)
    assert {clip.file.parent for clip in fit} & {clip.file.parent for clip in held_out}


def test_what_audio_needs_is_checked_first(
    whisper: Path, audio: Path, encoder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ArgumentError, match=r"audio.*WhisperForConditionalGeneration, got none"):
        convert_pretrained(whisper, out, QUICK)
    with pytest.raises(ArgumentError, match=r"audio.*WhisperForConditionalGeneration, got images"):
        convert_pretrained(whisper, out, QUICK, audio=[audio], images=[audio])
    with pytest.raises(ArgumentError, match=r"texts.*BertModel, got audio"):
        inspect_pretrained(encoder, QUICK, audio=[audio])
    with pytest.raises(DataError, match=r"audio.*8.*got 2"):
        convert_pretrained(whisper, out, QUICK, audio=[audio / "00.wav", audio / "01.wav"])
    with pytest.raises(DataError, match=r"audio.*exist"):
        find_audio([tmp_path / "nowhere"])
    os.mkfifo(tmp_path / "pipe.wav")
    with pytest.raises(DataError, match=r"audio.*exist"):
        find_audio([tmp_path / "pipe.wav"])
    with pytest.raises(ArgumentError, match=r"max_length.*audio.*got 16"):
        convert_pretrained(whisper, out, Recipe(max_length=16), audio=[audio])
    for name, what in (
        ("preprocessor_config.json", "feature extractor"),
        ("tokenizer.json", "tokenizer"),
    ):
        source = shutil.copytree(whisper, tmp_path / what)
        for file in (
            source / name,
            source / "processor_config.json",
            source / "tokenizer_config.json",
        ):
            file.unlink(missing_ok=True)
        with pytest.raises(StorageError, match=f"model's {what}.*none"):
            convert_pretrained(source, out, QUICK, audio=[audio])
    assert not out.exists()


def test_distillation_and_inspection_take_audio(
    whisper: Path, audio: Path, converted: tuple[Path, ModelReport], tmp_path: Path
) -> None:
    recipe = Recipe(**{**vars(QUICK), "steps": 20, "lr": 2e-3})
    report = convert_pretrained(whisper, tmp_path / "out", recipe, audio=[audio], quiet=True)
    assert report.meta["stages"]["distill"]["samples"] == 80
    assert report.output.kl < converted[1].output.kl
    found = inspect_pretrained(whisper, Recipe(batch=4), audio=[audio], samples=6)
    assert len(found.sites) == 10
    assert found.meta["audio_held_out"] == 6


def test_the_command_line_takes_audio(
    whisper: Path,
    audio: Path,
    tmp_path: Path,
    status: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick = ["--batch", 4, "--refine", 0, "--held-out", 6, "--json"]
    files = [word for i in range(12) for word in ("--audio", audio / f"{i:02}.wav")]
    assert status("convert", whisper, tmp_path / "out", *quick, *files) == 0
    assert json.loads(capsys.readouterr().out)["output"]["samples"] == 6
    assert status("convert", whisper, tmp_path / "new", *quick) == 2
    assert (
        "--audio must be given for WhisperForConditionalGeneration, got none"
        in capsys.readouterr().err
    )
    assert status("inspect", whisper, "--samples", 4, "--json", *files) == 0
    assert len(json.loads(capsys.readouterr().out)["sites"]) == 10


def test_in_python_a_model_of_audio_gets_the_recipe_of_the_command(
    whisper: Path, audio: Path
) -> None:
    loaded, (clips, _) = load_pretrained(whisper), find_audio([audio])
    batches = audio_inputs(Listener(loaded, loaded.model), clips, [], {}).batches(clips, 4)
    report = convert_model(loaded.model, list(batches), refine=0)
    assert report.output.kind == "language"
    assert {
        layer.get_parameter("log_beta").numel() for layer in dynorm_layers(loaded.model).values()
    } == {1}
    # At most a third of the channels.
    for layer in dynorm_layers(loaded.model).values():
        assert 0 < len(layer.witness_channels) <= max(4, layer.channels // 3)


def test_whisper_writes_once_whatever_marks_of_time_it_sets(
    whisper: Path, audio: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, (clips, _), given = load_pretrained(whisper), find_audio([audio]), list[Any]()
    own = WhisperForConditionalGeneration.generate

    @functools.wraps(own)
    def generate(*args: Any, **options: Any) -> Any:
        given.append(options["force_unique_generate_call"])
        return own(*args, **options)

    monkeypatch.setattr(WhisperForConditionalGeneration, "generate", generate)
    listener = Listener(loaded, loaded.model)
    assert len(listener.write(loaded.model, listener.batch(clips[:3]))) == 3
    assert given == [True, True]
