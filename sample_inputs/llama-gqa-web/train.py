"""Train a small Llama-architecture language model with grouped-query attention on the World English Bible.

Runs on the CPU in one thread with bfloat16 autocast. The shipped weights took two calls, 767 CPU seconds together:

    apt-get download sword-text-web && dpkg -x sword-text-web_*.deb .
    ln -s usr/share/sword/modules/texts/ztext/engWEB2015eb web
    python train.py web FIRST_DIR --seconds 475
    python train.py web OUT_DIR --seconds 290 --peak-learning-rate 2e-3 --init FIRST_DIR

The learning rate follows the time budget, so the number of steps, and with it the result, depends on the machine.
"""

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from sword_text import plain_text, read_verses
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 0
START_ID, END_ID = 0, 1
N_TOKENS = 2048  # in the vocabulary
VERSES_PER_TEXT = 30  # about a chapter
N_TEST_TEXTS, N_DEV_TEXTS = 25, 20
WINDOW = 160  # tokens
BATCH_SIZE = 12
FLOOR_SHARE = 0.05  # of the peak learning rate, where the cosine ends
WARMUP_STEPS = 60
WEIGHT_DECAY = 0.05
BIGRAM_SHARE = 0.85


@dataclass(frozen=True)
class Texts:
    """Texts of 30 verses in a row, one verse a line, split into three parts."""

    train: list[str]
    dev: list[str]
    test: list[str]


def read_texts(module_dir: Path) -> Texts:
    """The verses of a SWORD module as texts; which go to test and dev is the first use of the seeded shuffle."""
    verses = [verse for verse in map(plain_text, read_verses(module_dir)) if 3 < len(verse) < 1500]
    texts = ["\n".join(verses[start : start + VERSES_PER_TEXT]) for start in range(0, len(verses), VERSES_PER_TEXT)]
    order = list(range(len(texts)))
    random.shuffle(order)
    test = sorted(order[:N_TEST_TEXTS])
    dev = sorted(order[N_TEST_TEXTS : N_TEST_TEXTS + N_DEV_TEXTS])
    train = sorted(order[N_TEST_TEXTS + N_DEV_TEXTS :])
    return Texts(
        train=[texts[index] for index in train],
        dev=[texts[index] for index in dev],
        test=[texts[index] for index in test],
    )


def new_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 2,048 tokens fitted to the texts; it puts <|bos|> first."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_TOKENS,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", START_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|eos|>", model_max_length=256
    )


def new_model() -> LlamaForCausalLM:
    """A randomly initialised Llama, 4 layers of 8 query and 4 key/value heads; 8 x head_dim = 256 is not hidden 192."""
    config = LlamaConfig(
        vocab_size=N_TOKENS,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def endless_batches(texts: list[list[int]]) -> Iterator[Tensor]:
    """Batches (12, 160) of token windows without end; `texts` is shuffled in place before each pass."""
    while True:
        # For a reproducible run: shuffle the texts as the last pass left them, draw the offset, shuffle the windows.
        random.shuffle(texts)
        stream = [token_id for text in texts for token_id in text]
        offset = random.randrange(WINDOW)
        windows = [stream[start : start + WINDOW] for start in range(offset, len(stream) - WINDOW, WINDOW)]
        random.shuffle(windows)
        for start in range(0, len(windows) - BATCH_SIZE, BATCH_SIZE):
            yield torch.tensor(windows[start : start + BATCH_SIZE])


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, texts: list[list[int]]) -> tuple[float, int]:
    """Perplexity per token over windows of 160 tokens that do not see each other, and the number of tokens scored."""
    model.eval()
    n_tokens = 0
    total_loss = 0.0
    for text in texts:
        for start in range(0, len(text) - 1, WINDOW):
            window = torch.tensor([text[start : start + WINDOW + 1]])
            logits = model(window[:, :-1]).logits.float()
            total_loss += cross_entropy(logits[0], window[0, 1:], reduction="sum").item()
            n_tokens += window.shape[1] - 1
    model.train()
    return math.exp(total_loss / n_tokens), n_tokens


def count_perplexities(train_texts: list[list[int]], test_texts: list[list[int]]) -> tuple[float, float]:
    """Test perplexity of two count models, for comparison: unigrams with add-one, and bigrams mixed with them."""
    token_counts = Counter(token_id for text in train_texts for token_id in text)
    pair_counts = Counter(pair for text in train_texts for pair in zip(text, text[1:], strict=False))
    n_train_tokens = token_counts.total()
    n_pairs = 0
    unigram_loss = bigram_loss = 0.0
    for text in test_texts:
        for previous, token_id in zip(text, text[1:], strict=False):
            unigram = (token_counts[token_id] + 1) / (n_train_tokens + N_TOKENS)
            bigram = pair_counts[previous, token_id] / max(token_counts[previous], 1)
            unigram_loss -= math.log(unigram)
            bigram_loss -= math.log(BIGRAM_SHARE * bigram + (1 - BIGRAM_SHARE) * unigram)
            n_pairs += 1
    return math.exp(unigram_loss / n_pairs), math.exp(bigram_loss / n_pairs)


