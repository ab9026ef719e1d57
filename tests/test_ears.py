"""Models that hear: each takes sounds at its own rate, without padding, as long as it can, and as it was trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from sound_cases import Listener, sound
from task_cases import CASES, open_case
from test_sounds import RATE, tone
from tiny_tokenizers import save, texts, tokenizer, write
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTForAudioClassification,
    SeamlessM4TFeatureExtractor,
    Speech2TextConfig,
    Speech2TextFeatureExtractor,
    Speech2TextForConditionalGeneration,
    Wav2Vec2BertConfig,
    Wav2Vec2BertForSequenceClassification,
)

from headscope.data import DataOptions, load_examples
from headscope.errors import DataError
from headscope.models import LoadOptions, load
from headscope.study import Study, StudyOptions


def test_a_model_hears_sounds_of_other_rates_at_its_own(tmp_path: Path) -> None:
    """As long, and about the same, as what was recorded at the rate of the model."""
    loaded = open_case(CASES["audio-classification"], tmp_path).study.loaded

    def heard(rate: int) -> torch.Tensor:
        samples = tone(rate // 10, rate=rate).tolist()
        place = write(tmp_path / "one.jsonl", [{"audio": {"array": samples, "sampling_rate": rate}, "label": 1}])
        (one,) = load_examples(place, loaded, DataOptions()).items
        assert one.length == 5, "0.1 s"
        return one.inputs["input_values"]

    wanted = heard(RATE)
    assert wanted.shape == (160,) and wanted.abs().max() > 1
    for rate in (RATE * 2, RATE * 5 // 2, RATE // 2):
        found = heard(rate)
        assert found.shape == (160,)
        assert (found - wanted)[40:120].abs().max() < 0.1, rate  # filters ring at the ends


def test_sounds_that_are_too_short_and_too_long(tmp_path: Path) -> None:
    loaded = open_case(CASES["audio-classification"], tmp_path).study.loaded
    assert loaded.model.config.conv_kernel == [10, 3]  # at strides of 5 and 2: 20 samples make the first frame

    def made(length: int, rate: int = RATE) -> str:
        return write(tmp_path / "one.jsonl", [{"audio": sound(length, seed=1, rate=rate), "label": 1}])

    assert len(load_examples(made(20), loaded, DataOptions())) == 1
    with pytest.raises(DataError, match=r"one.jsonl, row 1: the sound is too short for this model: 19 samples"):
        load_examples(made(19), loaded, DataOptions())
    spectra = load(ast(tmp_path / "ast"), LoadOptions())
    for length, cut in ((6_400, False), (6_500, True)):  # 40 frames of 10 ms
        (one,) = load_examples(made(length, rate=16_000), spectra, DataOptions()).items
        assert one.truncated is cut and one.inputs["input_values"].shape == (40, 16)


def ast(folder: Path) -> str:
    sizes = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 31}
    torch.manual_seed(0)
    config = ASTConfig(**sizes, max_length=40, num_mel_bins=16, num_labels=3)
    return save(folder, ASTForAudioClassification(config), ASTFeatureExtractor(num_mel_bins=16, max_length=40))


def speech_to_text(folder: Path) -> str:
    sizes = {"d_model": 40, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 53, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    config = Speech2TextConfig(**sizes, **heads, input_feat_per_channel=16, conv_channels=22, pad_token_id=0)
    ear = Speech2TextFeatureExtractor(feature_size=16, num_mel_bins=16)
    return save(folder, Speech2TextForConditionalGeneration(config), Listener(ear, tokenizer("bart")))


@pytest.mark.parametrize("make", [ast, speech_to_text])
def test_other_kinds_of_ears(make: Any, tmp_path: Path) -> None:
    rows = [
        {"audio": sound(length, seed=length, rate=16_000), "label": length % 3, "text": text}
        for length, text in zip((4_000, 6_000, 8_000, 6_000), texts((3, 2, 4, 1)), strict=True)
    ]
    options = StudyOptions(LoadOptions(dtype="float64"))
    study = Study.open(make(tmp_path / "model"), write(tmp_path / "rows.jsonl", rows), options)
    assert study.examples is not None and study.examples.labelled and len(study.examples) == 4
    scores = study.scores(["importance", "sensitivity"])
    assert all(bool((value > 0).all()) for value in scores.values["importance"].values())
    few = Study(study.loaded, study.examples, replace(options, batch_size=1)).scores(["importance"])
    for site, value in few.values["importance"].items():
        torch.testing.assert_close(scores.values["importance"][site], value, rtol=1e-9, atol=1e-12)


def paired(folder: Path) -> str:
    """A model that hears two frames of a spectrum at each position."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 31}
    torch.manual_seed(0)
    config = Wav2Vec2BertConfig(**sizes, feature_projection_input_dim=16, classifier_proj_size=13, num_labels=3)
    ear = SeamlessM4TFeatureExtractor(feature_size=8, num_mel_bins=8)
    return save(folder, Wav2Vec2BertForSequenceClassification(config), ear)


def test_a_frame_without_a_partner_is_not_heard(tmp_path: Path) -> None:
    """The extractor fills it up and masks it, as transformers trains such models."""
    place, ear = paired(tmp_path / "model"), SeamlessM4TFeatureExtractor(feature_size=8, num_mel_bins=8)
    frames = (10, 11, 12, 13)
    rows = [{"audio": sound(240 + 160 * many, seed=many, rate=16_000), "label": many % 3} for many in frames]
    model, wanted, masked = load(place, LoadOptions(dtype="float64")).model, [], []
    for row in rows:
        samples = numpy.array(row["audio"]["array"], dtype=numpy.float32)
        prepared = ear(samples, sampling_rate=16_000, return_tensors="pt")
        masked.append(int((prepared["attention_mask"] == 0).sum()))
        features, label = prepared["input_features"].double(), torch.tensor([row["label"]])
        with torch.no_grad():
            wanted.append(float(model(features, attention_mask=prepared["attention_mask"], labels=label).loss))
    assert masked == [0, 1, 0, 1]
    study = Study.open(place, write(tmp_path / "rows.jsonl", rows), StudyOptions(LoadOptions(dtype="float64")))
    assert study.scores(["importance"]).loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-9)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the extractor divides by the deviation of one frame
def test_a_frame_by_itself_is_too_short(tmp_path: Path) -> None:
    loaded = load(paired(tmp_path / "model"), LoadOptions())
    one, two = (
        write(tmp_path / f"{length}.jsonl", [{"audio": sound(length, seed=1, rate=16_000), "label": 1}])
        for length in (400, 560)
    )
    (heard,) = load_examples(two, loaded, DataOptions()).items
    assert heard.inputs["input_features"].shape == (1, 16)
    with pytest.raises(DataError, match="row 1: the sound is too short for this model: nothing is left of it"):
        load_examples(one, loaded, DataOptions())
