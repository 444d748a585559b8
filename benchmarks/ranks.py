"""A run on several GPUs at Qwen3.6-27B's shape: tokens a second, who waits for whom, against one GPU.

    python -m benchmarks.ranks --json one.json
    python -m benchmarks.ranks --ranks 2 --against one.json
    python -m benchmarks.ranks --dp-pairs 1 --against one.json

The training loop itself runs, over rows as long as real chats with random ids; target and drafter have random
weights, nothing is saved. One rank reads and drafts in turn: what it takes is what placements are held
against. `--layers 8` makes a target for which the drafter is the dear part. `--device cpu --tiny` runs all of
it without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.pair import packed_rows
from benchmarks.target_pass import build, shape_27b, shape_tiny
from benchmarks.workload import SEED, TINY, Shape
from slipstream.config import TrainConfig
from slipstream.data.pack import Row
from slipstream.data.shards import TokenDataset
from slipstream.distributed.crew import make_crew
from slipstream.distributed.launch import is_rank, start_ranks
from slipstream.distributed.link import TapFacts
from slipstream.distributed.placement import Plan, placement_of
from slipstream.distributed.world import World, joined
from slipstream.models.drafter import Drafter
from slipstream.models.ends import Head, TargetEnds
from slipstream.models.target import Target, default_target_layer_ids
from slipstream.training import parallel, setup
from slipstream.training.attention import choose_attention
from slipstream.training.blocks import decay_weights
from slipstream.training.flops import row_flops, target_layers
from slipstream.training.loss import SlotWeights
from slipstream.training.metrics import Display
from slipstream.training.rank import work
from slipstream.training.run import Run

ROWS = 64


class ChatRows:
    """Packed rows of random ids, the same on all ranks; as much of `Rows` as the loops ask for."""

    def __init__(self, tokens: int, vocab: int) -> None:
        rows = itertools.islice(packed_rows(tokens, vocab), ROWS)
        self.rows = [dataclasses.replace(row, row_id=i) for i, row in enumerate(rows)]
        self.count = ROWS

    def row(self, index: int) -> Row:
        return self.rows[index]

    def used(self, index: int) -> int:
        return self.rows[index].spans()[-1][1]

    def documents(self, index: int) -> list[int]:
        return list(range(len(self.rows[index].spans())))


def run_of(args: argparse.Namespace, world: World, folder: Path) -> Run:
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = dataclasses.replace(TINY, hidden=64) if args.tiny else Shape()
    model_config = shape_tiny(args.layers or 8) if args.tiny else shape_27b(args.layers or 64)
    layers = model_config.num_hidden_layers
    ids = default_target_layer_ids(layers, shape.taps)
    config = TrainConfig(
        output_dir=str(folder), token_budget=shape.tokens, max_anchors=shape.anchors, noise=0.0,
        block_size=shape.block_size, max_steps=args.steps, log_interval=10, save_interval=10**9, lr=1e-5,
        ranks=None if args.dp_pairs else args.ranks, dp_pairs=args.dp_pairs, device=args.device,
    )  # fmt: skip
    place = placement_of(config, world.size)
    config, crew = setup.resolved(config, place), make_crew(world, place, False)
    assert config.rows_per_step is not None
    target = Target(build(model_config, device, dtype), ids, "fused") if crew.reads else None
    ends = random_ends(model_config, ids, device, dtype) if target is None else target.ends
    geometry = dataclasses.replace(shape.geometry(), target_layer_ids=ids, num_target_layers=layers)
    torch.manual_seed(SEED)
    drafter = Drafter(geometry).to(device)
    if device.type == "cuda":
        drafter.use_gpu(dtype, compiled=True)
    rows: Any = ChatRows(shape.tokens, shape.vocab)
    elements = crew.by(place.readers[0], lambda: sum(target_layers(target)) if target is not None else 0)
    facts = TapFacts("random", ids, len(ids) * ends.hidden_size, str(dtype), shape.tokens, "", "", ROWS, 0)
    taps = setup.noise_like(ends) if target is None else target.taps
    return Run(
        config=config, folder=folder, device=device, dtype=dtype, crew=crew, target=target, ends=ends,
        drafter=drafter, rows=rows, heldout=None,
        heldout_data=TokenDataset("heldout", np.zeros(0, int), "", None, None, (), {}, (), ()),
        taps=taps, heldout_taps=taps,
        plan=Plan(SEED, ROWS, config.rows_per_step, 1, place, rows.used), steps=args.steps,
        attention=choose_attention("auto", device, device.type == "cuda"),
        flops=row_flops(geometry, elements),
        slot_weights=SlotWeights(decay_weights(shape.block_size, 7.0).to(device)), facts=facts,
    )  # fmt: skip


def random_ends(config: Any, ids: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> TargetEnds:
    """Those of a target that is on another rank."""
    embedding, head = (
        torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype).normal_(0.0, std)
        for std in (1.0, config.hidden_size**-0.5)
    )
    return TargetEnds(
        config.model_type, config.hidden_size, config.vocab_size, config.num_hidden_layers, ids, 1e7, 1.0,
        config.max_position_embeddings, embedding, Head(head, None, 1.0, None), dtype, device, None,
    )  # fmt: skip


def rank(args: argparse.Namespace) -> None:
    folder = Path(args.worker)
    parallel.save_checkpoint = lambda *_: folder  # 20 GB that nobody wants
    with joined(args.device) as world:
        log = folder / "logs" / f"rank{world.rank}.log" if world.rank else None
        with Display(log=log) as display:
            work(run_of(args, world, folder), display)


def measured(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    later = [line for line in lines if line["kind"] == "train"][2:]
    found = {
        name: statistics.median(line[name] for line in later)
        for name in ("tokens_per_second", "mfu", "target_waits", "drafter_waits", "memory_gib")
        if name in later[0]
    }
    return found | {"ranks": 2 * args.dp_pairs or args.ranks}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dp-pairs", type=int, default=0)
    parser.add_argument("--layers", type=int, help="of the target (default: 64)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--against", type=Path, help="figures of another call")
    parser.add_argument("--worker", help="used between the processes of one run")
    args = parser.parse_args()
    if args.worker:
        rank(args)
        return 0
    assert not is_rank(), "it starts its ranks itself"
    with tempfile.TemporaryDirectory() as name:
        argv = ["-m", "benchmarks.ranks", *sys.argv[1:], "--worker", name]
        if code := start_ranks(argv, 2 * args.dp_pairs or args.ranks, Path(name), 0):
            return code
        found = measured(Path(name), args)
    for key, value in found.items():
        print(f"{key}: {value:.4g}")
    if args.against:
        times = found["tokens_per_second"] / json.loads(args.against.read_text())["tokens_per_second"]
        print(f"{times:.2f}× the tokens a second of {args.against}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
