"""Sounds: every form of file gives the same samples, other rates are filtered, and what is no sound is refused."""

from __future__ import annotations

import io
import json
import math
import sys
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import soundfile
from checkpoints import command, refused
from scipy.io import wavfile
from sound_cases import Listener, sound, spectrum, waves
from task_cases import CASES, open_case
from tiny_tokenizers import save, tokenizer, write

from headscope.data import DataOptions, load_examples
from headscope.errors import DataError, UsageError
from headscope.models import LoadOptions, load
from headscope.study import Study, StudyOptions, batches
from headscope.tasks._sounds import Sound, read, resampled

RATE = 1_600


def tone(length: int = 160, *, rate: int = RATE, hertz: float = 100.0) -> numpy.ndarray:
    return 0.5 * numpy.sin(2 * math.pi * hertz * numpy.arange(length) / rate)


def wav(samples: numpy.ndarray, rate: int = RATE) -> bytes:
    out = io.BytesIO()
    wavfile.write(out, rate, samples)
    return out.getvalue()


def of_24_bits(samples: numpy.ndarray) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 3, RATE, len(samples), "NONE", ""))
        file.writeframes(b"".join(int(one * 2**23).to_bytes(3, "little", signed=True) for one in samples))
    return out.getvalue()


FORMS: dict[str, Any] = {
    "8 bits": lambda s: wav((s * 128 + 128).round().astype(numpy.uint8)),
    "16 bits": lambda s: wav((s * 2**15).round().astype(numpy.int16)),
    "24 bits": of_24_bits,
    "32 bits": lambda s: wav((s * 2**31).round().astype(numpy.int32)),
    "float": lambda s: wav(s.astype(numpy.float32)),
    "two channels": lambda s: wav(numpy.stack([s + 0.25, s - 0.25], axis=1).astype(numpy.float32)),
    "a dictionary": lambda s: {"bytes": wav(s.astype(numpy.float32)), "path": "nowhere.wav"},
    "decoded": lambda s: {"array": s.tolist(), "sampling_rate": RATE},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_sound(form: str) -> None:
    found = read(FORMS[form](tone()))
    assert found.rate == RATE and found.samples.shape == (160,)
    assert numpy.abs(found.samples - tone()).max() < (1 / 128 if form == "8 bits" else 1 / 2**15)


def test_full_scale_is_one() -> None:
    """Integers reach one step less above zero than below, and are scaled by the longer side."""
    for kind, bits in ((numpy.int16, 16), (numpy.int32, 32)):
        samples = numpy.array([-(2 ** (bits - 1)), 2 ** (bits - 2), 0], dtype=kind)
        assert read(wav(samples)).samples.tolist() == [-1.0, 0.5, 0.0]


def test_a_dictionary_names_a_file(tmp_path: Path) -> None:
    place = tmp_path / "tone.wav"
    place.write_bytes(wav(tone().astype(numpy.float32)))
    assert numpy.array_equal(read({"bytes": None, "path": str(place)}).samples, read(str(place)).samples)


def test_a_flac_is_read_by_soundfile(tmp_path: Path) -> None:
    place = tmp_path / "tone.flac"
    soundfile.write(place, tone(), RATE)
    assert numpy.abs(read(str(place)).samples - tone()).max() < 1 / 2**14


def test_without_soundfile_a_flac_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match="only .wav can be read without the package soundfile") as caught:
        read(b"fLaC and more")
    assert caught.value.hint == "pip install 'headscope[audio]'"


def test_another_rate_is_filtered_not_folded() -> None:
    """A tone below half of the new rate stays, one above it goes; plain dropping of samples would fold it to 300 Hz."""
    low, high = (tone(1600, hertz=hertz) for hertz in (100, 700))
    for hertz, wanted in ((100, 0.5), (700, 0.0)):
        found = resampled(Sound(tone(1600, hertz=hertz), RATE), 1_000)
        assert found.shape == (1000,) and found.dtype == numpy.float32
        strength = numpy.abs(numpy.fft.rfft(found[100:900])).max() / 400
        assert strength == pytest.approx(wanted, abs=0.02), hertz
    assert numpy.array_equal(resampled(Sound(low, RATE), RATE), low.astype(numpy.float32))
    assert numpy.abs(high).max() > 0.49


