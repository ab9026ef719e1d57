"""Learned gates: subsets of exactly k with the right gradient, planted heads where they belong, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import Ran, command, refused
from repair_cases import opened
from task_cases import CASES, Opened, open_case
from torch import Tensor
from torch.testing import assert_close

import headscope
from headscope import objective as objective_module
from headscope.capture import gate
from headscope.criteria import gates as criterion
from headscope.criteria import load_criterion
from headscope.data import DataOptions
from headscope.errors import DataError, DeviceError, UsageError
from headscope.evaluation import divergences
from headscope.examples import Batch, collate
from headscope.heads import HeadId, Site, SiteId
from headscope.losses import Distribution
from headscope.objective import Apart, Objective
from headscope.plan import Plan, SiteHeads
from headscope.pruning import PruneOptions
from headscope.request import Request
from headscope.study import Study, StudyOptions
from headscope.subsets import gumbel, pull_back, relaxed
from headscope.subsets import opened as open_largest
from headscope.surgery import gates as gates_of
from headscope.units import Rules, blocks

SIZES = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0], dtype=torch.float64)
SUMS = torch.tensor([[0.3, -1.0, 2.0, 0.4, 0.1], [5.0, 4.0, -3.0, 0.0, 9.0]], dtype=torch.float64)
COUNT = torch.tensor([4.0, 7.0], dtype=torch.float64)


def test_the_largest_that_fit_are_open() -> None:
    """By hand: in the first row 2.0 (1 head), 0.4 (3 heads); in the second 9.0, 5.0, 4.0, 0.0."""
    assert open_largest(SUMS, SIZES, COUNT).tolist() == [[0, 0, 1, 1, 0], [1, 1, 0, 1, 1]]
    ones = torch.ones(5, dtype=torch.float64)
    assert open_largest(SUMS, ones, COUNT - 2).sum(dim=1).tolist() == [2, 5]


def test_relaxed_gates_sum_to_the_count_and_have_its_gradient() -> None:
    gates = relaxed(SUMS, SIZES, COUNT)
    assert_close((gates * SIZES).sum(dim=1), COUNT, rtol=1e-12, atol=0)
    assert bool((gates.argsort(dim=1) == SUMS.argsort(dim=1)).all())
    pulls = torch.randn(2, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = pull_back(gates, SIZES, pulls)
    for block in range(5):
        step = 1e-6 * F.one_hot(torch.tensor(block), 5)
        up, down = (relaxed(SUMS + sign * step, SIZES, COUNT) for sign in (1, -1))
        assert_close(found[:, block], ((up - down) / 2e-6 * pulls).sum(dim=1), rtol=1e-6, atol=1e-9)


def test_noise_draws_without_replacement() -> None:
    """One of three is open as often as its weight says: a softmax."""
    weights = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    noise = gumbel(torch.rand(40_000, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    drawn = open_largest(weights + noise, torch.ones(3).double(), torch.ones(len(noise)).double())
    assert_close(drawn.mean(dim=0), weights.softmax(dim=0), rtol=0, atol=0.01)


def study_of(found: Opened, steps: int | None = None, **options: Any) -> Study:
    """The case with so many steps of training."""
    study = Study(found.study.loaded, found.study.examples, replace(found.study.options, steps=steps, **options))
    study.discovery = found.study.discovery
    return study


def learned(study: Study, seed: int = 0) -> dict[HeadId, float]:
    return dict(load_criterion("gates").scores(study, seed))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return opened("single", tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return opened("causal-llama", tmp_path_factory.mktemp("llama"))


def plainly(study: Study, batch: Batch, gates: dict[SiteId, Tensor]) -> Tensor:
    """The divergence of one example, by torch's own functions on whole logits."""
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    with torch.no_grad():
        first = objective.forward(batch)
        with gate(study.loaded.model, gates, study.sites):
            other = objective.forward(batch)
    if study.loaded.task.distribution is Distribution.DIRECTION:
        return 1 - F.cosine_similarity(first, other).mean()
    return F.kl_div(other.log_softmax(1), first.log_softmax(1), log_target=True, reduction="batchmean")


