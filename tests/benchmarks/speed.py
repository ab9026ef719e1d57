"""Speed-up that half of the heads of BERT-base buy, measured and predicted from matrix products.

The model has random weights; the smaller one is built with half of the heads in every layer. Prints, for each batch
size, the median milliseconds of both (they take turns), the measured and the predicted ratio, and how far they are
apart. On a quiet machine they agree within 8 %: about 1.2 x, since attention is a third of the work, not 2 x.

    python tests/benchmarks/speed.py [--tokens 128] [--batches 1,8] [--seconds 20] [--threads 1] [--device cpu]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from headscope.timing import Timing, matrix_macs, take_turns

WIDTH = 64
"""Width of a head."""


def bert(layers: int, heads: int) -> BertModel:
    """BERT-base with random weights and `heads` of its 12 heads in each layer."""
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=layers)
    model = BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    for layer in model.encoder.layer:
        attention, inner = layer.attention.self, heads * WIDTH
        attention.num_attention_heads, attention.all_head_size = heads, inner
        for name in ("query", "key", "value"):
            setattr(attention, name, nn.Linear(config.hidden_size, inner).requires_grad_(False))
        layer.attention.output.dense = nn.Linear(inner, config.hidden_size).requires_grad_(False)
    return model


def ids(size: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1000, 20000, (size, tokens), device=device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    device = torch.device(chosen.device)
    models = [bert(chosen.layers, heads).to(device) for heads in (12, 6)]
    whole, half = (matrix_macs(model, ids(1, chosen.tokens, device)) for model in models)
    predicted = whole / half
    print(f"BERT-base, {chosen.layers} layers, {chosen.tokens} tokens, 12 heads a layer against 6, on {device}")
    print(f"{'batch':>5s} {'12 heads ms':>12s} {'6 heads ms':>12s} {'measured':>9s} {'predicted':>9s} {'apart':>6s}")
    with torch.inference_mode():
        for size in map(int, chosen.batches.split(",")):
            inputs = ids(size, chosen.tokens, device)
            runs = [partial(model, **inputs) for model in models]
            full, small = (Timing(size, each) for each in take_turns(runs, device, seconds=chosen.seconds))
            measured = full.latency / small.latency
            times = f"{1000 * full.latency:12.1f} {1000 * small.latency:12.1f}"
            print(f"{size:5d} {times} {measured:9.3f} {predicted:9.3f} {measured / predicted - 1:+6.1%}")


if __name__ == "__main__":
    main()
