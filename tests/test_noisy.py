"""Images that a model has learned by heart are also shown with noise to what repairs; others are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import SAMPLES

from headscope import noisy
from headscope.data import DataOptions, load_examples
from headscope.examples import Example, held_out
from headscope.mending import Mender
from headscope.noisy import STRENGTH, learned, with_copies
from headscope.prepared import mender
from headscope.request import Request
from headscope.selection import select
from headscope.study import Study, StudyOptions
from headscope.trials import Trials

DIGITS = SAMPLES / "vit-digits"


def study_of(file: str, limit: int = 40) -> Study:
    return Study.open(str(DIGITS), str(DIGITS / file), StudyOptions(data=DataOptions(limit=limit)))


@pytest.fixture(scope="module")
def dev() -> Study:
    return study_of("dev.csv")


def items(study: Study) -> tuple[Example, ...]:
    assert study.examples is not None
    return study.examples.items


def test_what_was_trained_on_is_known_from_what_is_new(dev: Study) -> None:
    """The sample was trained on its dev file until it made no mistake there, and never saw the test file."""
    assert learned(dev)
    assert not learned(dev.on(load_examples(str(DIGITS / "test.csv"), dev.loaded, DataOptions(limit=200))))
    assert mender(dev).noise


def test_models_of_text_and_examples_without_labels_are_left_alone(dev: Study) -> None:
    text = SAMPLES / "sentiment-minilm"
    assert not learned(Study.open(str(text), str(text / "dev.jsonl"), StudyOptions(data=DataOptions(limit=8))))
    assert dev.examples is not None
    bare = replace(dev.examples, items=tuple(replace(one, labelled=False) for one in dev.examples.items))
    assert not learned(dev.on(bare))


def test_copies_differ_by_the_noise_alone(dev: Study) -> None:
    many = items(with_copies(dev))
    assert many[:40] == items(dev) and len(many) == 40 * 8
    assert len({one.number for one in many}) == len(many)
    known = {one.number: one for one in items(dev)}
    noises = []
    for copy in many[40:]:
        origin = known[copy.drawn_from]
        assert (copy.targets, copy.length) == (origin.targets, origin.length)
        pixels = origin.inputs["pixel_values"]
        noises.append((copy.inputs["pixel_values"] - pixels) / pixels.std(correction=0))
    noise = torch.stack(noises)
    assert noise.mean().abs() < 0.01 and abs(noise.std() - STRENGTH) < 0.01
    assert len({tuple(one.flatten().tolist()[:3]) for one in noise}) == len(noise), "each draw is its own"
    again = items(with_copies(dev))
    assert all(
        torch.equal(a.inputs["pixel_values"], b.inputs["pixel_values"]) for a, b in zip(many, again, strict=True)
    )


def test_there_are_fewer_copies_of_many_examples(dev: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy, "ROOM", 130)
    assert len(items(with_copies(dev))) == 40 * 3
    monkeypatch.setattr(noisy, "ROOM", 1)
    assert len(items(with_copies(dev))) == 40 * 2, "one each at least"


def test_copies_stay_with_their_example(dev: Study) -> None:
    both = with_copies(dev)
    assert both.examples is not None and dev.examples is not None
    parts = held_out(both.examples, 0, split=2)
    fitted, held = ({one.origin for one in part.items} for part in parts)
    assert len(fitted) == 30 and len(held) == 10 and not fitted & held
    assert held == {one.number for one in held_out(dev.examples, 0, split=2)[1].items}, "as they would part alone"


@pytest.mark.slow
def test_new_images_are_better_served() -> None:
    """What `auto` chooses and repairs by noisy copies is nearer to the whole model on images that neither has seen."""
    dev = study_of("dev.csv", 100)
    judged = dev.on(load_examples(str(DIGITS / "test.csv"), dev.loaded, DataOptions(limit=400)))
    request = Request(ratio=0.6, unit="head", min_heads=0, masked=True, criterion="auto")
    apart = []
    for one in (mender(dev), Mender(dev)):
        plan = select(dev, request, None, mender=one).plan
        apart.append(Trials(judged, None, one).judged(plan).final.divergence)
    assert apart[0] < 0.8 * apart[1], apart
