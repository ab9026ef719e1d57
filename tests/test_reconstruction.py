"""Greedy orders: downdates equal fitting anew, copies go first and are made up for, the chooser follows the order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from repair_cases import opened
from task_cases import Opened
from torch import Tensor
from torch.testing import assert_close

from headscope.capture import gate
from headscope.choice import choose, removal_order
from headscope.criteria import Block, load_criterion
from headscope.criteria.joint_fisher import fisher
from headscope.downdates import RIDGE, Survivors
from headscope.errors import UsageError
from headscope.examples import collate
from headscope.greedy import Quadratic, Step, order, rising
from headscope.heads import AttentionKind, HeadId, Site, SiteId
from headscope.losses import normals
from headscope.objective import Objective
from headscope.output_moments import Weighting, feature_blocks, output_moments, weighting_of
from headscope.output_weights import head_columns
from headscope.plan import Plan, SiteHeads
from headscope.reconstruct import by
from headscope.repair import applied, fit
from headscope.study import Study
from headscope.surgery import gates
from headscope.units import Rules, blocks


def spread(size: int, seed: int, *, rank: int | None = None) -> Tensor:
    """A random positive matrix, of full rank unless told."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size, rank or 2 * size, generator=generator, dtype=torch.float64)
    return factor @ factor.T / factor.shape[1]


def from_scratch(covariance: Tensor, cost: Tensor, gone: Sequence[int], ridge: float) -> float:
    """½ tr(R K_rr), R fitted at once."""
    held = covariance + ridge * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
    kept = [feature for feature in range(len(held)) if feature not in set(gone)]
    across = held[gone][:, kept]
    left = held[gone][:, gone] - across @ torch.linalg.solve(held[kept][:, kept], across.T)
    return float((left * cost[gone][:, gone]).sum()) / 2


@pytest.mark.parametrize("widths", [[3] * 7, [2, 4, 2, 6, 1, 5]])
@pytest.mark.parametrize("rank", [None, 6])
def test_downdates_are_fits_from_scratch(widths: list[int], rank: int | None) -> None:
    size = sum(widths)
    covariance, cost = spread(size, 1, rank=rank), spread(size, 2)
    starts = [sum(widths[:place]) for place in range(len(widths))]
    parts = [list(range(start, start + width)) for start, width in zip(starts, widths, strict=True)]
    left = Survivors(covariance, cost)
    gone: list[int] = []
    total = 0.0
    for place in (3, 0, 5, 1, 4, 2):
        others = [part for part in parts if not set(part) & set(gone)]
        for part in others:
            wanted = from_scratch(covariance, cost, gone + part, RIDGE) - total
            assert left.price(torch.tensor(part)) == pytest.approx(wanted, rel=1e-8, abs=1e-8)
        left.drop(torch.tensor(parts[place]))
        gone += parts[place]
        total = from_scratch(covariance, cost, gone, RIDGE)


def test_what_never_varies_costs_nothing() -> None:
    left = Survivors(torch.zeros(4, 4), spread(4, 0))
    assert left.price(torch.tensor([0, 1])) == 0
    left.drop(torch.tensor([0, 1]))
    assert left.price(torch.tensor([2, 3])) == 0


def label(index: int, layer: int = 0) -> HeadId:
    return HeadId(SiteId("encoder", AttentionKind.SELF, layer), index)


def test_scores_rise_in_the_order_of_the_steps() -> None:
    steps = [Step((label(0),), 0.0), Step((label(1), label(2)), 0.0), Step((label(3),), -5.0), Step((label(4),), 2.0)]
    found = rising([*steps, Step((label(5),), 1.0)])
    values = [found[label(index)] for index in (0, 1, 3, 4, 5)]
    assert found[label(2)] == found[label(1)]
    assert all(low < high for low, high in pairwise(values)) and all(map(math.isfinite, values))
    assert values[0] == 0.0 and values[3] == 2.0 and values[4] == math.nextafter(2.0, 3.0)
    assert rising([Step((label(0),), -3.0)])[label(0)] == -3.0


