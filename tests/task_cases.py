"""One case per task: a tiny model, rows of unequal length, and how transformers itself is asked for a row's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import zoo
from sound_cases import Listener, classified, sound, spectrum, transcribed, waves
from tiny_tokenizers import save, texts, tokenizer, write
from torch import Tensor
from transformers import PreTrainedModel
from zoo_configs import RECIPES, Recipe

from headscope.data import DataOptions
from headscope.models import LoadOptions
from headscope.study import Scores, Study, StudyOptions

LENGTHS = (5, 9, 3, 12, 7, 4, 8)
"""Words in the texts of a case; seven, so that batches of 3 leave one over."""

BERT = {"encoder.self": "bert.encoder.layer.{}.attention.output.dense"}
GPT2 = {"decoder.causal": "transformer.h.{}.attn.c_proj"}
LLAMA = {"decoder.causal": "model.layers.{}.self_attn.o_proj"}
ROBERTA = {"encoder.self": "roberta.encoder.layer.{}.attention.output.dense"}
VIT = {"vision.self": "vit.layers.{}.attention.o_proj"}
WAV2VEC2 = {"audio.self": "wav2vec2.encoder.layers.{}.attention.out_proj"}
T5 = {
    "encoder.self": "encoder.block.{}.layer.0.SelfAttention.o",
    "decoder.causal": "decoder.block.{}.layer.0.SelfAttention.o",
    "decoder.cross": "decoder.block.{}.layer.1.EncDecAttention.o",
}
BART = {
    "encoder.self": "model.encoder.layers.{}.self_attn.out_proj",
    "decoder.causal": "model.decoder.layers.{}.self_attn.out_proj",
    "decoder.cross": "model.decoder.layers.{}.encoder_attn.out_proj",
}

Row = dict[str, Any]
Ask = Callable[[Any, Row], dict[str, Any]]
"""From tokenizer and row to the arguments, labels included, of transformers' forward for that row alone."""


@dataclass(frozen=True)
class Case:
    """A task on one model; `projections` names the output projections by `stack.kind`, with {} for the layer."""

    task: str
    recipe: Recipe
    projections: dict[str, str]
    rows: list[Row]
    ask: Ask
    form: str = "bert"
    tokens: dict[str, Any] = field(default_factory=dict)
    """Options of the tokenizer."""

    def build(self) -> PreTrainedModel:
        """The model, with frozen weights, whose losses stay in float64 where transformers would make them float32."""
        model = zoo.build(self.recipe).requires_grad_(False)
        model.loss_function = partial(_exact, model.loss_function)
        return model

    def companion(self) -> Any:
        """The tokenizer, image processor, feature extractor, or tokenizer and feature extractor."""
        if self.task == "image-classification":
            from transformers import ViTImageProcessor

            mean = [0.5, 0.4, 0.3]
            return ViTImageProcessor(do_resize=False, image_mean=mean, image_std=[0.2, 0.3, 0.4], rescale_factor=0.1)
        if self.task == "audio-classification":
            return waves()
        if self.task == "automatic-speech-recognition":
            config = self.recipe.config
            ear = spectrum(2 * config["max_source_positions"], config["num_mel_bins"])
            return Listener(ear, tokenizer(self.form, **self.tokens))
        return tokenizer(self.form, **self.tokens)

    def paths(self) -> dict[str, str]:
        """The path of every site's output projection, by label."""
        return {
            f"{stack}.{layer}": path.format(layer)
            for stack, path in self.projections.items()
            for layer in range(self.recipe.stacks[stack])
        }


@dataclass(frozen=True)
class Opened:
    """A case written to disk and opened as a study; `model` is another copy of the same weights."""

    case: Case
    study: Study
    model: PreTrainedModel
    companion: Any

    def scores(self, *measures: str, **options: Any) -> Scores:
        """The scores with other options of the study; the sites are found once."""
        study = Study(self.study.loaded, self.study.examples, replace(self.study.options, **options))
        study.__dict__["discovery"] = self.study.discovery
        return study.scores(measures)


Open = Callable[[str], Opened]


def opener(folders: pytest.TempPathFactory) -> Open:
    """Opens each case once."""
    known: dict[str, Opened] = {}

    def find(name: str) -> Opened:
        if name not in known:
            known[name] = open_case(CASES[name], folders.mktemp(name))
        return known[name]

    return find


