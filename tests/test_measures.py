"""Measures of pairs of heads equal loops over pairs, keep the properties they declare, and see planted likenesses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pair_reference as reference
import pytest
import torch
from conftest import SAMPLES, TEST_FILES
from hypothesis import given, settings
from jaxtyping import install_import_hook
from torch import Tensor

NAMES = ("pairs", "measures", "circuits", "moments", "row_store", "pair_sums")
with install_import_hook([f"headscope.{name}" for name in NAMES], "shape_checks.checked"):
    import headscope.circuits
    import headscope.measures.cosine
    import headscope.moments
    import headscope.pair_sums
    import headscope.row_store

from pair_cases import ALL, measured, own_maps, parts, references, run, space_of
from transformers import PreTrainedModel
from zoo import SPECIMENS

import headscope.patterns
import headscope.tiles
from headscope import registry
from headscope.capture import watch
from headscope.circuits import Factors, factored, row_blocked
from headscope.data import DataOptions
from headscope.discovery import find_sites
from headscope.errors import UsageError
from headscope.heads import ParameterSlice, Role, Site
from headscope.matrices import HeadWeights
from headscope.measures import Evidence, Measure, Outputs, Shares
from headscope.measures.attention import Divergence, candidates
from headscope.measures.cosine import MeanCosine
from headscope.measures.hellinger import Overlap
from headscope.models import LoadOptions
from headscope.moments import CrossMoments, TokenSample
from headscope.pair_sums import PairSums, load_measures
from headscope.pairs import HeadSpace
from headscope.row_store import RowStore
from headscope.scores import RowBlock
from headscope.study import Study, StudyOptions

MEASURES = load_measures(ALL)
SITE = find_sites(SPECIMENS["bert"].build()).sites[0]  # five heads of 6, width 30
FLOAT32_SOFTMAX = 1e-7  # many families' eager softmax is float32 whatever the model


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str = "") -> None:
    """Equal within an absolute tolerance, and undefined at the same pairs."""
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def random_cells(count: int, seed: int, queries: int = 4, keys: int = 5) -> Tensor:
    """Attention of one text as cells, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, queries, keys, generator=generator, dtype=torch.float64).mul(2).softmax(dim=-1)
    rows = rows * (torch.rand(count, queries, keys, generator=generator) < 0.8)
    rows[..., 0] += 0.01
    return (rows / rows.sum(dim=-1, keepdim=True) / queries).flatten(1)


def space_with(*outputs: Tensor, site: Site = SITE) -> HeadSpace:
    """A space of sites like `site`, whose heads write by the given matrices `[head d_value d_model]`."""
    sites = tuple(replace(site, id=replace(site.id, layer=layer)) for layer in range(len(outputs)))
    return HeadSpace(sites, lambda one: HeadWeights(None, None, None, outputs[one.id.layer]))


