"""While a batch is summed, nothing is asked of the device: a GPU would be waited for at every text and block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import SPECIMENS

from headscope import row_store
from headscope.capture import watch
from headscope.checkpointed import layerwise
from headscope.discovery import find_sites
from headscope.matrices import head_weights
from headscope.measures import PairValues
from headscope.pair_sums import PairSums, load_measures
from headscope.pairs import HeadSpace
from headscope.reading import RowReader
from headscope.scores import RowBlock, attention
from headscope.texts import Texts

ASKING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}
"""Operations whose result the host must know before it can go on."""


class Asked(TorchDispatchMode):
    """Refuses what asks the device, chosen elements by a table of truth values among it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = func is torch.ops.aten.index.Tensor and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        assert func not in ASKING and not chosen, f"{func} waits for a GPU"
        return func(*args, **(kwargs or {}))


def test_pairs_are_summed_without_asking_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "BLOCK_VALUES", 40)  # several blocks a text
    model = SPECIMENS["bert"].build()
    inputs = SPECIMENS["bert"].inputs(model)
    sites = find_sites(model).sites
    space = HeadSpace(sites, lambda site: head_weights(model, site))
    found: list[dict[str, PairValues]] = []
    for mode in (Asked, torch.no_grad):
        sums = PairSums(space, load_measures(["attention", "hellinger", "output"]))
        reader = RowReader(model, sites, sums.readers, replace=True)
        texts, count = Texts(inputs, None, None), len(inputs["input_ids"])
        with torch.no_grad(), watch(model, sites, gradients=False) as seen, sums.watching(model, sites):
            seen.batch = count
            reader.start(texts, count)
            sums.start(texts, range(count))
            with reader.reading():
                model(**inputs)
            with mode():
                assert not sums.end(seen)
        found.append(sums.finish())
    assert all(bool(values.values.isfinite().any()) for values in found[0].values())
    for name, values in found[0].items():
        assert torch.equal(values.values.nan_to_num(), found[1][name].values.nan_to_num()), name


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_attention_scores_are_summed_without_asking_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where no key is looked up by its place; the sums are those of the CPU."""
    model = SPECIMENS[name].build()
    inputs, sites = SPECIMENS[name].inputs(model), find_sites(model).sites
    special = inputs["input_ids"][0, :2]

    def summed(mode: Callable[[], AbstractContextManager[Any]]) -> dict[str, Tensor]:
        def read(block: RowBlock) -> dict[str, Tensor]:
            with mode():
                return attention.rows(block)

        reader = RowReader(model, sites, [read], replace=True)
        with torch.no_grad(), reader.reading():
            reader.start(Texts(inputs, None, special), len(inputs["input_ids"]))
            model(**inputs)
        return {f"{site} {title}": sums for site, one in reader.sums.items() for title, sums in one.items()}

    wanted = summed(torch.no_grad)
    with pytest.raises(AssertionError, match="waits for a GPU"):
        summed(Asked)  # on the CPU it is asked
    monkeypatch.setattr(attention, "_is_host", lambda _: False)
    found = summed(Asked)
    assert found.keys() == wanted.keys() and any("special" in title for title in found)
    for title, values in wanted.items():
        torch.testing.assert_close(found[title], values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("name", "layer"), [("bert", "BertLayer"), ("deberta", "DebertaLayer")])
@pytest.mark.parametrize("draws", [1, 2])
def test_a_layer_that_runs_again_is_read_once(draws: int, name: str, layer: str) -> None:
    """Where layers run a second time for a gradient, their rows are not read and added again; on any attention."""
    model = SPECIMENS[name].build()
    inputs, sites = SPECIMENS[name].inputs(model), find_sites(model).sites
    blocks: list[str] = []

    def count(block: RowBlock) -> dict[str, Tensor]:
        blocks.append(str(block.site.id))
        return {"queries": block.real.sum(dim=-1)[:, None].expand(-1, block.site.n_heads)}

    reader = RowReader(model, sites, [count], replace=False)
    layers = [module for name, module in model.named_modules() if type(module).__name__ == layer]
    assert layers
    texts, size = Texts(inputs, None, None), len(inputs["input_ids"])
    with watch(model, sites) as seen, reader.reading():
        seen.batch = size
        reader.start(texts, size)
        with layerwise(layers):
            total = model(**inputs)[0].sum()
        for _ in range(draws):
            total.backward(retain_graph=True)
    assert sorted(blocks) == sorted(str(site.id) for site in sites)
    real = inputs["attention_mask"].sum(dim=1)
    assert all(torch.equal(one["queries"][:, 0].long(), real) for one in reader.sums.values())
    assert all(record.gate_gradient is not None for record in seen.records.values())