WRONG: dict[str, tuple[Any, str]] = {
    "no file": ("nowhere/sound.wav", "no sound file nowhere/sound.wav"),
    "text": (b"no sound at all", "sound"),
    "cut short": (wav(tone().astype(numpy.float32))[:30], "cannot read the sound"),
    "nothing in it": (wav(numpy.zeros(0, dtype=numpy.int16)), "sound"),
    "not finite": (wav(numpy.full(9, numpy.nan, dtype=numpy.float32)), "samples that are not finite"),
    "a number": (3, "a int is no sound"),
    "no rate": ({"array": [0.0, 1.0]}, "a sampling rate of None is none"),
    "words": ({"array": ["a", "b"], "sampling_rate": 9}, "the samples of the sound are no numbers"),
    "ragged": ({"array": [[1.0], [1.0, 2.0]], "sampling_rate": 9}, "the samples of the sound are no numbers"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_sound(kind: str) -> None:
    value, message = WRONG[kind]
    with pytest.raises(DataError, match=message):
        read(value)


def test_a_folder_of_sounds_is_labelled_by_its_subfolders(tmp_path: Path) -> None:
    case = CASES["audio-classification"]
    opened = open_case(case, tmp_path / "case")
    for number, row in enumerate(case.rows):
        place = tmp_path / "sounds" / f"LABEL_{row['label']}"
        place.mkdir(parents=True, exist_ok=True)
        samples = numpy.array(row["audio"]["array"], dtype=numpy.float32)
        (place / f"{number}.wav").write_bytes(wav(samples))
    loaded = opened.study.loaded
    folder = load_examples(str(tmp_path / "sounds"), loaded, DataOptions())
    assert opened.study.examples is not None
    given, found = (
        {(one.targets, tuple(one.inputs["input_values"].tolist())) for one in examples.items}
        for examples in (opened.study.examples, folder)
    )
    assert len(given) == 7 and found == given
    assert folder.labelled and loaded.reads == "sounds"


def test_only_sounds_of_one_length_run_side_by_side(tmp_path: Path) -> None:
    study = open_case(CASES["audio-classification"], tmp_path).study
    assert sorted(len(batch) for batch in batches(study)) == [1, 1, 1, 2, 2]
    spectra = open_case(CASES["speech-whisper"], tmp_path / "speech").study
    assert [len(batch) for batch in batches(spectra)] == [7]
    assert spectra.examples is not None
    heard = sorted(one.length - len(one.targets) for one in spectra.examples.items)
    assert heard == [1, 1, 2, 2, 2, 2, 3], "positions of 20 ms in 19 to 56 ms of sound, besides those of the transcript"


def test_the_transcript_is_the_target_or_else_the_text(tmp_path: Path) -> None:
    case = CASES["speech-whisper"]
    loaded = open_case(case, tmp_path).study.loaded

    def targets(rows: list[dict[str, Any]], **columns: str) -> list[tuple[float, ...]]:
        place = write(tmp_path / "rows.jsonl", rows)
        return [one.targets for one in load_examples(place, loaded, DataOptions(columns=columns)).items]

    wanted = targets(case.rows)
    for name in ("transcription", "sentence"):
        assert targets([{"audio": row["audio"], name: row["text"]} for row in case.rows]) == wanted
    both = [row | {"transcript": "w1 w2"} for row in case.rows]
    assert targets(both) == [(6, 7, 2)] * 7 and targets(both, target="text") == wanted
    (first, *rest) = wanted[0]
    assert loaded.model.config.decoder_start_token_id == case.companion().tokens.bos_token_id == 1
    loaded.model.config.decoder_start_token_id = 3  # a tokenizer that puts something else first
    assert targets(case.rows)[0] == (1, first, *rest), "the decoder begins with another token, so this one is said"
    loaded.model.config.decoder_start_token_id = 1
    with pytest.raises(UsageError, match="no target column found"):
        targets([{"audio": row["audio"], "other": row["text"]} for row in case.rows])
    with pytest.raises(UsageError, match="no audio column found"):
        targets([{"text": "w1", "other": "w2"}])


def test_a_sound_that_is_cut_and_a_transcript_that_is_too_long_are_counted(tmp_path: Path) -> None:
    case = CASES["speech-whisper"]
    long = sound(16_500, seed=1, rate=16_000)
    rows = [
        *case.rows[:2],
        {"audio": long, "text": "w1"},
        {"audio": case.rows[0]["audio"], "text": " ".join(["w1"] * 60)},
    ]
    study = open_case(replace(case, rows=rows), tmp_path).study
    assert study.examples is not None
    assert [
        note for note in study.examples.notes if note.startswith("2 of 4 examples were longer than the model takes")
    ]
    assert max(len(one.targets) for one in study.examples.items) <= 47
    assert study.scores(["importance"]).examples == 4


def test_the_body_of_a_model_that_hears_gives_embeddings(tmp_path: Path) -> None:
    case = CASES["audio-classification"]
    place = str(open_case(case, tmp_path).study.loaded.location.folder)
    data = write(tmp_path / "plain.jsonl", [{"audio": row["audio"]} for row in case.rows])  # no column of text
    study = Study.open(place, data, StudyOptions(LoadOptions(task="embedding")))
    assert study.examples is not None and not study.examples.labelled
    assert all(bool((value > 0).all()) for value in study.scores(["sensitivity"]).values["sensitivity"].values())


def test_models_that_hear_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], in_process: None
) -> None:
    run = command(monkeypatch, capsysbinary)
    monkeypatch.setattr("headscope.timing.MOST", 5)
    place = open_case(CASES["speech-whisper"], tmp_path).study.loaded.location.folder
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    ran = run("inspect", place, "--data", data)
    assert ran.code == 0, ran.err
    assert len(ran.rows) == 1 + 2 * 5 + 3 * 4 * 2 and "importance" in ran.rows[0] and "entropy" in ran.rows[0]
    ran = run("prune", place, "--data", data, "--ratio", "0.3", "-o", out)
    assert ran.code == 0, ran.err
    assert (out / "preprocessor_config.json").read_bytes() == (place / "preprocessor_config.json").read_bytes()
    ran = run("evaluate", place, out, "--data", data, "--trust-remote-code", "--speed", "--speed-batches", "2")
    assert ran.code == 0, ran.err
    assert [row[0] for row in ran.rows[1:]] == [str(place), str(out)]
    waves_of_other_lengths = open_case(CASES["audio-classification"], tmp_path / "waves").study.loaded.location.folder
    data = waves_of_other_lengths.parent / "rows.jsonl"
    ran = run(
        "prune", waves_of_other_lengths, "--data", data, "--ratio", "0.3", "--no-compensate", "-o", tmp_path / "other"
    )
    assert ran.code == 0, ran.err
    assert "proof: pruned and reloaded outputs differ by 0" in ran.err
    data = tmp_path / "rows.jsonl"
    (place / "preprocessor_config.json").unlink()
    assert refused(run("inspect", place, "--data", data), 1, "feature extractor cannot be loaded")


def test_a_model_that_reads_text_refuses_sounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run = command(monkeypatch, capsysbinary)
    place = open_case(CASES["single"], tmp_path).study.loaded.location.folder
    data = write(tmp_path / "sounds.jsonl", CASES["audio-classification"].rows)
    assert refused(run("inspect", place, "--data", data), 2, "no text column found")
    whisper = save(tmp_path / "whisper", CASES["speech-whisper"].build(), waves())
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"audio": str(tmp_path / "missing.wav"), "text": "w1"}) + "\n", encoding="utf-8")
    assert refused(run("inspect", whisper, "--data", broken), 1, "tokenizer")
    save(tmp_path / "whisper", CASES["speech-whisper"].build(), Listener(spectrum(40, 11), tokenizer("bart")))
    assert refused(run("inspect", whisper, "--data", broken), 1, "broken.jsonl, row 1: no sound file")
    assert load(whisper, LoadOptions()).task_name == "automatic-speech-recognition"
