"""While a batch is summed, nothing is asked of the device: a GPU would be waited for at every text and block."""

from __future__ import annotations

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
from headscope.scores import RowBlock
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


@pytest.mark.parametrize("draws", [1, 2])
def test_a_layer_that_runs_again_is_read_once(draws: int) -> None:
    """Where layers run a second time for a gradient, their rows are not read and added again."""
    model = SPECIMENS["bert"].build()
    inputs, sites = SPECIMENS["bert"].inputs(model), find_sites(model).sites
    blocks: list[str] = []

    def count(block: RowBlock) -> dict[str, Tensor]:
        blocks.append(str(block.site.id))
        return {"queries": block.real.sum(dim=-1)[:, None].expand(-1, block.site.n_heads)}

    reader = RowReader(model, sites, [count], replace=False)
    layers = [module for name, module in model.named_modules() if type(module).__name__ == "BertLayer"]
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
