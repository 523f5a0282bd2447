#!/usr/bin/env python3
"""Draws the loss curves of runs: scripts/plot_loss.py loss.png RUN_FOLDER [RUN_FOLDER ...]

Reads RUN_FOLDER/metrics.jsonl; a thin line for the training loss, dots for the validation loss.
Needs matplotlib (Debian: python3-matplotlib)."""
import json
import os
import sys


def read_run(folder):
    """Returns ([(step, loss)], [(step, validation loss)]) of a run folder."""
    train, validation = [], []
    path = os.path.join(folder, "metrics.jsonl")
    try:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                if record.get("loss") is not None:
                    train.append((record["step"], record["loss"]))
                if record.get("val_loss") is not None:
                    validation.append((record["step"], record["val_loss"]))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path}: {error}; give the folder of a run (--out)")
    return train, validation


def main():
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} loss.png RUN_FOLDER [RUN_FOLDER ...]")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for number, folder in enumerate(sys.argv[2:]):
        train, validation = read_run(folder)
        name = os.path.basename(os.path.normpath(folder))
        color = f"C{number}"
        # later runs dashed: curves that are equal bit for bit lie on top of each other
        style = "-" if number == 0 else (0, (4, 6))
        axes.plot(*zip(*train), color=color, linewidth=0.8, linestyle=style, label=f"{name}: training")
        if validation:
            axes.plot(*zip(*validation), "o", color=color, markersize=5 - number, label=f"{name}: validation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=120)


if __name__ == "__main__":
    main()