def tokens(*outputs: Tensor, first: int = 0) -> Outputs:
    count = len(outputs[0])
    places = torch.arange(first, first + count)
    return Outputs(tuple(range(len(outputs))), outputs, places // 7, places % 7)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit", "albert", "mistral", "gpt_oss", "clip"])
def test_measures_equal_loops_over_pairs(name: str) -> None:
    """With padding, unequal lengths, groups, cross attention, windows, sinks, shared layers and two towers."""
    model = SPECIMENS[name].build()
    inputs = SPECIMENS[name].inputs(model)
    space = space_of(model)
    found = measured(model, parts(inputs, 2, 1), space=space)
    wanted = references(model, parts(inputs, 2, 1), space)
    assert {measure for measure in wanted if bool(wanted[measure].isfinite().any())} == set(ALL)
    for measure, values in wanted.items():
        close(found[measure].values, values, FLOAT32_SOFTMAX, f"{name} {measure}")
        assert found[measure].error is None
        assert torch.equal(found[measure].values.nan_to_num(), found[measure].values.T.nan_to_num()), "symmetric"
        known = found[measure].values[found[measure].values.isfinite()]
        assert MEASURES[measure].least <= float(known.min()) and float(known.max()) <= 1
        close(found[measure].values.diagonal(), torch.ones(len(space.heads), dtype=torch.float64), FLOAT32_SOFTMAX)


@pytest.fixture(scope="module")
def sentiment() -> tuple[PreTrainedModel, list[dict[str, Any]]]:
    """The sentiment sample in float64, and a few texts in padded batches."""
    name = "sentiment-minilm"
    options = StudyOptions(LoadOptions(), DataOptions(limit=5, max_length=24))
    study = Study.open(str(SAMPLES / name), str(SAMPLES / name / TEST_FILES[name]), options)
    assert study.examples is not None
    return study.loaded.model.double(), [batch.inputs for batch in study.examples.batches(3, tokens=0)]


@pytest.mark.slow
def test_measures_equal_loops_on_the_sentiment_sample(sentiment: Any) -> None:
    model, batches = sentiment
    space = space_of(model)
    chosen = list(range(0, 72, 9))
    found, wanted = measured(model, batches, space=space), references(model, batches, space, chosen)
    for measure, values in wanted.items():
        close(found[measure].values[chosen][:, chosen], values, 1e-6, measure)


def test_nearest_pairs_are_exact_with_few_evaluations(sentiment: Any) -> None:
    """The bounds of `hellinger` leave less than a tenth of all pairs, the 20 nearest by JS among them."""
    model, batches = sentiment
    space = space_of(model)
    first = measured(model, batches, ["attention", "hellinger"], space=space)
    whole = first["attention"].values
    pairs = candidates(first["hellinger"].values, 20)
    assert 20 <= len(pairs) <= 0.1 * 72 * 71 / 2
    measure = replace(MEASURES["attention"], begin=lambda space: Divergence(space, pairs))
    again = measured(model, batches, space=space, measures={"attention": measure})["attention"].values
    left, right = torch.triu_indices(72, 72, offset=1)
    best = whole[left, right].topk(20)
    some = again[left, right].nan_to_num(nan=-1).topk(20)
    assert torch.equal(best.indices, some.indices)
    close(some.values, best.values, 1e-12)
    wanted = torch.full((72, 72), torch.nan, dtype=torch.float64)
    wanted[pairs.left, pairs.right] = wanted[pairs.right, pairs.left] = 1
    wanted.fill_diagonal_(1)
    assert torch.equal(again.isfinite(), wanted.isfinite()), "only these pairs were measured"
    one = torch.full_like(whole, torch.nan)
    one[7] = first["hellinger"].values[7]
    one[7, 7] = torch.nan
    nearest = candidates(one, 3)
    assert len(nearest) < 36 and all(
        7 in (a, b) for a, b in zip(nearest.left.tolist(), nearest.right.tolist(), strict=True)
    )
    row = whole[7].clone()
    row[7] = -1
    assert set(row.topk(3).indices.tolist()) <= set(nearest.left.tolist()) | set(nearest.right.tolist())


@pytest.mark.parametrize("way", ["blocks", "tiles", "stretches", "single queries", "beside the model"])
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_how_rows_are_read_changes_nothing(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SPECIMENS[name].build()
    inputs = SPECIMENS[name].inputs(model)
    space = space_of(model)
    wanted = measured(model, parts(inputs, 2, 1), space=space)
    if way == "blocks":
        monkeypatch.setattr(headscope.patterns, "BLOCK_VALUES", 3 * 5 * 9 * 3)
        monkeypatch.setattr(headscope.row_store, "BLOCK_VALUES", 100)
        monkeypatch.setattr(headscope.measures.cosine, "BLOCK_VALUES", 1000)
    if way == "tiles":
        monkeypatch.setattr(headscope.tiles, "LONG", 0)
        monkeypatch.setattr(headscope.tiles, "VALUES", 8 * 9 * 2)
    if way in ("stretches", "single queries"):
        held = {"bert": 1200, "llama": 2000, "t5": 4000}[name] if way == "stretches" else 1
        monkeypatch.setattr(headscope.row_store, "HELD_VALUES", held)
    sums = PairSums(space, MEASURES)
    runs = run(model, parts(inputs, 2, 1), sums, replace=way != "beside the model")
    if way == "stretches":
        assert runs == 3, "only the larger batch runs again"
    else:
        assert runs == (18 if way == "single queries" else 2)
    for measure, values in sums.finish().items():
        tolerance = 1e-9 if name != "llama" and way not in ("tiles", "beside the model") else 1e-5
        close(values.values, wanted[measure].values, tolerance, f"{way} {measure}")


@pytest.mark.parametrize("name", ["bert", "t5", "swin"])
def test_batches_and_padding_change_nothing(name: str) -> None:
    model = SPECIMENS[name].build()
    inputs = SPECIMENS[name].inputs(model)
    space = space_of(model)
    wanted = measured(model, [inputs], space=space)
    short = [unpadded(one) for one in parts(inputs, 1, 1, 1)]
    for batches in (parts(inputs, 1, 2), parts(inputs, 1, 1, 1), short):
        for measure, values in measured(model, batches, space=space).items():
            close(values.values, wanted[measure].values, 1e-9, measure)


def unpadded(inputs: dict[str, Any]) -> dict[str, Any]:
    """One example without its padding."""
    for mask in [name for name in inputs if name.endswith("attention_mask")]:
        width = inputs[mask].shape[1]
        prefix, length = mask.startswith("decoder"), int(inputs[mask].sum())
        cut = {
            name: value[:, :length]
            for name, value in inputs.items()
            if isinstance(value, Tensor)
            and value.dim() == 2
            and value.shape[1] == width
            and name.startswith("decoder") == prefix
        }
        inputs = inputs | cut
    return inputs


def test_windows_are_compared_within_their_layer_only() -> None:
    """Swin cuts layers into windows that lie elsewhere than those of others, until one window holds the whole image."""
    model = SPECIMENS["swin"].build()
    inputs = SPECIMENS["swin"].inputs(model)
    space = space_of(model)
    found = measured(model, [inputs], space=space)
    places = torch.tensor([0, 1, 2, 2])[space.owner]  # the last two layers see the whole image
    same = places[:, None] == places
    for name in ("attention", "hellinger", "output", "cosine"):
        assert torch.equal(found[name].values.isfinite(), same), name
    grid = own_maps(model, inputs)[0].double()  # transformers gives the last layer of each stage
    texts = grid.view(3, -1, *grid.shape[1:]).permute(0, 2, 1, 3, 4).flatten(2, 3)  # [image head window*query key]
    maps = texts.transpose(0, 1).tolist()
    heads = range(4)
    close(
        found["attention"].values[4:8, 4:8],
        reference.table(heads, lambda a, b: reference.attention(maps[a], maps[b])),
        FLOAT32_SOFTMAX,
    )


def plant(model: PreTrainedModel, source: int, target: int, *roles: Role) -> None:
    """Make a head of the first site like another, in the parameters of these roles."""
    site = find_sites(model).sites[0]
    with torch.no_grad():
        for piece in site.slices_of(*roles):
            parameter = model.get_parameter(piece.path)
            old = parameter.index_select(piece.axis, torch.tensor(piece.indices(source)))
            parameter.index_copy_(piece.axis, torch.tensor(piece.indices(target)), old)


def test_a_copied_head_is_the_same_in_everything() -> None:
    model = SPECIMENS["bert"].build()
    inputs = SPECIMENS["bert"].inputs(model)
    before = {name: float(one.values[1, 3]) for name, one in measured(model, [inputs]).items()}
    plant(model, 1, 3, Role.QUERY, Role.KEY, Role.VALUE, Role.OUTPUT)
    after = {name: float(one.values[1, 3]) for name, one in measured(model, [inputs]).items()}
    assert after == pytest.approx(dict.fromkeys(ALL, 1.0), abs=1e-12)
    assert max(before.values()) < 0.9


def test_the_same_map_with_other_values() -> None:
    model = SPECIMENS["bert"].build()
    plant(model, 1, 3, Role.QUERY, Role.KEY)
    found = measured(model, [SPECIMENS["bert"].inputs(model)])
    pair = {name: float(one.values[1, 3]) for name, one in found.items()}
    assert pair["attention"] == pytest.approx(1, abs=1e-12) and pair["qk"] == pytest.approx(1, abs=1e-12)
    assert pair["output"] < 0.9 and abs(pair["cosine"]) < 0.9 and abs(pair["ov"]) < 0.9


def test_another_map_with_the_same_output() -> None:
    """With fewer tokens than channels, values exist that give one head through its own map what another writes."""
    model = SPECIMENS["bert"].build()
    inputs = SPECIMENS["bert"].inputs(model)
    plant(model, 1, 3, Role.OUTPUT)
    maps = own_maps(model, inputs)[0]
    attention = model.bert.encoder.layer[0].attention.self
    seen: list[Tensor] = []
    handle = attention.register_forward_pre_hook(lambda module, args, kwargs: seen.append(args[0]), with_kwargs=True)
    model(**inputs)
    handle.remove()
    real = inputs["attention_mask"].bool()
    values = attention.value(seen[0]).view(3, 9, 5, 6)
    wanted = [
        torch.linalg.solve(grid[3][keep][:, keep], grid[1][keep][:, keep] @ value[keep][:, 1])
        for grid, value, keep in zip(maps, values, real, strict=True)
    ]
    with torch.no_grad():
        solution = torch.linalg.lstsq(seen[0][real], torch.cat(wanted), driver="gelsd").solution
        attention.value.weight[18:24], attention.value.bias[18:24] = solution.T, 0
    pair = {name: float(one.values[1, 3]) for name, one in measured(model, [inputs]).items()}
    assert pair["output"] == pytest.approx(1, abs=1e-9) and pair["cosine"] == pytest.approx(1, abs=1e-9)
    assert pair["attention"] < 0.9 and pair["hellinger"] < 0.95


@given(st.integers(2, 6), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_attention_keeps_its_properties(count: int, seed: int) -> None:
    """Bounded by the overlap, blind to the order of keys, sums cut anywhere, and heads permuted with their rows."""
    space = space_with(normal(count, 6, 30), site=replace(SITE, n_heads=count, n_kv_heads=count))
    generator = torch.Generator().manual_seed(seed)
    cells, heads = random_cells(count, seed), torch.arange(count)
    order, mixed = torch.randperm(count, generator=generator), torch.randperm(cells.shape[1], generator=generator)
    for begin in (Overlap, Divergence):
        sums, cut, keys, permuted = begin(space), begin(space), begin(space), begin(space)
        sums.add(Shares(heads, cells, 1.0))
        cut.add(Shares(heads, cells[:, :9], 0.3))
        cut.add(Shares(heads, cells[:, 9:], 0.7))
        keys.add(Shares(heads, cells[:, mixed], 1.0))
        permuted.add(Shares(heads, cells[order], 1.0))
        values = sums.finish().values
        tolerance = 1e-6 if begin is Divergence else 1e-12  # near zero the square root enlarges what rounding leaves
        close(cut.finish().values, values, tolerance)
        close(keys.finish().values, values, tolerance)
        close(permuted.finish().values, values[order][:, order], tolerance)
        assert bool(((values >= 0) & (values <= 1)).all())
        if begin is Overlap:
            gap = 1 - values
        else:
            divergence = (1 - values) ** 2
            assert bool((gap <= divergence + 1e-12).all() and (divergence <= gap / math.log(2) + 1e-12).all())


def test_divergence_of_equal_rows_is_nothing_and_of_disjoint_rows_is_one_bit() -> None:
    space = space_with(normal(3, 6, 30), site=replace(SITE, n_heads=3, n_kv_heads=3))
    cells = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.25, 0.75]])
    sums = Divergence(space)
    sums.add(Shares(torch.arange(3), cells, 1.0))
    values = sums.finish().values
    assert float(values[0, 1]) == 1.0, "exactly, in float32 too"
    assert float(values[0, 2]) == pytest.approx(0, abs=1e-6)