def test_joint_costs_are_taken_greedily() -> None:
    """By hand: heads 0 and 1 push the same way, 2 against both."""
    matrix = torch.tensor([[2.0, 2.0, -1.0], [2.0, 3.0, -1.0], [-1.0, -1.0, 4.0]], dtype=torch.float64)
    places = {label(index): index for index in range(3)}
    steps = list(order([Quadratic(matrix, places, [(label(index),) for index in range(3)])]))
    assert [(step.heads[0].index, step.added) for step in steps] == [(0, 1.0), (2, 1.0), (1, 2.5)]
    assert sum(step.added for step in steps) == float(matrix.sum() / 2)
    pairs = list(order([Quadratic(matrix, places, [(label(0), label(2)), (label(1),)])]))
    assert [step.added for step in pairs] == [1.5, 3.0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return opened("causal-llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return opened("seq2seq-bart", tmp_path_factory.mktemp("bart"))


Seen = tuple[dict[str, Tensor], dict[str, Tensor]]


def rows(study: Study, *, drawn: int | None = None) -> Iterator[Seen]:
    """For each example alone: what every projection read, and the gradient of the loss towards what it wrote.

    The loss is the task's, a mean over positions, or that of one draw from the prediction, by the root of their number.
    """
    assert study.examples is not None
    model, sites = study.loaded.model, study.sites
    for example in study.examples.items:
        read: dict[str, Tensor] = {}
        wrote: dict[str, Tensor] = {}

        def note(path: str, args: tuple[Tensor], output: Tensor, read: Any = read, wrote: Any = wrote) -> Tensor:
            read[path] = args[0].detach()
            wrote[path] = output if output.requires_grad else output.detach().requires_grad_(True)
            return wrote[path]

        hooks = [
            model.get_submodule(site.output).register_forward_hook(
                lambda module, args, output, path=site.output: note(path, args, output)  # noqa: B023
            )
            for site in sites
        ]
        batch = collate([example], study.examples.pads)
        outputs = Objective(model, study.loaded.task, sites).forward(batch)
        for hook in hooks:
            hook.remove()
        if drawn is None:
            targets = batch.targets[batch.predicted].long()
            loss = torch.nn.functional.cross_entropy(outputs, targets)
        else:  # a random score of the prediction in place of a drawn label's
            key = study.options.seed + (drawn << 32)
            noise = normals(tuple(outputs.shape), seed=key, example=example.number, draw=0)
            chance = outputs.detach().softmax(dim=-1)
            score = chance.sqrt() * noise - chance * (chance.sqrt() * noise).sum(dim=-1, keepdim=True)
            loss = (outputs * score).sum() / len(outputs) ** 0.5
        pulled = torch.autograd.grad(loss, list(wrote.values()))
        yield read, dict(zip(wrote, pulled, strict=True))


def test_draws_from_the_prediction_weigh_as_in_sensitivity(bart: Opened) -> None:
    """Of few positions, several draws are summed: enough for a thousand pulls in all, but no more than eight."""
    study = bart.study
    assert study.examples is not None
    draws = min(8, -(-1024 // sum(len(one.targets) for one in study.examples.items)))
    assert draws > 1
    pulls: dict[str, Tensor] = {}
    for number in range(draws):
        for _, pulled in rows(study, drawn=number):
            for path, values in pulled.items():
                gradient = values.flatten(0, -2)
                pulls[path] = pulls.get(path, 0) + gradient.T @ gradient / len(study.examples) / draws
    for one in output_moments(study, Weighting.SENSITIVITY):
        site = one.layers[0]
        weight = head_columns(study.loaded.model, site, range(site.n_heads)).flatten(0, 1)
        wanted = weight @ pulls[site.output] @ weight.T
        assert_close(one.cost, wanted, rtol=1e-9, atol=1e-9 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_moments_are_those_of_single_examples(name: str, request: pytest.FixtureRequest) -> None:
    """`cost` is W G Wᵀ with G the second moment of the gradient towards what the projection writes."""
    study: Study = request.getfixturevalue(name).study
    assert study.examples is not None and weighting_of(study) is Weighting.GRADIENT
    reads: dict[str, list[Tensor]] = {}
    pulls: dict[str, Tensor] = {}
    for read, pulled in rows(study):
        for path, values in read.items():
            reads.setdefault(path, []).append(values.flatten(0, -2))
            gradient = pulled[path].flatten(0, -2)
            pulls[path] = pulls.get(path, 0) + gradient.T @ gradient / len(study.examples)
    found = output_moments(study, Weighting.GRADIENT)
    assert [one.layers[0].id for one in found] == [site.id for site in study.sites]
    for one in found:
        site = one.layers[0]
        weight = head_columns(study.loaded.model, site, range(site.n_heads)).flatten(0, 1)
        z = torch.cat(reads[site.output])
        assert_close(one.covariance, torch.cov(z.T, correction=0), rtol=1e-9, atol=1e-9)
        wanted = weight @ pulls[site.output] @ weight.T
        assert_close(one.cost, wanted, rtol=1e-9, atol=1e-9 * float(wanted.abs().max()))
    plain = output_moments(study, Weighting.OUTPUT)[0]
    weight = head_columns(study.loaded.model, study.sites[0], range(study.sites[0].n_heads)).flatten(0, 1)
    assert_close(plain.cost, weight @ weight.T)


def test_the_joint_fisher_matrix(llama: Opened) -> None:
    """Its diagonal is the column `fisher`, its sum the mean squared gradient towards one gate for all heads."""
    study = llama.study
    found = fisher(study)
    column = study.scores(["importance"]).values["fisher"]
    assert_close(found.diagonal(), torch.cat([column[site.id] for site in study.sites]), rtol=1e-9, atol=0)
    assert study.examples is not None
    objective, squares = Objective(study.loaded.model, study.loaded.task, study.sites), []
    for example in study.examples.items:
        batch = collate([example], study.examples.pads)
        whole = torch.ones((), dtype=torch.float64, requires_grad=True)
        with gate(study.loaded.model, {site.id: whole.expand(site.n_heads) for site in study.sites}, study.sites):
            outputs = objective.forward(batch)
        loss = torch.nn.functional.cross_entropy(outputs, batch.targets[batch.predicted].long())
        squares.append(float(torch.autograd.grad(loss, whole)[0]) ** 2)
    assert float(found.sum()) == pytest.approx(sum(squares) / len(squares), rel=1e-9)


def site_heads(sites: Sequence[Site]) -> list[SiteHeads]:
    return [SiteHeads.of(site) for site in sites]


@pytest.mark.parametrize("unit", ["head", "group"])
def test_the_chooser_takes_the_greedy_order(llama: Opened, unit: str) -> None:
    """Each step is the cheapest block given those before it, by costs fitted from scratch."""
    study = llama.study
    known = site_heads(study.sites)
    rules = Rules("model", unit, 0, structural=False)
    found = blocks(known, rules)
    assert {len(block) for block in found} == {1 if unit == "head" else 4}
    scores = by(study, found, weighting=Weighting.GRADIENT)
    steps = removal_order(known, scores, rules)
    moments = {one.layers[0].id: one for one in output_moments(study, Weighting.GRADIENT)}

    def cost(heads: set[HeadId]) -> float:
        total = 0.0
        for site in study.sites:
            places = [place for place, head in enumerate(site.heads) if head in heads]
            if places:
                one = moments[site.id]
                total += from_scratch(one.covariance, one.cost, feature_blocks(site, places).tolist(), RIDGE)
        return total

    gone: set[HeadId] = set()
    for step in steps:
        left = [set(block) for block in found if not set(block) <= gone]
        cheapest = min(cost(gone | block) for block in left)
        gone |= set(step)
        assert cost(gone) == pytest.approx(cheapest, rel=1e-8)
    assert len(gone) == 16
    for count in range(2, 16, 4):
        wanted = {head for step in steps[: count if unit == "head" else count // 4] for head in step}
        if wanted:
            assert set(choose(known, scores, len(wanted), rules)) == wanted


def plant(study: Study, site: Site, source: int, target: int) -> None:
    """Make one head of a BERT site read and mix as another does; each writes by columns of its own."""
    attention = study.loaded.model.get_submodule(site.module)
    width = site.d_value
    with torch.no_grad():
        for name in ("query", "key", "value"):
            linear = getattr(attention, name)
            for values in (linear.weight, linear.bias):
                values[target * width : (target + 1) * width] = values[source * width : (source + 1) * width]


def loss_of(study: Study) -> float:
    assert study.examples is not None
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    return float(torch.cat([objective.losses(batch) for batch in study.examples.batches(8, tokens=512)]).mean())


def test_a_copy_goes_first_and_is_made_up_for(tmp_path: Path) -> None:
    study = opened("single", tmp_path).study
    site = study.sites[1]
    plant(study, site, source=1, target=3)
    whole = loss_of(study)
    scores = load_criterion("reconstruction").scores(study, 0)
    first = min(scores, key=scores.__getitem__)
    assert first in (site.heads[1], site.heads[3])
    known = tuple(site_heads(study.sites))

    def without(head: HeadId) -> tuple[float, float]:
        """The loss without a head, and with the repair of that."""
        plan = Plan(known, (head,))
        repair = fit(study, plan)
        with gate(study.loaded.model, gates(study.sites, plan), study.sites):
            plain = loss_of(study)
            if repair is None:
                return plain, plain
            with applied(study.loaded.model, study.sites, repair):
                return plain, loss_of(study)

    plain, repaired = without(first)
    assert abs(repaired - whole) < 1e-4 < abs(plain - whole)
    other, mended = without(site.heads[2])
    assert abs(other - whole) > 1e-3 and abs(mended - whole) > 1e-3, "another head is not made up for"


def test_groups_and_heads_that_are_gone_are_no_candidates(llama: Opened) -> None:
    known = site_heads(llama.study.sites)
    gone = known[0].groups[0]
    heads = {HeadId(known[0].id, number) for number in gone}
    left = blocks(known, Rules("model", "auto", 1, structural=True), gone=heads)
    assert left == [
        tuple(HeadId(site.id, number) for number in group)
        for site in known
        for group in site.groups
        if group != gone or site is not known[0]
    ]
    structural = blocks(known, Rules("model", "head", 1, structural=True))
    assert all(len(block) == 1 for block in structural)
    closed = gates(llama.study.sites, Plan(tuple(known), tuple(sorted(heads))))
    with gate(llama.study.loaded.model, closed, llama.study.sites):
        for name in ("reconstruction", "joint-fisher"):
            greedy = load_criterion(name).greedy
            assert greedy is not None
            scores = greedy(llama.study, 0, left)
            assert scores.keys() == {head for block in left for head in block}


def test_layers_of_one_module_go_together(tmp_path: Path) -> None:
    study = opened("masked-albert", tmp_path).study
    for name in ("reconstruction", "joint-fisher"):
        scores = load_criterion(name).scores(study, 0)
        layers = [[scores[head] for head in site.heads] for site in study.sites]
        assert layers[0] == layers[1] == layers[2] == layers[3]
        assert len(set(layers[0])) == 5


def test_without_data_there_is_no_order(llama: Opened) -> None:
    bare: list[Block] = []
    for name in ("reconstruction", "joint-fisher"):
        greedy = load_criterion(name).greedy
        assert greedy is not None
        with pytest.raises(UsageError, match=f"{name} cannot be measured without data"):
            greedy(llama.study.on(None), 0, bare)