def open_case(case: Case, folder: Path, *, limit: int | None = None, **options: Any) -> Opened:
    """Save model and rows, and open a study on them in float64; `options` are those of the data."""
    model, companion = case.build(), case.companion()
    place = save(folder / "model", model, companion)
    data = write(folder / "rows.jsonl", case.rows)
    chosen = StudyOptions(load=LoadOptions(dtype="float64"), data=DataOptions(limit=limit, **options))
    return Opened(case, Study.open(place, data, chosen), model, companion)


def recipe(name: str, model_class: str, **config: Any) -> Recipe:
    """The zoo's recipe `name` with another head."""
    known = RECIPES[name]
    plain = {key: value for key, value in known.config.items() if key != "num_labels"}
    return replace(known, model_class=model_class, config=plain | config)


def _exact(loss_function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with patch.object(torch.Tensor, "float", lambda tensor: tensor):
        return loss_function(*args, **kwargs)


def _tensors(encoded: Any) -> dict[str, Any]:
    return {name: torch.tensor([values]) for name, values in encoded.items()}


def _classify(tokens: Any, row: Row) -> dict[str, Any]:
    labels = {"label": {"no": 0, "maybe": 1, "yes": 2}.get(row["label"], row["label"])}
    return _tensors(tokens(row["text"], row.get("pair"))) | {"labels": torch.tensor([labels["label"]])}


def _several(tokens: Any, row: Row) -> dict[str, Any]:
    flags = [float(name in row["label"]) for name in ("no", "maybe", "yes")]
    return _tensors(tokens(row["text"])) | {"labels": torch.tensor([flags], dtype=torch.float64)}


def _number(tokens: Any, row: Row) -> dict[str, Any]:
    return _tensors(tokens(row["text"], row.get("pair"))) | {"labels": torch.tensor([row["label"]]).double()}


def _exact_number(tokens: Any, row: Row) -> dict[str, Any]:
    labels = torch.tensor([row["label"]], dtype=torch.float64)
    return _tensors(tokens(row["text"])) | {"labels": labels}


def _words(tokens: Any, row: Row) -> dict[str, Any]:
    """Labels at the first piece of each word, found by tokenizing word by word."""
    labels, ids = [-100], [tokens.cls_token_id]
    for word, label in zip(row["tokens"], row["ner_tags"], strict=True):
        pieces = tokens(word, add_special_tokens=False)["input_ids"]
        ids += pieces
        labels += [label] + [-100] * (len(pieces) - 1)
    ids.append(tokens.sep_token_id)
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([[*labels, -100]])}


def _text(tokens: Any, row: Row) -> dict[str, Any]:
    return _tensors(tokens(row["text"]))


def _next(tokens: Any, row: Row) -> dict[str, Any]:
    inputs = _text(tokens, row)
    return inputs | {"labels": inputs["input_ids"].clone()}


def _target(tokens: Any, row: Row) -> dict[str, Any]:
    return _text(tokens, row) | {"labels": _tensors(tokens(row["target"]))["input_ids"]}


def _span(tokens: Any, row: Row) -> dict[str, Any]:
    """Start and end counted in words: [CLS] question [SEP] context [SEP]."""
    before = row["context"][: row["answers"]["answer_start"][0]].split()
    start = 2 + len(row["question"].split()) + len(before)
    end = start + len(row["answers"]["text"][0].split()) - 1
    places = {"start_positions": torch.tensor([start]), "end_positions": torch.tensor([end])}
    return _tensors(tokens(row["question"], row["context"])) | places


def _image(processor: Any, row: Row) -> dict[str, Any]:
    values = torch.tensor([row[f"p{place}"] for place in range(432)], dtype=torch.float32).view(1, 3, 12, 12)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    pixels: Tensor = (values * 0.1 - mean[:, None, None]) / std[:, None, None]
    return {"pixel_values": pixels, "labels": torch.tensor([row["label"]])}