def test_what_a_sink_takes_is_one_more_key() -> None:
    """Rows (0.5, 0), (0.25, 0.25) and half in the sink overlap by √(0.5·0.25) + 0.5; without sinks they are scaled."""
    sink = ParameterSlice("attention", "sinks", 0, Role.EXTRA, (0, 1))
    site = replace(SITE, n_heads=2, n_kv_heads=2)
    rows = torch.tensor([[[[0.5, 0.0]], [[0.25, 0.25]]]], dtype=torch.float64)
    for slices, wanted in (((sink,), 0.125**0.5 + 0.5), ((), 0.5**0.5)):
        space = HeadSpace((replace(site, slices=slices),), lambda site: HeadWeights(None, None, None, None))
        store, sums = RowStore(space), Overlap(space)
        store.start(1)
        every = torch.ones(1, 1, 2, dtype=torch.bool)
        store.see(RowBlock(space.sites[0], torch.tensor([0]), rows, every, every[..., 0]))
        for part in store.parts():
            sums.add(part)
        assert float(sums.finish().values[0, 1]) == pytest.approx(wanted, abs=1e-12)
        assert not store.more()


@given(st.integers(0, 10**6), st.floats(0.1, 10))
@settings(max_examples=15, deadline=None)
def test_output_sees_neither_rotation_nor_scale_nor_a_constant(seed: int, scale: float) -> None:
    z, matrices = normal(40, 5, 6, seed=seed), normal(5, 6, 30, seed=seed + 1)
    rotation = torch.linalg.qr(normal(30, 30, seed=seed + 2)).Q
    turned = matrices.clone()
    turned[2] = scale * matrices[2] @ rotation
    moved = z + normal(5, 6, seed=seed + 3)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    values = [cka(one, matrix) for one, matrix in ((z, matrices), (z, turned), (moved, matrices))]
    close(values[1], values[0], 1e-9)
    close(values[2], values[0], 1e-9)
    close(cka(z[:, order], matrices[order]), values[0][order][:, order], 1e-9)
    assert bool(((values[0] >= 0) & (values[0] <= 1)).all())


