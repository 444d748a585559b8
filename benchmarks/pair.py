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
import gzip
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.target_pass import alone, build, differences, packed_row, shape_27b, shape_tiny
from benchmarks.workload import SEED, times_ms
from slipstream.config import TrainConfig
from slipstream.data.pack import Row, pack_rows
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.target import Target, default_target_layer_ids
from slipstream.training.attention import choose_attention, make_attend
from slipstream.training.blocks import decay_weights, draw_anchors, make_blocks
from slipstream.training.loss import SlotWeights, block_loss
from slipstream.training.step import make_optimizer, update

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
    lengths = np.maximum(np.array(letters) // 4, 2)
    packing = pack_rows(lengths, tokens, "truncate")
    source = torch.Generator().manual_seed(SEED)
    while True:
        for i in range(len(packing)):
            spans = [end - start for _, start, end in packing.pieces(i)]
            used, padding = sum(spans), torch.zeros(tokens - sum(spans), dtype=torch.int64)
            ids = torch.randint(vocab - 1, (used,), generator=source)
            owners = torch.arange(len(spans)).repeat_interleave(torch.tensor(spans))
            positions = torch.cat([torch.arange(n) for n in spans])
            supervised = torch.cat((torch.ones(used, dtype=torch.bool), padding.bool()))
            yield Row(
                i,
                torch.cat((ids, padding)),
                torch.cat((positions, padding)),
                torch.cat((owners, padding - 1)),
                supervised,
            )


def better_peer(path: Path) -> float | None:
    """Milliseconds of the fastest peer's step in a file of drafter_step.py; None, said, without one."""
    found = json.loads(path.read_text())["results"] if path.exists() else {}
    peers = {n: statistics.median(r["ms"]) for n, r in found.items() if n.startswith(("specu", "specf"))}
    peers = {name: ms for name, ms in peers.items() if not name.endswith("-published")}
    if not peers:
        print(f"{path}: no peer's step is there, so nothing is compared with it", flush=True)
        return None
    return min(peers.values())


def documents_alone(model: Any, ids: tuple[int, ...], row: Row) -> Tensor:
    """Taps of each document by the stock layers alone, on the host."""
    stock = Target(model, ids, "stock")
    stock.isolation = "unpacked"
    return alone(stock, row)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--fp8", action="store_true", help="then the same with FP8 products in the target")
    parser.add_argument("--against", help="what drafter_step.py wrote")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    peer = better_peer(Path(args.against)) if args.against else None
    device, tiny = torch.device(args.device), args.tiny
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = shape_tiny(8) if tiny else shape_27b(64)
    model = build(config, device, dtype)
    ids = default_target_layer_ids(config.num_hidden_layers, 2 if tiny else 5)
    target = Target(model, ids, "fused")
    tokens, anchors, size = (256, 8, 4) if tiny else (8192, 512, 16)
    geometry = DrafterConfig(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=2 if tiny else 5,
        num_heads=4 if tiny else 32,
        num_kv_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        intermediate_size=64 if tiny else 17408,
        block_size=size,
        mask_token_id=config.vocab_size - 1,
        target_layer_ids=ids,
        num_target_layers=config.num_hidden_layers,
        rope_theta=1e7,
    )
    with device:
        drafter = Drafter(geometry)
    drafter.use_gpu(dtype, compiled=device.type == "cuda")
    optimizer = make_optimizer(drafter, TrainConfig(), device)
    weights = SlotWeights(decay_weights(size, 7.0).to(device))
    attention = choose_attention("auto", device)
    rows, losses = packed_rows(tokens, config.vocab_size), []

    def draft(row: Row, taps_ST: Tensor) -> Tensor:
        """Forward and backward of the drafter; the summed weight."""
        chosen = draw_anchors(row, anchors, (SEED, 0, len(losses)))
        blocks = make_blocks(row, chosen, anchors, size, geometry.mask_token_id).to(device)
        x_QH = F.embedding(blocks.input_ids_NB.flatten(), target.embedding_VH)
        attend = make_attend(attention, blocks, geometry)
        hidden = drafter(taps_ST, blocks.context_positions_S, x_QH, blocks.positions_NB.flatten(), attend)
        loss = block_loss(hidden, blocks, target.head, weights, device.type == "cuda")
        loss.total.backward()
        losses.append((loss.total / loss.weight).detach())
        return loss.weight

    def plain() -> None:
        drafter.zero_grad(set_to_none=True)
        row = next(rows)
        draft(row, target.taps(row))

    def whole() -> None:
        row = next(rows)
        update(drafter, optimizer, draft(row, target.taps(row)), clip=1.0, lr=1e-5)

    def aside(stream: Any) -> Callable[[], None]:
        def step() -> None:
            drafter.zero_grad(set_to_none=True)
            row = next(rows)
            with torch.cuda.stream(stream):
                taps_ST = target.taps(row)
            torch.cuda.current_stream().wait_stream(stream)
            taps_ST.record_stream(torch.cuda.current_stream())
            draft(row, taps_ST)

        return step

    whole()
    losses[-1].item()
    found: dict[str, Any] = {"first_step_s": since_launch()}
    print(f"first step done {found['first_step_s']:.1f} s after the launch", flush=True)
    whole()
    graphs = counters["stats"]["unique_graphs"]
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    held = []

    def watched() -> None:
        whole()
        held.append(torch.cuda.memory_allocated() if on_gpu else 0)

    times = times_ms(watched, args.steps, device)
    later = times[10:] or times
    found |= {
        "steps": args.steps,
        "step_ms": statistics.median(later),
        "spread": (max(later) - min(later)) / statistics.median(later),
        "deviation": statistics.pstdev(later) / statistics.mean(later),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_gpu else 0.0,
        "growth_bytes": held[-1] - held[min(9, len(held) - 1)],
    }
    assert all(loss.isfinite() for loss in losses)
    assert len({float(loss) for loss in losses}) > len(losses) // 2, "losses do not vary"
    print(
        f"{args.steps} steps with the optimiser: {found['step_ms']:.1f} ms, after the tenth from "
        f"{min(later):.1f} to {max(later):.1f} (deviation {found['deviation']:.2%}), peak "
        f"{found['peak_gib']:.1f} GiB allocated, {found['reserved_gib']:.1f} reserved, growth "
        f"{found['growth_bytes']} bytes",
        flush=True,
    )

    four = packed_row(config, tokens, 4)
    reference_SC = documents_alone(model, ids, four)
    ids_1S = four.input_ids[None].to(device)

    @torch.no_grad()
    def common() -> object:
        return model(input_ids=ids_1S, output_hidden_states=True, use_cache=False)

    def compare(name: str) -> None:
        drafter.zero_grad(set_to_none=True)
        apart, _ = differences(target.taps(four), reference_SC, len(ids))
        times_ms(lambda: target.taps(four), 2, device)
        found[f"{name}_target_ms"] = statistics.median(times_ms(lambda: target.taps(four), 8, device))
        found[f"{name}_taps_apart"] = apart
        print(
            f"{name}: target alone {found[f'{name}_target_ms']:.1f} ms, taps differ from stock layers' by "
            + " ".join(f"{d:.2%}" for d in apart),
            flush=True,
        )
        times_ms(plain, 2, device)
        found[f"{name}_ms"] = statistics.median(times_ms(plain, 10, device))
        print(f"{name}: target and drafter, forward and backward, {found[f'{name}_ms']:.1f} ms", flush=True)
        if on_gpu:
            step = aside(torch.cuda.Stream())
            times_ms(step, 2, device)
            # from the first event to the last: streams overlap from one step to the next
            took = times_ms(step, 10, device)
            found[f"{name}_overlapped_ms"] = statistics.mean(took)
            print(
                f"{name}: the target's pass on a stream of its own, {statistics.mean(took):.1f} ms",
                flush=True,
            )

    times_ms(common, 2, device)
    found["common_target_ms"] = statistics.median(times_ms(common, 6, device))
    print(f"common: causal LM with all hidden states {found['common_target_ms']:.1f} ms", flush=True)
    compare("bf16")
    late = counters["stats"]["unique_graphs"] - graphs
    if args.fp8:
        target.trunk = None
        target = Target(model, ids, "fused", fp8=True)
        times_ms(plain, 1, device)
        graphs = counters["stats"]["unique_graphs"]  # FP8 has kernels of its own
        compare("fp8")
        late += counters["stats"]["unique_graphs"] - graphs
    found["rows"], found["compiled_late"] = len(losses), late
    print(f"{found['rows']} rows of real lengths, {found['compiled_late']} graphs compiled after the warm-up")
    if peer is not None:
        causal_lm = found["common_target_ms"]
        found["common_ms"] = causal_lm + peer
        for name in ("bf16", "fp8") if args.fp8 else ("bf16",):
            best = min(found[f"{name}_ms"], found.get(f"{name}_overlapped_ms", float("inf")))
            times = found["common_ms"] / best
            print(f"{name}: {times:.2f}× the common way ({causal_lm:.0f} + {peer:.0f} ms)")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