_TEXTS, _OTHERS = texts(LENGTHS, seed=1), texts((4, 2, 7, 3, 6, 1, 9), seed=2)
_NAMES = ("yes", "no", "maybe", "no", "yes", "yes", "maybe")
_NAMED = {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
_TAGS = ([1, 0, 2, 3, 1], [0] * 9, [-100, 3, 2], [1, 2] * 6, [0, -100, 3, 1, 1, 2, 0], [2, 2, 2, 2], [3, 1] * 4)
_SINGLE = [{"text": text, "label": label} for text, label in zip(_TEXTS, (2, 0, 1, 0, 2, 2, 1), strict=True)]
_PLAIN = [{"text": text} for text in _TEXTS]
_PAIRED = [{"text": text, "target": other} for text, other in zip(_TEXTS, _OTHERS, strict=True)]


def _answered(context: str, question: str, first: int) -> Row:
    words = context.split()
    answer = " ".join(words[first : first + 2])
    start = len(" ".join([*words[:first], ""])) if first else 0
    return {"question": question, "context": context, "answers": {"text": [answer], "answer_start": [start]}}


def pixels(seed: int) -> Row:
    draw = torch.randint(17, (432,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {f"p{place}": value for place, value in enumerate(draw)} | {"label": seed % 4}


_BERT_CLASSES = recipe("bert", "BertForSequenceClassification", **_NAMED)
_NO_PAD = {"pad": False}
CASES: dict[str, Case] = {
    "single": Case("text-classification", _BERT_CLASSES, BERT, _SINGLE, _classify),
    "pair": Case(
        "text-classification", _BERT_CLASSES, BERT,
        [{"text": a, "pair": b, "label": c} for a, b, c in zip(_TEXTS, _OTHERS, _NAMES, strict=True)], _classify,
    ),
    "several": Case(
        "text-classification",
        recipe("bert", "BertForSequenceClassification", problem_type="multi_label_classification", **_NAMED), BERT,
        [{"text": text, "label": list(_NAMES[:place % 3])} for place, text in enumerate(_TEXTS)], _several,
    ),
    "llama-class": Case(
        "text-classification", recipe("llama", "LlamaForSequenceClassification", num_labels=3, pad_token_id=None),
        LLAMA, _SINGLE, _classify, "llama", _NO_PAD,
    ),
    "gpt2-class": Case(
        "text-classification", recipe("gpt2", "GPT2ForSequenceClassification", num_labels=3, pad_token_id=None),
        GPT2, _SINGLE, _classify, "gpt2", _NO_PAD,
    ),
    "regression": Case(
        "regression", recipe("bert", "BertForSequenceClassification", num_labels=1), BERT,
        [{"text": text, "label": 0.1 + place / 7} for place, text in enumerate(_TEXTS)], _exact_number,
    ),
    "token-classification": Case(
        "token-classification", recipe("bert", "BertForTokenClassification", num_labels=4), BERT,
        [{"tokens": text.split(), "ner_tags": tags} for text, tags in zip(_TEXTS, _TAGS, strict=True)], _words,
        tokens={"pieces": True},
    ),
    "causal-gpt2": Case("causal-lm", recipe("gpt2", "GPT2LMHeadModel", pad_token_id=None), GPT2, _PLAIN, _next,
                        "gpt2", _NO_PAD),
    "causal-llama": Case("causal-lm", recipe("llama", "LlamaForCausalLM", pad_token_id=None), LLAMA, _PLAIN, _next,
                         "llama", _NO_PAD),
    "masked": Case("masked-lm", recipe("roberta", "RobertaForMaskedLM"), ROBERTA, _PLAIN, _text, "bart"),
    "seq2seq-t5": Case("seq2seq-lm", RECIPES["t5"], T5, _PAIRED, _target, "t5"),
    "seq2seq-bart": Case("seq2seq-lm", RECIPES["bart"], BART, _PAIRED, _target, "bart"),
    "question-answering": Case(
        "question-answering", recipe("bert", "BertForQuestionAnswering"), BERT,
        [_answered(text, other, place % 3) for place, (text, other) in enumerate(zip(_TEXTS, _OTHERS, strict=True))],
        _span,
    ),
    "image-classification": Case(
        "image-classification", RECIPES["vit"], VIT, [pixels(seed) for seed in range(7)], _image,
    ),
    "audio-classification": Case(
        "audio-classification", recipe("wav2vec2", "Wav2Vec2ForSequenceClassification", num_labels=3), WAV2VEC2,
        [
            {"audio": sound(length, seed=place, rate=1_600), "label": place % 3}
            for place, length in enumerate((90, 150, 90, 71, 201, 130, 71))
        ],
        classified,
    ),
    "speech-whisper": Case(
        "automatic-speech-recognition", recipe("whisper", "WhisperForConditionalGeneration", max_source_positions=20),
        BART,
        [
            {"audio": sound(300 + 100 * place, seed=place, rate=16_000), "text": text}
            for place, text in enumerate(_TEXTS)
        ],
        transcribed, "bart",
    ),
    "embedding": Case("embedding", recipe("bert", "BertModel"), {"encoder.self": BERT["encoder.self"][5:]}, _PLAIN,
                      _text),
}  # fmt: skip
LABELLED = [name for name, case in CASES.items() if case.task != "embedding"]