def cka(z: Tensor, matrices: Tensor, cuts: int = 7) -> Tensor:
    sums = CrossMoments(space_with(matrices))
    for part in z.split(cuts):
        sums.add(tokens(part))
    return sums.finish().values


def test_output_of_a_head_that_writes_one_thing_is_not_defined() -> None:
    z, matrices = normal(40, 5, 6), normal(5, 6, 30)
    z[:, 1] = z[0, 1]
    matrices[3] = 0
    for dtype in (torch.float32, torch.float64):
        defined = cka(z.to(dtype) + 5, matrices).isfinite()
        wanted = torch.ones(5, 5, dtype=torch.bool)
        for head in (1, 3):
            wanted[head] = wanted[:, head] = False
        assert torch.equal(defined, wanted)


def test_cosine_leaves_out_tokens_at_which_nothing_is_written() -> None:
    z, matrices = normal(6, 5, 6), normal(5, 6, 30)
    z[:4, 1], z[:, 2] = 0, 0
    space = space_with(matrices)
    sums = MeanCosine(space)
    sums.add(tokens(z))
    written = [z[:, head] @ matrices[head] for head in range(5)]
    wanted = reference.table(range(5), lambda a, b: reference.cosine(written[a], written[b]))
    assert bool(wanted[2].isnan().all()) and bool(wanted[1, 0].isfinite())
    close(sums.finish().values, wanted, 1e-12)


