"""A training run that tests kill: `python -m conformance.tests.run_until_killed PACKAGE FOLDER STEPS [LIMIT]`.

It goes on from the folder's newest checkpoint, saves after every update, in the background after every other one, and
prints each loss, bit for bit, when its update is done. LIMIT bounds the size of a file it may write, in bytes.
"""

from __future__ import annotations

import importlib
import resource
import sys
from pathlib import Path

import core_numpy as core
from core_numpy.contract.data import batches, byte_tokens

MODEL = core.ModelConfig(vocab=128, width=8, heads=2, layers=1, hidden=8, max_length=16, dropout=0.1)
TRAIN = core.TrainConfig(steps=1000, batch=4, lr=1e-2, ema=0.9, schedule="cosine", accumulate=2, seed=3)
TEXT = byte_tokens("whatever moment it is, the curve does not know. " * 4)


def main(package: str, folder: str, steps: int) -> None:
    B = importlib.import_module(package)
    begun = Path(folder).is_dir() and any(Path(folder).glob("step-*"))
    trainer = B.Trainer.load(folder) if begun else B.Trainer(B.Transformer(MODEL, seed=1), TRAIN)
    for batch in batches(TEXT, batch=4, length=8, seed=3, start=trainer.batches):
        if trainer.updates >= steps:
            break
        loss = trainer.step(batch)["loss"]
        print(trainer.updates, loss.hex(), flush=True)
        trainer.save(folder, background=trainer.updates % 2 == 0)
    trainer.wait()


if __name__ == "__main__":
    if len(sys.argv) > 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
