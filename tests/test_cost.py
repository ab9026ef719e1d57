"""Costs of attention against numbers worked by hand."""

from headscope.cost import SiteShape, model_summary, parameters_per_head, site_kv_values, site_macs
from headscope.heads import AttentionKind, SiteId


def shape(layer=0, **changes):
    """BERT-base's attention, changed at will."""
    stated = {"n_heads": 12, "n_kv_heads": 12, "d_head": 64, "d_value": 64, "d_model": 768, "keeps_cache": False}
    stated |= {"id": SiteId("encoder", AttentionKind.SELF, layer), "parameters_per_head": (196800,) * 12}
    return SiteShape(**(stated | changes))


def llama(layer=0, **changes):
    """One layer of Llama 3 8B: 32 query heads and 8 key/value heads of 128 on a width of 4096."""
    stated = {"n_heads": 32, "n_kv_heads": 8, "d_head": 128, "d_value": 128, "d_model": 4096, "keeps_cache": True}
    stated |= {
        "id": SiteId("decoder", AttentionKind.CAUSAL, layer),
        "parameters_per_head": (2097152, *(1048576,) * 3) * 8,
    }
    return SiteShape(**(stated | changes))


BIASED = {"query_bias": True, "key_bias": True, "value_bias": True}
BARE = {"query_bias": False, "key_bias": False, "value_bias": False}


def test_parameters_of_each_head():
    # four slices of 768·64 = 49152 and three biases of 64
    assert parameters_per_head(12, 12, d_in=768, d_head=64, d_value=64, d_out=768, **BIASED) == (196800,) * 12
    # q and o: 2·4096·128 = 1048576; k and v, as large, at the first of every four heads
    found = parameters_per_head(32, 8, d_in=4096, d_head=128, d_value=128, d_out=4096, **BARE)
    assert found == llama().parameters_per_head
    assert sum(found) == 4096 * 4096 * 2 + 2 * 4096 * 1024
    # pairwise different sizes: q 2·3 + o 5·7 = 41, k 11·3 + v 11·5 = 88, biases 3, 3 and 5
    sizes = {"d_in": 2, "d_head": 3, "d_value": 5, "d_out": 7, "d_source": 11}
    assert parameters_per_head(4, 2, **sizes, **BARE) == (129, 41, 129, 41)
    assert parameters_per_head(4, 2, **sizes, **BIASED) == (140, 44, 140, 44)
    assert parameters_per_head(2, 1, **sizes, query_bias=True, key_bias=False, value_bias=True) == (137, 44)


def test_multiply_accumulates():
    # BERT-base at 512 tokens: 4·768² = 2359296 and 2·512·768 = 786432
    assert site_macs(shape(), 512) == 2359296 + 786432
    for tokens in (1, 128, 512):
        assert site_macs(shape(), tokens) == 4 * 768 * 768 + 2 * tokens * 12 * 64
    # Llama 3 at 1000 tokens: q and o 2·4096² = 33554432, k and v 2·4096·1024 = 8388608, 1000·32·256 = 8192000
    assert site_macs(llama(), 1000) == 33554432 + 8388608 + 8192000
    # pairwise different: 7·2·3 + 11·1·(3+5) + 2·5·7 + 13·2·(3+5)
    sizes = {"n_heads": 2, "n_kv_heads": 1, "d_head": 3, "d_value": 5, "d_model": 7, "d_source": 11}
    assert site_macs(shape(**sizes), 13) == 42 + 88 + 70 + 208


def test_a_window_bounds_only_scores_and_mixing():
    windowed = shape(window=100)
    assert site_macs(windowed, 40) == site_macs(shape(), 40)
    assert site_macs(windowed, 4000) == site_macs(shape(), 100)


def test_cache():
    assert site_kv_values(shape()) == 0
    assert site_kv_values(llama()) == 2 * 8 * 128


def test_summary():
    found = model_summary([llama(layer) for layer in range(32)], 8030261248, 512, kv_bytes_per_value=2)
    assert found == {
        "sites": 32,
        "heads": 1024,
        "kv_heads": 256,
        "head_dim": 128,
        "attention": "GQA",
        "attention_parameters": 32 * 41943040,
        "attention_share": 1342177280 / 8030261248,
        "macs_per_token": 32 * (41943040 + 512 * 8192),
        "kv_bytes_per_token": 131072,
    }


def test_kinds_of_sharing():
    one = shape(n_kv_heads=1)
    kinds = [[shape()], [one, one], [shape(), one], [llama()], [shape(n_heads=1, n_kv_heads=1)]]
    found = [model_summary(shapes, 10**9, 1, kv_bytes_per_value=2)["attention"] for shapes in kinds]
    assert found == ["MHA", "MQA", "GQA", "GQA", "MHA"]


def test_unequal_head_sizes_are_listed_as_they_come():
    shapes = [llama(d_head=64), llama(d_head=32), llama(d_head=64)]
    assert model_summary(shapes, 10**9, 1, kv_bytes_per_value=4)["head_dim"] == "64/32"