def test_output_of_float32_is_as_good_with_a_large_mean() -> None:
    """A mean a thousand times the spread costs no digits beyond those that float32 has left of the values."""
    z, matrices = normal(300, 5, 6).float() + 1000, normal(5, 6, 30)
    close(cka(z, matrices), cka(z.double(), matrices), 1e-5)


def texts_of(examples: int, seed: int = 0) -> tuple[Tensor, Outputs]:
    """Outputs of two sites at 50 tokens of each example, which share much with one another within an example."""
    common = normal(examples, 1, 10, 6, seed=seed) + 0.5 * normal(examples, 50, 10, 6, seed=seed + 1)
    common[:, :, 5:] += 0.7 * common[:, :, :5]
    z = common.flatten(0, 1)
    numbers, positions = torch.arange(examples).repeat_interleave(50), torch.arange(50).repeat(examples)
    return z, Outputs((0, 1), (z[:, :5].contiguous(), z[:, 5:].contiguous()), numbers, positions)


def test_a_sample_of_tokens_estimates_output_within_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headscope.moments, "SAMPLE", 2048)
    space = space_with(normal(5, 6, 30, seed=8), normal(5, 6, 30, seed=9))
    off = torch.triu_indices(10, 10, offset=1)
    scores: list[Tensor] = []
    for seed in range(4):
        _, whole = texts_of(200, seed=10 * seed)
        exact, sample = CrossMoments(space), TokenSample(space)
        exact.add(whole)
        sample.add(whole)
        found = sample.finish()
        assert found.error is not None and "2,048 tokens" in found.notes[0] and "standard error" in found.notes[0]
        gap = (found.values - exact.finish().values)[off[0], off[1]]
        error = found.error[off[0], off[1]]
        assert float(gap.abs().max()) < 0.05 and float(error.max()) < 0.02
        scores.append(gap / error)
    spread = torch.cat(scores)
    assert float(spread.abs().max()) < 5 and 0.5 < float(spread.square().mean()) < 2, "the error is the true one"
    assert float(found.error.diagonal().abs().max()) < 1e-7