@pytest.mark.parametrize("name", ["single", "causal-gpt2", "seq2seq-bart", "embedding"])
def test_each_example_is_pulled_by_its_own_gates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divergence and gradient of a padded batch, logits in pieces, are those of single examples by differences."""
    monkeypatch.setattr(objective_module, "CHUNK_VALUES", 1)
    study = open_case(CASES[name], tmp_path).study
    assert study.examples is not None
    chosen = study.examples.items[:3]
    draw = torch.Generator().manual_seed(7)
    gates = {site.id: torch.rand(3, site.n_heads, generator=draw, dtype=torch.float64) for site in study.sites}
    kind = study.loaded.task.distribution
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    found = objective.apart(collate(chosen, study.examples.pads), gates, lambda a, b: divergences(a, b, kind))
    alone = [collate([example], study.examples.pads) for example in chosen]
    own = [{id: values[place] for id, values in gates.items()} for place in range(3)]
    for place, batch in enumerate(alone):
        assert_close(found.distance[place], plainly(study, batch, own[place]), rtol=1e-9, atol=1e-12)
    for number, site in enumerate(study.sites):
        place, head = number % 3, number % site.n_heads
        step = 1e-5 * F.one_hot(torch.tensor(head), site.n_heads).double()
        moved = [own[place] | {site.id: own[place][site.id] + sign * step} for sign in (1, -1)]
        up, down = (plainly(study, alone[place], one) for one in moved)
        assert_close(found.pulls[site.id][place, head], (up - down) / 2e-5, rtol=1e-5, atol=1e-8)


def scale(study: Study, site: Site, head: int, factor: float) -> None:
    """Scale what a BERT head writes: its columns of the output projection."""
    weight = study.loaded.model.get_submodule(site.output).weight
    with torch.no_grad():
        weight[:, head * site.d_value : (head + 1) * site.d_value] *= factor  # type: ignore[index]


def test_a_dead_head_goes_first(tmp_path: Path) -> None:
    study = study_of(opened("single", tmp_path), 40)
    site = study.sites[1]
    before = learned(study)
    head = max(site.heads, key=before.__getitem__)
    scale(study, site, site.heads.index(head), 0.0)
    after = learned(study)
    assert min(after, key=after.__getitem__) == head
    assert min(before, key=before.__getitem__) != head


def test_a_head_that_says_all_stays_last(tmp_path: Path) -> None:
    study = study_of(opened("single", tmp_path), 40)
    crucial = min(before := learned(study), key=before.__getitem__)
    for site in study.sites:
        for place, head in enumerate(site.heads):
            if head != crucial:
                scale(study, site, place, 0.01)
    after = learned(study)
    assert max(after, key=after.__getitem__) == crucial


def test_the_seed_decides_and_nothing_else(bert: Opened) -> None:
    """Batches, memory that runs out and the rest of the process change no more than rounding."""
    study = study_of(bert, 6)
    first = learned(study)
    torch.manual_seed(99)
    assert learned(study) == first
    assert learned(study, 1) != first
    assert learned(study_of(bert, 6, batch_size=3)) == pytest.approx(first, rel=1e-6)


def test_the_seed_decides_which_examples_a_step_runs(bert: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, seen = Objective.apart, set[int]()

    def look(self: Objective, batch: Batch, *rest: Any) -> Apart:
        seen.update(batch.numbers)
        return whole(self, batch, *rest)

    def ran(seed: int) -> set[int]:
        seen.clear()
        learned(study_of(bert, 1), seed)
        return set(seen)

    monkeypatch.setattr(Objective, "apart", look)
    assert ran(0) == ran(0) != ran(1)
    assert len(ran(1)) == criterion.EXAMPLES


def test_memory_that_runs_out_halves_the_batch(bert: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, whole, sizes = learned(study_of(bert, 4)), Objective.apart, list[int]()

    def small(self: Objective, batch: Batch, *rest: Any) -> Apart:
        sizes.append(len(batch))
        if len(batch) > 2:
            raise MemoryError
        return whole(self, batch, *rest)

    monkeypatch.setattr(Objective, "apart", small)
    assert learned(study_of(bert, 4)) == pytest.approx(wanted, rel=1e-6)
    assert max(sizes) > 2 and 2 in sizes
    monkeypatch.setattr(Objective, "apart", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(DeviceError, match="out of memory on one example"):
        learned(study_of(bert, 1))


@pytest.mark.parametrize("name", ["single", "causal-llama"])
def test_the_model_is_left_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(opened(name, tmp_path), 2)
    model = study.loaded.model
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()

    def unchanged() -> bool:
        flags = [parameter.requires_grad for parameter in model.parameters()]
        hooks = [hook for module in model.modules() for hook in (module._forward_hooks, module._forward_pre_hooks)]
        return (
            all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            and flags == [number % 2 == 0 for number in range(len(flags))]
            and not any(parameter.grad is not None for parameter in model.parameters())
            and not any(hooks)
            and not any(module.training or "forward" in module.__dict__ for module in model.modules())
            and torch.equal(torch.get_rng_state(), random)
            and torch.is_grad_enabled()
        )

    learned(study)
    assert unchanged()

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(criterion, "divergences", fail)
    with pytest.raises(RuntimeError, match="planted"):
        learned(study)
    assert unchanged()


def test_groups_share_their_weight_and_heads_that_are_gone_have_none(llama: Opened) -> None:
    study = study_of(llama, 3)
    known = [SiteHeads.of(site) for site in study.sites]
    gone = {HeadId(known[0].id, number) for number in known[0].groups[0]}
    left = blocks(known, Rules("model", "auto", 1, structural=True), gone=gone)
    assert {len(block) for block in left} == {4} and len(left) == 3
    greedy = load_criterion("gates").greedy
    assert greedy is not None
    with gate(study.loaded.model, gates_of(study.sites, Plan(tuple(known), tuple(sorted(gone)))), study.sites):
        scores = greedy(study, 0, left)
    assert list(scores) == [head for block in left for head in block]
    found = [{scores[head] for head in block} for block in left]
    assert all(len(values) == 1 for values in found) and len(set.union(*found)) == 3
    assert greedy(study, 0, left[:1]) == dict.fromkeys(left[0], 0.0)


def test_layers_of_one_module_share_their_weight(tmp_path: Path) -> None:
    study = study_of(opened("masked-albert", tmp_path), 3)
    scores = learned(study)
    layers = [[scores[head] for head in site.heads] for site in study.sites]
    assert layers[0] == layers[1] == layers[2] == layers[3]
    assert len(set(layers[0])) == 5


def test_exactly_so_many_heads_of_an_example_are_open(llama: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole groups, between one and all but one of them, other ones and other numbers for other examples."""
    study = study_of(llama, 4)
    seen: list[Tensor] = []
    whole = Objective.apart

    def look(self: Objective, batch: Batch, gates: dict[SiteId, Tensor], distance: Any) -> Apart:
        seen.append(torch.cat([gates[site.id] for site in study.sites], dim=1))
        return whole(self, batch, gates, distance)

    monkeypatch.setattr(Objective, "apart", look)
    known = [SiteHeads.of(site) for site in study.sites]
    greedy = load_criterion("gates").greedy
    assert greedy is not None
    greedy(study, 0, blocks(known, Rules("model", "group", 1, structural=True)))
    table = torch.cat(seen).unflatten(1, (4, 4))
    assert len(table) == 4 * criterion.EXAMPLES
    assert set(table.flatten().tolist()) == {0.0, 1.0}
    assert bool((table == table[..., :1]).all()), "a group is open or closed as a whole"
    assert set(table[..., 0].sum(dim=1).tolist()) == {1.0, 2.0, 3.0}


