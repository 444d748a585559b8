"""The whole online step on one card: a target of Qwen3.6-27B's shape and the 1.73 B drafter beside it.

    python -m benchmarks.pair --fp8 --against step.json --json pair.json

needs a GPU of 141 GB for `--fp8` (bf16 alone stays below 90 GiB) and flash-linear-attention; weights are
random, rows are packed from the lengths of real chats. It prints: seconds from the launch of the process to
the end of the first step; milliseconds, memory and its growth over `--steps` steps with the optimiser; the
spread of a step's time; graphs compiled after the warm-up; the target's pass alone, on a row of four
documents, and how far its taps are from the stock layers' run document by document; the step without the
optimiser, also with the target's pass on a stream of its own; and the step against the common way: the whole
causal LM with all hidden states, measured here, and the better peer's step, from the file that
drafter_step.py wrote. `--device cpu --tiny` runs everything without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # as training sets it, before torch

import numpy as np
import torch
from torch import Tensor

from benchmarks.ours import Drafting
from benchmarks.target_pass import alone, build, differences, shape_27b, shape_tiny
from benchmarks.workload import SEED, TINY, Shape, equal_documents, random_row
from slipstream.data.pack import Row, pack_rows
from slipstream.models.target import Target, default_target_layer_ids
from slipstream.training.flops import times_ms
from slipstream.training.loss import BlockLoss
from slipstream.training.warmup import graphs_compiled

GIB = 2**30
CHATS = Path(__file__).parents[1] / "examples" / "quickstart" / "chats.jsonl.gz"


def since_launch() -> float:
    """Seconds since this process was started, the interpreter's own start included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def packed_rows(tokens: int, vocab: int) -> Iterator[Row]:
    """Endless rows of random ids in documents as long as real chats, four characters a token."""
    with gzip.open(CHATS, "rt") as lines:
        letters = [sum(len(m["content"]) for m in json.loads(line)["messages"]) for line in lines]
    packing = pack_rows(np.maximum(np.array(letters) // 4, 2), tokens, "truncate")
    source = torch.Generator().manual_seed(SEED)
    while True:
        for i in range(len(packing)):
            yield random_row([end - start for _, start, end in packing.pieces(i)], tokens, vocab, source)


def better_peer(path: Path) -> float | None:
    """Milliseconds of the fastest peer's step in a file of drafter_step.py; None, said, without one."""
    found = json.loads(path.read_text())["results"] if path.exists() else {}
    peers = {n: statistics.median(r["ms"]) for n, r in found.items() if n.startswith(("specu", "specf"))}
    peers = {name: ms for name, ms in peers.items() if not name.endswith("-published")}
    if not peers:
        print(f"{path}: no peer's step is there, so nothing is compared with it", flush=True)
        return None
    return min(peers.values())


class Pair:
    """Target and drafter on one device, reading rows of real lengths."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device = device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = dataclasses.replace(TINY, hidden=64) if tiny else Shape()
        config = shape_tiny(8) if tiny else shape_27b(64)
        layers = config.num_hidden_layers
        self.model = build(config, device, dtype)
        self.ids = default_target_layer_ids(layers, shape.taps)
        self.target = Target(self.model, self.ids, "fused")
        geometry = dataclasses.replace(shape.geometry(), target_layer_ids=self.ids, num_target_layers=layers)
        geometry.check_against_target(config.hidden_size, config.vocab_size, layers)
        self.drafting = Drafting(geometry, shape.anchors, self.target.embedding_VH, self.target.head)
        self.rows = packed_rows(shape.tokens, shape.vocab)
        self.four = equal_documents(shape.tokens, 4, shape.vocab)
        self.four_1S = self.four.input_ids[None].to(device)
        self.read = 0
        """Rows drafted for so far."""

    def use_fp8(self) -> None:
        self.target.trunk = None  # its merged weights go as the next one's are made
        self.target = Target(self.model, self.ids, "fused", fp8=True)

    def draft(self, row: Row, taps_ST: Tensor) -> BlockLoss:
        """Forward and backward of the drafter."""
        loss, _ = self.drafting.loss(row, taps_ST)
        loss.total.backward()
        self.read += 1
        return loss

    def forget(self) -> None:
        self.drafting.drafter.zero_grad(set_to_none=True)

    def plain(self) -> None:
        """A step without the optimiser."""
        self.forget()
        row = next(self.rows)
        self.draft(row, self.target.taps(row))

    def whole(self) -> Tensor:
        """A step with it; the loss."""
        row = next(self.rows)
        loss = self.draft(row, self.target.taps(row))
        self.drafting.update(loss.weight)
        return loss.total.detach() / loss.weight

    def aside(self, stream: torch.cuda.Stream) -> None:
        """A step without it, the target's pass on a stream of its own."""
        self.forget()
        row = next(self.rows)
        with torch.cuda.stream(stream):
            taps_ST = self.target.taps(row)
        torch.cuda.current_stream().wait_stream(stream)
        taps_ST.record_stream(torch.cuda.current_stream())
        self.draft(row, taps_ST)

    def documents_alone(self) -> Tensor:
        """Taps of each of the four documents by the stock layers alone, on the host."""
        stock = Target(self.model, self.ids, "stock")
        stock.isolation = "unpacked"
        return alone(stock, self.four)

    @torch.no_grad()
    def common(self) -> object:
        """The whole causal LM, its row one long document."""
        return self.model(input_ids=self.four_1S, output_hidden_states=True, use_cache=False)

    def median_ms(self, run: Callable[[], object], count: int) -> float:
        times_ms(run, 2, self.device)
        return statistics.median(times_ms(run, count, self.device))


def train(pair: Pair, steps: int) -> dict[str, Any]:
    """Steps with the optimiser: their time, its spread, memory and its growth."""
    on_gpu, held = pair.device.type == "cuda", []
    losses = torch.zeros(steps, device=pair.device)  # what is kept is there before the first step
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def watched() -> None:
        losses[len(held)] = pair.whole()
        held.append(torch.cuda.memory_allocated() if on_gpu else 0)

    times = times_ms(watched, steps, pair.device)
    later = times[10:] or times
    assert losses.isfinite().all()
    assert len(losses.unique()) > len(losses) // 2, "losses do not vary"
    found = {
        "steps": steps,
        "step_ms": statistics.median(later),
        "spread": (max(later) - min(later)) / statistics.median(later),
        "deviation": statistics.pstdev(later) / statistics.mean(later),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_gpu else 0.0,
        "growth_bytes": held[-1] - held[min(9, steps - 1)],
    }
    print(
        f"{steps} steps with the optimiser: {found['step_ms']:.1f} ms, after the tenth from "
        f"{min(later):.1f} to {max(later):.1f} (deviation {found['deviation']:.2%}), peak "
        f"{found['peak_gib']:.1f} GiB allocated, {found['reserved_gib']:.1f} reserved, growth "
        f"{found['growth_bytes']} bytes",
        flush=True,
    )
    return found


def compare(pair: Pair, name: str, reference_SC: Tensor) -> dict[str, Any]:
    """The target alone, its taps against those of the stock layers, and steps without the optimiser."""
    pair.forget()
    apart, _ = differences(pair.target.taps(pair.four), reference_SC, len(pair.ids))
    target_ms = pair.median_ms(lambda: pair.target.taps(pair.four), 8)
    percent = " ".join(f"{d:.2%}" for d in apart)
    print(f"{name}: target alone {target_ms:.1f} ms, taps differ from stock layers' by {percent}", flush=True)
    step_ms = pair.median_ms(pair.plain, 10)
    print(f"{name}: target and drafter, forward and backward, {step_ms:.1f} ms", flush=True)
    found = {f"{name}_target_ms": target_ms, f"{name}_taps_apart": apart, f"{name}_ms": step_ms}
    if pair.device.type == "cuda":
        step = partial(pair.aside, torch.cuda.Stream())
        times_ms(step, 2, pair.device)
        # the mean, from the first event to the last: streams overlap from one step to the next
        took = found[f"{name}_overlapped_ms"] = statistics.mean(times_ms(step, 10, pair.device))
        print(f"{name}: the target's pass on a stream of its own, {took:.1f} ms", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--fp8", action="store_true", help="then the same with FP8 products in the target")
    parser.add_argument("--against", help="what drafter_step.py wrote")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    peer = better_peer(Path(args.against)) if args.against else None
    pair = Pair(torch.device(args.device), args.tiny)

    pair.whole().item()
    found: dict[str, Any] = {"first_step_s": since_launch()}
    print(f"first step done {found['first_step_s']:.1f} s after the launch", flush=True)
    pair.whole()
    graphs = graphs_compiled()
    found |= train(pair, args.steps)

    reference_SC = pair.documents_alone()
    causal_lm = found["common_target_ms"] = pair.median_ms(pair.common, 6)
    print(f"common: causal LM with all hidden states {causal_lm:.1f} ms", flush=True)
    names = ["bf16"]
    found |= compare(pair, "bf16", reference_SC)
    found["compiled_late"] = graphs_compiled() - graphs
    if args.fp8:
        names.append("fp8")
        pair.use_fp8()
        times_ms(pair.plain, 1, pair.device)
        graphs = graphs_compiled()  # FP8 has kernels of its own
        found |= compare(pair, "fp8", reference_SC)
        found["compiled_late"] += graphs_compiled() - graphs
    found["rows"] = pair.read
    print(f"{found['rows']} rows of real lengths, {found['compiled_late']} graphs compiled after the warm-up")
    if peer is not None:
        found["common_ms"] = causal_lm + peer
        for name in names:
            best = min(found[f"{name}_ms"], found.get(f"{name}_overlapped_ms", float("inf")))
            times = found["common_ms"] / best
            print(f"{name}: {times:.2f}× the common way ({causal_lm:.0f} + {peer:.0f} ms)")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
