"""Train a small vision transformer to read the 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn.

Runs on the CPU in one thread, about 100 CPU seconds:

    python train.py OUT_DIR
"""

import argparse
import csv
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import affine_grid, cross_entropy, grid_sample
from transformers import ViTConfig, ViTForImageClassification

SEED = 0
# The source keeps each writer's images together. Unshuffled, the last 500 are mostly by writers the model never saw.
TRAIN, DEV, TEST = slice(0, 1197), slice(1197, 1297), slice(1297, 1797)
BATCH_SIZE = 32
PEAK_LEARNING_RATE = 1e-3
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.05
LABEL_SMOOTHING = 0.03
SHARE_WARPED = 0.6  # of the batches
MAX_ANGLE = 0.2  # radians
MAX_SHIFT = 0.3  # half image widths
ZOOM_RANGE = (0.9, 1.1)


def new_model() -> ViTForImageClassification:
    """A randomly initialised classifier with 4 layers of 8 heads."""
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=192,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
        id2label={digit: str(digit) for digit in range(10)},
        label2id={str(digit): digit for digit in range(10)},
    )
    return ViTForImageClassification(config)


def warp(images: Tensor) -> Tensor:
    """Images (batch, 1, 8, 8) turned, shifted and zoomed a little, each by its own random amount, in most batches."""
    n_images = len(images)
    # For a reproducible run: angle, shift, zoom in this order, and all three also for a batch that stays as it is.
    angle = torch.empty(n_images).uniform_(-MAX_ANGLE, MAX_ANGLE)
    shift = torch.empty(n_images, 2).uniform_(-MAX_SHIFT, MAX_SHIFT)
    zoom = torch.empty(n_images).uniform_(*ZOOM_RANGE)
    if random.random() >= SHARE_WARPED:
        return images
    row_x = torch.stack([zoom * angle.cos(), -zoom * angle.sin(), shift[:, 0]], dim=1)
    row_y = torch.stack([zoom * angle.sin(), zoom * angle.cos(), shift[:, 1]], dim=1)
    grid = affine_grid(torch.stack([row_x, row_y], dim=1), list(images.shape), align_corners=False)
    # What comes in from outside the image is 0, which after the shift by 1 is the background.
    return grid_sample(images + 1, grid, align_corners=False) - 1


def learning_rate(step: int, n_steps: int) -> float:
    """Learning rate at a step: a linear warm-up, times a cosine from the peak down to 0."""
    warmup = min(1, (step + 1) / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warmup * 0.5 * (1 + math.cos(math.pi * step / n_steps))


@torch.no_grad()
def accuracy(model: ViTForImageClassification, images: Tensor, labels: Tensor) -> float:
    """Share of images whose best-scored label is the right one."""
    model.eval()
    hits = model(pixel_values=images).logits.argmax(dim=-1) == labels
    model.train()
    return round(hits.float().mean().item(), 4)


def train(model: ViTForImageClassification, images: Tensor, labels: Tensor, *, n_epochs: int) -> None:
    """Fit the model to the training images and print the accuracy on the dev images every ten epochs."""
    n_images = len(images[TRAIN])
    n_steps = n_epochs * (n_images // BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    started = time.time()
    step = 0
    model.train()
    for epoch in range(n_epochs):
        order = torch.randperm(n_images)
        for start in range(0, n_images - BATCH_SIZE + 1, BATCH_SIZE):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, n_steps)
            chosen = order[start : start + BATCH_SIZE]
            logits = model(pixel_values=warp(images[chosen])).logits
            loss = cross_entropy(logits, labels[chosen], label_smoothing=LABEL_SMOOTHING)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        if epoch % 10 == 9:
            dev = accuracy(model, images[DEV], labels[DEV])
            print(f"epoch {epoch + 1} loss {loss.item():.3f} dev {dev} {time.time() - started:.0f} s", flush=True)


def write_rows(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write one row per image: its label, then its 64 grey values 0..16, row by row."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label"] + [f"p{pixel}" for pixel in range(64)])
        for image, label in zip(images, labels, strict=True):
            writer.writerow([int(label)] + [int(grey) for grey in image.ravel()])


def main() -> None:
    """Read the command line, train, measure and write the model, the dev and test rows and metrics.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--epochs", type=int, default=110, help="passes over the training images (%(default)s)")
    arguments = parser.parse_args()

    out_dir: Path = arguments.out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    random.seed(SEED)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # 0..16 becomes -1..1
    labels = torch.tensor(digits.target)
    model = new_model()  # its initial weights are the first torch draws after the seed
    print("parameters", sum(parameter.numel() for parameter in model.parameters()), flush=True)

    cpu_started = time.process_time()
    train(model, images, labels, n_epochs=arguments.epochs)

    model.to(torch.float16).save_pretrained(out_dir)
    model.float()  # the metrics are those of the saved, rounded weights
    metrics = {
        "train": accuracy(model, images[TRAIN], labels[TRAIN]),
        "dev": accuracy(model, images[DEV], labels[DEV]),
        "test": accuracy(model, images[TEST], labels[TEST]),
        "n_test": len(labels[TEST]),
        "cpu_seconds": round(time.process_time() - cpu_started),
    }
    print(metrics)
    (out_dir / "metrics.json").write_text(json.dumps(metrics, indent=1))
    write_rows(out_dir / "dev.csv", digits.images[DEV], digits.target[DEV])
    write_rows(out_dir / "test.csv", digits.images[TEST], digits.target[TEST])


if __name__ == "__main__":
    main()