def test_steps_and_their_examples(bert: Opened) -> None:
    study = study_of(bert, 3)
    told: list[tuple[int, int]] = []
    study.progress = lambda done, total: told.append((done, total))
    learned(study)
    assert told == [(16, 48), (32, 48), (48, 48)]
    study.options = replace(study.options, steps=None)
    assert study.examples is not None
    parts = list(criterion.portions(study.examples.items, 4, seed=5))
    numbers = [example.number for part in parts[:2] for example in part]
    assert len(set(numbers)) == len(numbers) == 32, "none comes twice before all have come"
    assert [one.number for one in parts[2]] != [one.number for one in parts[0]]
    assert list(criterion.portions(study.examples.items, 4, seed=5)) == parts
    assert next(criterion.portions(study.examples.items, 1, seed=6)) != parts[0]
    assert [len(part) for part in criterion.portions(study.examples.items[:3], 2, seed=0)] == [3, 3]


def test_labels_are_not_looked_at(bert: Opened, tmp_path: Path) -> None:
    case = bert.case
    plain = replace(case, rows=[{"text": row["text"]} for row in case.rows[:20]])
    marked = replace(case, rows=[row | {"label": 2 - row["label"]} for row in case.rows[:20]])
    for part in ("plain", "marked"):
        (tmp_path / part).mkdir()
    bare = open_case(plain, tmp_path / "plain")
    assert bare.study.examples is not None and not bare.study.examples.labelled
    assert learned(study_of(bare, 3)) == learned(study_of(open_case(marked, tmp_path / "marked"), 3))


