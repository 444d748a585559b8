"""Packing: how full rows are by the size of the window they are filled from, and what packing costs.

Lengths are log-normal, as chats' are. Run: `python -m benchmarks.packing`.
"""

from __future__ import annotations

import resource
import time

import numpy as np

from slipstream.data.pack import pack_rows

WINDOWS = (16, 18, 20, 22, 24, 26, 62)
SHAPES = ((200_000, 6.2, 0.9, 8192), (200_000, 6.2, 0.9, 1024), (60_000, 7.4, 1.0, 8192))
"""Documents, mean and deviation of the logarithm of their lengths, tokens of a row."""


def lengths_of(documents: int, mean: float, deviation: float) -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(mean, deviation, documents)).astype(int) + 20


def main() -> None:
    print("window, tokens:", *(f"2^{w}" for w in WINDOWS))
    for documents, mean, deviation, budget in SHAPES:
        lengths = lengths_of(documents, mean, deviation)
        full = [pack_rows(lengths, budget, "truncate", 2**w).utilisation for w in WINDOWS]
        what = f"{documents:,} documents of {lengths.mean():.0f} tokens, S = {budget}:"
        print(what, *(f"{u:.2%}" for u in full))
    for documents in (1_000_000, 10_000_000):
        lengths = lengths_of(documents, 6.2, 0.9)
        before, began = peak(), time.process_time()
        packing = pack_rows(lengths, 8192, "truncate")
        seconds, more = time.process_time() - began, peak() - before
        print(
            f"{documents:,} documents, {lengths.sum():,} tokens: {len(packing):,} rows, "
            f"{packing.utilisation:.2%} full, {seconds:.1f} s of a core, "
            f"{more / documents:.0f} bytes a document"
        )


def peak() -> int:
    """Most bytes that this process has held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