def test_the_sample_does_not_depend_on_batches_and_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headscope.moments, "SAMPLE", 256)
    space = space_with(normal(5, 6, 30, seed=8), normal(5, 6, 30, seed=9))
    z, whole = texts_of(20)
    samples = [TokenSample(space), TokenSample(space)]
    samples[0].add(whole)
    for first in range(0, len(z), 37):
        here = slice(first, first + 37)
        cut = tuple(one[here] for one in whole.outputs)
        samples[1].add(Outputs(whole.sites, cut, whole.numbers[here], whole.positions[here]))
        assert all(len(held.outputs) == 256 for held in samples[1]._held.values())
    one, other = (sample.finish() for sample in samples)
    assert one.error is not None and other.error is not None
    close(one.values, other.values, 1e-12)
    close(one.error, other.error, 1e-12)


def test_the_sample_stands_in_where_moments_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SPECIMENS["bert"].build()
    space = space_of(model)
    assert headscope.moments.moment_bytes(space) == 8 * 3 * 30**2  # two sites of 30 channels: three blocks
    inputs = SPECIMENS["bert"].inputs(model)
    assert not measured(model, [inputs], ["output"], space=space)["output"].notes
    monkeypatch.setattr(headscope.moments, "MOMENT_BYTES", 8 * 3 * 30**2 - 1)
    found = measured(model, [inputs], ["output"], space=space)["output"]
    assert found.error is not None and found.notes
    assert bool(found.values.isfinite().any())


