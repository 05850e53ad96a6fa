"""How many of the flipped labels a run put near the top: python configs/digits/found.py runs/digits"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pandas as pd

FLIPPED = Path(__file__).parent / "flipped.json"
SHARES = (0.03, 0.10)


def found(samples: pd.DataFrame, flipped: set[str], column: str, share: float) -> int:
    """How many of `flipped` are among the given share of samples with the largest values in `column`."""
    top = samples.nlargest(math.ceil(share * len(samples)), column)
    return int(top["id"].isin(flipped).sum())


def main(run: str) -> None:
    samples = pd.read_parquet(Path(run) / "samples.parquet")
    flipped = {entry["id"] for entry in json.loads(FLIPPED.read_text())}
    for column, words in (("grad_norm", "gradient norm"), ("loss", "loss")):
        counts = [
            f"{found(samples, flipped, column, share)} of {len(flipped)} in the top {share:.0%}"
            for share in SHARES
        ]
        print(f"by {words + ':':<15} {', '.join(counts)}")


if __name__ == "__main__":
    main(sys.argv[1])