@pytest.mark.parametrize("name", ["single", "embedding"])
def test_a_value_that_is_not_finite_stops_the_training(name: str, tmp_path: Path) -> None:
    study = study_of(open_case(CASES[name], tmp_path), 1, batch_size=1)
    assert study.examples is not None
    worst = max(study.examples.items, key=lambda item: item.length)
    (positions,) = [value for key, value in study.loaded.model.named_parameters() if "position_embeddings" in key]
    positions[worst.length - 1] = torch.inf  # only the longest example reaches it
    with pytest.raises(DataError, match=rf"the divergence of example {worst.number} is not finite in float64"):
        learned(study)


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command(monkeypatch, capsysbinary)


def test_on_the_command_line(run: Run, samples: Path) -> None:
    """The plan is that of the same request in Python, and other steps make another one."""
    source = samples / "vit-digits"
    given = ("prune", source, "--data", source / "dev.csv", "--limit", 32, "--ratio", 0.4, "--criterion", "gates")
    ran = run(*given, "--steps", 20, "--dry-run")
    assert ran.code == 0, ran.err
    options = StudyOptions(data=DataOptions(limit=32), steps=20)
    plan = headscope.prune(str(source), str(source / "dev.csv"), ratio=0.4, criterion="gates", options=options).plan
    removed = [label for row in ran.rows[1:] for label in row[-1].split()]
    assert len(removed) == 13 and removed == [str(head.index) for head in plan.removed]
    assert plan.criterion == "gates" and len(set(plan.scores.values())) == 32


def test_steps_of_nothing_that_trains_are_refused(run: Run) -> None:
    given = ("prune", "nowhere", "--data", "d.txt", "--ratio", 0.3, "-o", "out")
    assert refused(run(*given, "--steps", 5), 2, "--steps trains gates", "--criterion gates")
    assert refused(run(*given, "--criterion", "fisher", "--steps", 5), 2, "--steps trains gates")
    assert refused(run(*given, "--criterion", "gates", "--steps", 0), 2, "--steps 0")
    with pytest.raises(UsageError, match="--steps trains gates"):
        PruneOptions(Request(ratio=0.3), StudyOptions(steps=5))