def new_optimizer(model: LlamaForCausalLM, peak_learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0}]
    return torch.optim.AdamW(groups, lr=peak_learning_rate, betas=(0.9, 0.95), fused=True)


def train(
    model: LlamaForCausalLM,
    texts: list[list[int]],
    dev_texts: list[list[int]],
    *,
    seconds: float,
    peak_learning_rate: float,
) -> int:
    """Fit the model to the texts until the wall-clock budget is spent; returns the number of steps."""
    optimizer = new_optimizer(model, peak_learning_rate)
    batches = endless_batches(texts)
    started = time.time()
    step = 0
    model.train()
    while (spent := (time.time() - started) / seconds) < 1:
        cosine = 0.5 * (1 + math.cos(math.pi * spent))
        for group in optimizer.param_groups:
            warmup = min(1, (step + 1) / WARMUP_STEPS)
            group["lr"] = peak_learning_rate * warmup * (FLOOR_SHARE + (1 - FLOOR_SHARE) * cosine)
        token_ids = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(token_ids, labels=token_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} {time.time() - started:.0f} s", flush=True)
        if step % 400 == 0:
            print(f"dev perplexity {perplexity(model, dev_texts)[0]:.2f}", flush=True)
    return step


def write_rows(path: Path, texts: list[str]) -> None:
    """Write one JSON object per text."""
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def main() -> None:
    """Read the command line, train, measure and write model, tokenizer, dev and test rows and metrics.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module_dir", type=Path, metavar="SWORD_MODULE_DIR", help="folder with ot.bzs, ot.bzz, ...")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seconds", type=float, default=475, help="wall-clock training budget (%(default)s)")
    parser.add_argument("--peak-learning-rate", type=float, default=3e-3, help="(%(default)s)")
    parser.add_argument("--init", type=Path, metavar="DIR", help="go on from this checkpoint instead of from scratch")
    arguments = parser.parse_args()

    out_dir: Path = arguments.out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    random.seed(SEED)

    texts = read_texts(arguments.module_dir)
    # The split above must not change between calls; the order of the batches must, so that the second sees another.
    random.seed(4 if arguments.init is None else 6)
    tokenizer = new_tokenizer(texts.train)
    tokenizer.save_pretrained(out_dir)
    train_ids, dev_ids, test_ids = (
        [tokenizer(text).input_ids + [END_ID] for text in part] for part in (texts.train, texts.dev, texts.test)
    )
    n_train_tokens = sum(map(len, train_ids))
    unigram, bigram = count_perplexities(train_ids, test_ids)
    print(f"{n_train_tokens} training tokens, unigram perplexity {unigram:.1f}, bigram {bigram:.1f}", flush=True)

    if arguments.init is None:
        model = new_model()  # its initial weights are the first torch draws after the seed
    else:
        model = LlamaForCausalLM.from_pretrained(arguments.init, dtype=torch.float32, attn_implementation="sdpa")
    print("parameters", sum(parameter.numel() for parameter in model.parameters()), flush=True)

    wall_started, cpu_started = time.time(), time.process_time()
    n_steps = train(
        model, train_ids, dev_ids, seconds=arguments.seconds, peak_learning_rate=arguments.peak_learning_rate
    )

    model.to(torch.bfloat16).save_pretrained(out_dir)
    model.float()  # the metrics are those of the saved, rounded weights
    test_perplexity, n_test_tokens = perplexity(model, test_ids)
    dev_perplexity, _ = perplexity(model, dev_ids)
    metrics = {
        "test_ppl": round(test_perplexity, 3),
        "dev_ppl": round(dev_perplexity, 3),
        "unigram_ppl": round(unigram, 1),
        "bigram_ppl": round(bigram, 1),
        "test_tokens": n_test_tokens,
        "train_tokens": n_train_tokens,
        "steps": n_steps,
        "tokens_seen": n_steps * BATCH_SIZE * WINDOW,
        "cpu_seconds": round(time.process_time() - cpu_started),
        "wall_seconds": round(time.time() - wall_started),
        "block": WINDOW,
    }
    print(metrics)
    (out_dir / "metrics.json").write_text(json.dumps(metrics, indent=1))
    write_rows(out_dir / "test.jsonl", texts.test)
    write_rows(out_dir / "dev.jsonl", texts.dev)

    model.eval()
    torch.manual_seed(1)
    prompt = tokenizer("In the beginning", return_tensors="pt").input_ids
    print(tokenizer.decode(model.generate(prompt, max_new_tokens=60, do_sample=True, top_k=20, temperature=0.8)[0]))


if __name__ == "__main__":
    main()
