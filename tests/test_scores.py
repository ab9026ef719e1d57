"""Scores equal their formulas on evidence made up by hand, and keep the properties that they declare."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel
from zoo import SPECIMENS

from headscope import registry
from headscope.discovery import find_sites
from headscope.heads import Site
from headscope.matrices import HeadWeights, dead_heads, head_weights
from headscope.scores import Evidence, Means, Need, Score
from headscope.scores.attention import MASSES
from headscope.scores.weights import effective_rank
from headscope.study import load_scores
from headscope.sums import spearman

SCORES = load_scores(["weights", "importance", "sensitivity", "effect"])  # others need a model: their own test files
EXAMPLES, TOKENS = 7, 5


def site() -> Site:
    return find_sites(SPECIMENS["bert"].build()).sites[0]


SITE = site()


def evidence(seed: int = 0, draws: int = 2) -> Evidence:
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(EXAMPLES, TOKENS, SITE.n_heads, generator=generator, dtype=torch.float64)
    sampled = torch.randn(draws, EXAMPLES, SITE.n_heads, generator=generator, dtype=torch.float64)
    alone = torch.rand(EXAMPLES, SITE.n_heads, generator=generator, dtype=torch.float64)
    return Evidence(SITE, torch.arange(1, EXAMPLES + 1), gate, sampled, rows(generator), alone)


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    """Sums over attention rows as `attention` makes them."""
    masses = [name for mass in (*MASSES, "local") for name in (mass, f"{mass}_uniform")]
    names = ["queries", "choices", "entropy", "entropy_ratio", "distance", "confidence", *masses]
    return {name: torch.rand(EXAMPLES, SITE.n_heads, generator=generator, dtype=torch.float64) + 0.5 for name in names}


def random_weights(heads: int = SITE.n_heads) -> HeadWeights:
    generator = torch.Generator().manual_seed(3)
    shapes = [(heads, 11, 6), (heads, 11, 6), (heads, 11, 7), (heads, 7, 13)]
    return HeadWeights(*(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes))


def columns(score: Score, parts: list[Evidence]) -> dict[str, Tensor]:
    """The columns of a score from evidence that comes in parts."""
    sums: dict[str, Tensor] = {}
    count = sum(len(part.positions) for part in parts)
    for part in parts:
        for name, values in score.moments(part).items():
            sums[name] = sums.get(name, torch.zeros(SITE.n_heads, dtype=torch.float64)) + values.sum(dim=0)
    means = {name: total / count for name, total in sums.items()}
    return score.finish(SITE, Means(count, means, random_weights()))


def cut(whole: Evidence, at: int) -> list[Evidence]:
    gate, sampled, sums, alone = whole.gate, whole.sampled, whole.rows, whole.alone
    assert gate is not None and sampled is not None and sums is not None and alone is not None
    return [
        Evidence(
            SITE,
            whole.positions[part],
            gate[part],
            sampled[:, part],
            {name: values[part] for name, values in sums.items()},
            alone[part],
        )
        for part in (slice(0, at), slice(at, None))
    ]


def test_importance_by_hand() -> None:
    """Two examples of two tokens and gate gradients (1, -3) and (2, 2): |-2| and |4|, so 3 ± 1, by token 4 and 4."""
    gate = torch.zeros(2, 2, SITE.n_heads, dtype=torch.float64)
    gate[0, :, 0], gate[1, :, 0] = torch.tensor([1.0, -3.0]), torch.tensor([2.0, 2.0])
    found = columns(SCORES["importance"], [Evidence(SITE, torch.tensor([1, 1]), gate)])
    first = {name: float(values[0]) for name, values in found.items()}
    assert first == pytest.approx(
        {
            "importance": 3.0,
            "importance_se": 1.0,
            "importance_layer_norm": 1.0,
            "importance_token": 4.0,
            "gradient_mean": 1.0,
            "fisher": 10.0,
        }
    )


def test_importance_equals_the_reference() -> None:
    whole = evidence()
    assert whole.gate is not None
    wanted = reference.importance([{0: example.sum(dim=0)} for example in whole.gate])[0]
    found = columns(SCORES["importance"], [whole])
    for name, expected in wanted.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


def test_sensitivity_and_effect_equal_the_reference() -> None:
    whole = evidence(draws=3)
    assert whole.gate is not None and whole.sampled is not None
    draws = [[whole.sampled[draw, example] for draw in range(3)] for example in range(EXAMPLES)]
    wanted = reference.sensitivity(draws, whole.positions.tolist())
    found = columns(SCORES["sensitivity"], [whole])["sensitivity"]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    mean = whole.gate.sum(dim=1).mean(dim=0)
    both = columns(SCORES["effect"], [whole])["effect"]
    torch.testing.assert_close(both, reference.effect(mean, wanted), rtol=1e-12, atol=1e-12)


def test_weights_equal_the_reference() -> None:
    found = columns(SCORES["weights"], [evidence()])
    matrices = random_weights()
    assert matrices.query is not None and matrices.key is not None
    assert matrices.value is not None and matrices.output is not None
    for head in range(SITE.n_heads):
        wanted = reference.weights(
            matrices.query[head], matrices.key[head], matrices.value[head], matrices.output[head]
        )
        assert {name: float(values[head]) for name, values in found.items()} == pytest.approx(wanted, rel=1e-9)


def test_effective_rank_by_hand() -> None:
    """Equal singular values count all, a rank-one product counts one, and 3:1 gives exp of the entropy of ¾, ¼."""
    identity = torch.eye(5, 3, dtype=torch.float64)
    assert float(effective_rank(identity, identity)) == pytest.approx(3)
    one = torch.ones(4, 2, dtype=torch.float64)
    assert float(effective_rank(one, one)) == pytest.approx(1)
    scaled = identity[:, :2] * torch.tensor([3.0, 1.0])
    assert float(effective_rank(scaled, identity[:, :2])) == pytest.approx(1.7547653506033862)
    assert torch.isnan(effective_rank(torch.zeros(4, 2, dtype=torch.float64), one))


@pytest.mark.parametrize("name", sorted(SCORES))
def test_cutting_into_batches_changes_nothing(name: str) -> None:
    whole = evidence()
    wanted = columns(SCORES[name], [whole])
    for at in (1, 3, 6):
        for title, values in columns(SCORES[name], cut(whole, at)).items():
            torch.testing.assert_close(values, wanted[title], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", sorted(set(SCORES) - {"weights"}))
def test_permuting_heads_permutes_scores(name: str) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    whole = evidence()
    assert whole.gate is not None and whole.sampled is not None
    assert whole.rows is not None and whole.alone is not None
    moved = Evidence(
        SITE,
        whole.positions,
        whole.gate[..., order],
        whole.sampled[..., order],
        {name: values[:, order] for name, values in whole.rows.items()},
        whole.alone[:, order],
    )
    wanted = columns(SCORES[name], [whole])
    for title, values in columns(SCORES[name], [moved]).items():
        torch.testing.assert_close(values, wanted[title][order], rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 100.0), st.integers(0, 1000))
def test_layer_norm_does_not_depend_on_the_scale_of_the_loss(scale: float, seed: int) -> None:
    whole = evidence(seed)
    assert whole.gate is not None
    scaled = Evidence(SITE, whole.positions, whole.gate * scale)
    title = "importance_layer_norm"
    wanted = columns(SCORES["importance"], [whole])[title]
    torch.testing.assert_close(columns(SCORES["importance"], [scaled])[title], wanted, rtol=1e-9, atol=1e-12)


def test_a_site_without_importance_is_zero_not_nan() -> None:
    gate = torch.zeros(3, 2, SITE.n_heads, dtype=torch.float64)
    found = columns(SCORES["importance"], [Evidence(SITE, torch.ones(3, dtype=torch.long), gate)])
    assert torch.equal(found["importance_layer_norm"], torch.zeros(SITE.n_heads, dtype=torch.float64))


def test_one_example_has_no_standard_error() -> None:
    part = cut(evidence(), 1)[0]
    assert torch.isnan(columns(SCORES["importance"], [part])["importance_se"]).all()


def test_columns_are_those_that_are_declared() -> None:
    for name, score in SCORES.items():
        assert [column.name for column in score.columns] == list(columns(score, [evidence()])), name
    for name, score in load_scores(["all"]).items():
        assert score.ranks in ("", *(column.name for column in score.columns))
        assert score.needs <= set(Need)
        assert name in registry.names("scores")


def slices_by_layout(name: str, model: PreTrainedModel, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value matrix of a head, `[d_in d_head]`, cut out by the layout that each family documents."""
    if name == "gpt2":  # Conv1D [d_in, q|k|v]
        weight = model.transformer.h[0].attn.c_attn.weight
        query, key, value = (part[:, 6 * head : 6 * head + 6] for part in weight.split(30, dim=1))
        return query, key, value
    if name in ("gpt_neox", "bloom"):  # rows interleaved: head, then q|k|v
        block = model.gpt_neox.layers[0].attention if name == "gpt_neox" else model.transformer.h[0].self_attention
        rows = block.query_key_value.weight.view(5, 3, -1, block.query_key_value.weight.shape[1])
        return tuple(rows[head, part].T for part in range(3))  # type: ignore[return-value]
    if name == "phi3":  # q rows, then k rows and v rows of the groups
        weight = model.model.layers[0].self_attn.qkv_proj.weight
        group = head // 4
        starts = (10 * head, 80 + 10 * group, 100 + 10 * group)
        return tuple(weight[start : start + 10].T for start in starts)  # type: ignore[return-value]
    attention = model.model.layers[0].self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    numbers = (head, head // 4, head // 4)
    return tuple(p.weight[10 * n : 10 * n + 10].T for p, n in zip(projections, numbers, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "bloom", "phi3", "llama"])
def test_head_matrices_are_those_of_the_layout(name: str) -> None:
    model = SPECIMENS[name].build()
    found = find_sites(model).sites[0]
    matrices = head_weights(model, found)
    for head in range(found.n_heads):
        for got, wanted in zip(
            (matrices.query, matrices.key, matrices.value), slices_by_layout(name, model, head), strict=True
        ):
            assert got is not None and torch.equal(got[head], wanted)


def test_dead_heads_are_those_that_write_nothing() -> None:
    model = SPECIMENS["llama"].build()
    found = find_sites(model).sites[0]
    attention = model.get_submodule(found.module)
    assert not any(dead_heads(model, found))
    with torch.no_grad():
        attention.o_proj.weight[:, 20:30] = 0  # head 2 of width 10
    assert [head for head, dead in enumerate(dead_heads(model, found)) if dead] == [2]
    with torch.no_grad():
        attention.v_proj.weight[10:] = 0  # the second group
    assert [head for head, dead in enumerate(dead_heads(model, found)) if dead] == [2, 4, 5, 6, 7]


def test_rank_correlation() -> None:
    assert spearman([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.8)
    assert spearman([1.0, 1.0], [1.0, 2.0]) != spearman([1.0, 1.0], [1.0, 2.0]), "not a number where all are equal"
