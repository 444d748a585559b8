"""What FP8 products in the target's pass change: each tap, and what a trained drafter makes of them.

    python benchmarks/fp8_effect.py --target-model MODEL --drafter EXPORT --data-dir DIR [--rows 8]

Held-out rows are read twice by the same fused pass, with products in its own dtype and in FP8. Printed for
each tap: the relative change ‖fp8 − plain‖ / ‖plain‖ over all tokens, the mean cosine between the two and
that of the worst token; for the drafter: teacher-forced τ and accuracy by slot on the same anchors, as in
training's validation. One model is held, read plain and then in FP8; the plain taps wait in host memory
(400 MiB a row of 8192 tokens with 5 taps of 5120).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.config import UserError, default_gamma
from slipstream.data.pack import Row
from slipstream.data.shards import open_dataset
from slipstream.export.zlab import load_drafter
from slipstream.models.drafter import Drafter
from slipstream.models.target import Target, check_vocab, load_target
from slipstream.training.attention import make_attend
from slipstream.training.blocks import decay_weights, draw_anchors, make_blocks
from slipstream.training.loop import VALIDATION_SEED
from slipstream.training.loss import SlotWeights, block_loss
from slipstream.training.metrics import SlotMeter
from slipstream.training.setup import choose_device, choose_dtype, heldout_rows

KINDS = ("plain", "fp8")


class TapChange:
    """Sums over tokens of how far each of T taps moved; host tensors [n, T·H]."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers, self.tokens = layers, 0
        self.moved, self.size, self.cosine = (torch.zeros(len(layers), dtype=torch.float64) for _ in range(3))
        self.worst = torch.ones(len(layers), dtype=torch.float64)

    def add(self, plain_nC: Tensor, fp8_nC: Tensor) -> None:
        plain, fp8 = (taps.unflatten(1, (len(self.layers), -1)).double() for taps in (plain_nC, fp8_nC))
        cosine_nT = F.cosine_similarity(plain, fp8, dim=-1)
        self.moved += (fp8 - plain).square().sum((0, 2))
        self.size += plain.square().sum((0, 2))
        self.cosine += cosine_nT.sum(0)
        self.worst = torch.minimum(self.worst, cosine_nT.amin(0))
        self.tokens += len(plain)

    def read(self) -> list[dict[str, Any]]:
        change, cosine = (self.moved / self.size).sqrt(), self.cosine / self.tokens
        columns = zip(self.layers, change.tolist(), cosine.tolist(), self.worst.tolist(), strict=True)
        return [dict(zip(("layer", "change", "cosine", "worst"), values, strict=True)) for values in columns]


@torch.no_grad()
def judge(
    drafter: Drafter, target: Target, taps_SC: Tensor, row: Row, max_anchors: int, meter: SlotMeter
) -> None:
    """Adds the drafter's teacher-forced predictions from these taps at the row's validation anchors."""
    config, device = drafter.config, target.device
    anchors = draw_anchors(row, max_anchors, (VALIDATION_SEED, 0, 0))
    blocks = make_blocks(row, anchors, max_anchors, config.block_size, config.mask_token_id).to(device)
    embedded = F.embedding(blocks.input_ids_NB.flatten(), target.embedding_VH) * config.input_embedding_scale
    hidden_QH = drafter(
        taps_SC.to(device),
        blocks.context_positions_S,
        embedded,
        blocks.positions_NB.flatten(),
        make_attend("documents", blocks, config),
    )
    weights = SlotWeights(decay_weights(config.block_size, default_gamma(config.block_size)).to(device))
    meter.add(block_loss(hidden_QH, blocks, target.head, weights), blocks, int(row.supervised.sum()))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Taps and drafting of both kinds of pass. Raises `UserError` where FP8 or data is not to be had."""
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    drafter = load_drafter(args.drafter, device, dtype)
    layers = drafter.config.target_layer_ids
    data = open_dataset(args.data_dir, "heldout")
    rows = heldout_rows(data, args.token_budget, "truncate", args.rows)
    if rows is None:
        raise UserError(f"{args.data_dir}: no held-out documents: prepare with --holdout above 0")

    change, taps = TapChange(layers), []
    meters = {kind: SlotMeter(drafter.config.block_size, device) for kind in KINDS}
    target = load_target(args.target_model, layers, len(layers), device, dtype, pass_="fused")
    check_vocab(target, max(int(shard.tokens.max()) for shard in data.shards))
    for kind in KINDS:
        if kind == "fp8":
            target.trunk = None  # its merged weights go as the next one merges them again
            target = Target(target.model, layers, "fused", fp8=True)
        for index in range(rows.count):
            row = rows.row(index)
            taps_SC = target.taps(row)
            judge(drafter, target, taps_SC, row, args.max_anchors, meters[kind])
            used = row.spans()[-1][1]
            if kind == "plain":
                taps.append(taps_SC[:used].cpu())
            else:
                change.add(taps[index], taps_SC[:used].cpu())
    return {
        "target": args.target_model,
        "drafter": args.drafter,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows.count,
        "tokens": change.tokens,
        "taps": change.read(),
        "drafting": {kind: meter.read() for kind, meter in meters.items()},
    }


def describe(facts: dict[str, Any]) -> str:
    (plain, fp8), dtype = (facts["drafting"][kind] for kind in KINDS), facts["dtype"]
    slots = [" ".join(f"{a:.3f}" for a in kind["slot_accuracy"]) for kind in (plain, fp8)]
    lines = [
        f"{facts['rows']} held-out rows, {facts['tokens']:,} tokens, {facts['device']}",
        "| tap after layer | relative change | mean cosine | worst token |",
        "|---|---|---|---|",
        *(
            f"| {t['layer']} | {t['change']:.2%} | {t['cosine']:.5f} | {t['worst']:.5f} |"
            for t in facts["taps"]
        ),
        f"τ, teacher-forced, {plain['blocks']} blocks: {dtype} {plain['tau']:.4f}, FP8 {fp8['tau']:.4f} "
        f"({fp8['tau'] / plain['tau'] - 1:+.2%})",
        f"accuracy: {dtype} {plain['accuracy']:.4f}, FP8 {fp8['accuracy']:.4f}",
        f"accuracy by slot, {dtype}: {slots[0]}",
        f"accuracy by slot, FP8: {slots[1]}",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What FP8 products in the target's pass change.")
    parser.add_argument("--target-model", required=True, help="the target's folder")
    parser.add_argument("--drafter", required=True, help="an exported drafter's folder")
    parser.add_argument("--data-dir", required=True, help="prepared shards with held-out documents")
    parser.add_argument("--rows", type=int, default=8, help="held-out rows read (default 8)")
    parser.add_argument("--token-budget", type=int, default=8192, help="tokens of a row (default 8192)")
    parser.add_argument("--max-anchors", type=int, default=512, help="anchors of a row (default 512)")
    parser.add_argument("--device", default="auto", help="cuda, cpu (emulated) or auto")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or auto")
    parser.add_argument("--json", help="write all figures here")
    args = parser.parse_args(arguments)
    try:
        facts = measure(args)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(describe(facts))
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