@given(st.integers(2, 9), st.integers(1, 7), st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_both_forms_of_circuits_agree_with_whole_matrices(d_left: int, rank: int, seed: int) -> None:
    sizes = ((2, rank), (3, rank + 1))
    group = [Factors(normal(n, d_left, r, seed=seed + n), normal(n, 11, r, seed=seed - n)) for n, r in sizes]
    whole = torch.cat([one.left @ one.right.transpose(1, 2) for one in group]).flatten(1)
    close(factored(group), whole @ whole.T, 1e-9)
    close(row_blocked(group), whole @ whole.T, 1e-9)


@pytest.mark.parametrize("narrow", [True, False])
def test_the_cheaper_form_of_circuits_is_taken(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 2 in a width of 30 has fewer products factored, a head of 20 by rows; rows are cut into blocks."""
    monkeypatch.setattr(headscope.circuits, "BLOCK_VALUES", 5 * 30 * 4)
    left, right = (normal(5, 30, 2 if narrow else 20, seed=seed) for seed in (0, 1))
    monkeypatch.setattr(headscope.circuits, "row_blocked" if narrow else "factored", lambda group: 1 / 0)
    space = HeadSpace((SITE,), lambda site: HeadWeights(left, right, None, None))
    found = headscope.circuits.cosines(space, [headscope.circuits.circuit(left, right)])
    wanted = reference.table(range(5), lambda a, b: reference.qk((left[a], right[a]), (left[b], right[b])))
    close(found, wanted, 1e-12)


def test_compressed_streams_of_two_layers_are_not_compared() -> None:
    left, right = normal(5, 17, 6), normal(5, 30, 6)
    space = space_with(normal(5, 6, 30), normal(5, 6, 30))
    found = headscope.circuits.cosines(space, [Factors(left, right), Factors(left, right)])
    assert torch.equal(found.isfinite(), space.owner[:, None] == space.owner)


def test_heads_without_matrices_have_no_circuits() -> None:
    space = HeadSpace((SITE,), lambda site: HeadWeights(None, None, None, None))
    for name in ("qk", "ov"):
        assert bool(MEASURES[name].begin(space).finish().values.isnan().all())


def test_mixed_outputs_are_not_written_by_a_slice() -> None:
    """BitNet normalises all heads together before the projection: what one head writes is not defined."""
    model = SPECIMENS["bitnet"].build()
    found = measured(model, [SPECIMENS["bitnet"].inputs(model)], ["output", "cosine", "attention"])
    assert bool(found["output"].values.isnan().all() and found["cosine"].values.isnan().all())
    assert bool(found["attention"].values.isfinite().all())
    space = space_of(model)
    sliced = HeadSpace(space.sites, lambda site: HeadWeights(None, None, None, normal(8, 10, 80)))
    again = measured(model, [SPECIMENS["bitnet"].inputs(model)], ["output", "cosine"], space=sliced)
    assert all(bool(one.values.isnan().all()) for one in again.values()), (
        "also where a slice of the projection is known"
    )


def test_keys_of_equal_number_in_another_stack_are_other_keys() -> None:
    model = SPECIMENS["t5"].build()
    inputs = SPECIMENS["t5"].inputs(model)
    inputs |= {f"decoder_{name}": inputs[name].clone() for name in ("input_ids", "attention_mask")}
    space = space_of(model)
    found = measured(model, [inputs], ["attention", "output"], space=space)
    for name, labels in (
        ("attention", [(site.id.stack, site.id.kind) for site in space.sites]),
        ("output", [site.id.stack for site in space.sites]),
    ):
        together = torch.tensor([[one == other for other in labels] for one in labels])
        assert torch.equal(found[name].values.isfinite(), space.spread(together)), name


def test_shared_kv_marks_the_pairs_of_a_group() -> None:
    space = space_of(SPECIMENS["llama"].build())
    group = torch.arange(16) // 4  # two layers of eight heads in two groups
    assert torch.equal(space.shared_kv, (group[:, None] == group) & ~torch.eye(16, dtype=torch.bool))
    assert not bool(space_of(SPECIMENS["bert"].build()).shared_kv.any())


def test_hooks_are_gone_after_a_pass_also_when_it_fails() -> None:
    model = SPECIMENS["bert"].build()
    sums = PairSums(space_of(model), MEASURES)
    before = sum(len(module._forward_pre_hooks) for module in model.modules())
    with pytest.raises(ZeroDivisionError), sums.watching(model, sums.space.sites):
        assert sum(len(module._forward_pre_hooks) for module in model.modules()) > before
        raise ZeroDivisionError
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == before


def test_a_batch_begun_again_counts_once() -> None:
    """A batch that ran out of memory is begun again in halves: what it showed before does not count."""
    model = SPECIMENS["bert"].build()
    inputs = SPECIMENS["bert"].inputs(model)
    space = space_of(model)
    sums = PairSums(space, load_measures(["hellinger"]))
    site = space.sites[0]
    broken = RowBlock(
        site, torch.arange(2), torch.rand(3, 5, 2, 9), torch.ones(1, 2, 9).bool(), torch.ones(3, 2).bool()
    )
    with watch(model, space.sites, gradients=False):
        sums.start(headscope.pair_sums.Texts({}, None, None), (0, 1, 2))
        sums.readers[0](broken)
    run(model, parts(inputs, 1, 2), sums)
    close(sums.finish()["hellinger"].values, measured(model, [inputs], ["hellinger"])["hellinger"].values, 1e-9)


def test_the_folder_is_the_list_of_measures() -> None:
    assert sorted(ALL) == registry.names("measures") == sorted(load_measures(["all"]))
    for name, measure in MEASURES.items():
        assert isinstance(measure, Measure) and measure.title == measure.column.name == name
        assert callable(getattr(reference, name)), f"tests/pair_reference.py has no reference for the measure {name}"
        assert measure.evidence in Evidence
    with pytest.raises(UsageError, match="no measure 'ouput'") as caught:
        load_measures(["ouput"])
    assert caught.value.hint is not None and "did you mean 'output'" in caught.value.hint
