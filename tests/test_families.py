"""What has no attention heads is listed as such: every kind in the folder is built, found by name, and never a site."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from headscope.discovery import find_sites, other_mixers
from headscope.errors import UnsupportedModel
from headscope.registry import load, names


@pytest.mark.parametrize("name", names("families"))
def test_a_kind_is_found_in_its_example_and_holds_no_site(name: str) -> None:
    kind = load("families", name, "KIND")
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind.example, **kind.sizes))
    found = [other for other in other_mixers(model) if other.instead == kind.instead]
    assert found
    assert all(other.module_class == type(model.get_submodule(other.path)).__name__ for other in found)


def test_a_model_without_softmax_says_what_it_does_instead() -> None:
    kind = load("families", "sampled", "KIND")
    model = AutoModel.from_config(AutoConfig.for_model(kind.example, **kind.sizes))
    with pytest.raises(UnsupportedModel, match="YosoSelfAttention has none, hashing stands in for a softmax"):
        find_sites(model)


class SpareAttention(nn.Module):
    """An attention that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)


def test_attention_that_made_up_inputs_do_not_reach_is_named() -> None:
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    assert find_sites(model).problems == ()
    model.add_module("spare", SpareAttention())
    assert find_sites(model).problems == ("spare (SpareAttention): made-up inputs do not reach it",)
