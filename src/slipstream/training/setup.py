"""What a training run is made of, put together and checked before the first step: folder, rows, target,
drafter, links.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slipstream import __version__
from slipstream.config import TrainConfig, UserError, default_gamma, from_dict, read_yaml, to_yaml
from slipstream.data.pack import OnLong, Packing, Row, make_row, pack_rows
from slipstream.data.shards import Split, TokenDataset, check_tokenizer, open_dataset
from slipstream.distributed.link import TapCache, TapFacts, TapLink, online_taps, target_fingerprint
from slipstream.distributed.placement import Plan
from slipstream.models.drafter import Drafter, DrafterConfig, default_heads, default_intermediate
from slipstream.models.families import choose_mask_token
from slipstream.models.selfcheck import MIN_SAMPLE_TOKENS, self_check
from slipstream.models.target import Target, check_vocab, load_target
from slipstream.training.attention import choose_attention
from slipstream.training.blocks import anchor_candidates, decay_weights
from slipstream.training.checkpoint import newest_checkpoint
from slipstream.training.loss import SlotWeights
from slipstream.training.metrics import Display

WATCHING = {
    "log_interval", "save_interval", "keep_checkpoints", "eval_interval", "eval_rows", "decode_prompts",
    "decode_tokens", "plan", "output_dir", "taps_dir", "target_model", "data_dir", "dp_pairs", "compile",
}  # fmt: skip
"""Settings that change nothing in the losses (paths are covered by the fingerprints of what they hold)."""
MADE_OF = ("target", "data", "packing", "drafter", "dtype")
"""The facts in `env.json` that the losses depend on."""


@dataclass(frozen=True)
class Rows:
    """The packed rows of one split."""

    dataset: TokenDataset
    packing: Packing
    count: int

    def row(self, index: int) -> Row:
        return make_row(self.dataset, self.packing, index)

    def documents(self, index: int) -> list[int]:
        return [document for document, _, _ in self.packing.pieces(index)]

    def __iter__(self) -> Iterator[Row]:
        return (self.row(i) for i in range(self.count))


@dataclass(frozen=True)
class Run:
    """Everything a step needs."""

    config: TrainConfig
    folder: Path
    device: torch.device
    dtype: torch.dtype
    target: Target
    drafter: Drafter
    rows: Rows
    heldout: Rows | None
    taps: TapLink
    heldout_taps: TapLink
    plan: Plan
    steps: int
    attention: str
    slot_weights: SlotWeights
    fingerprint: str


def choose_device(asked: str) -> torch.device:
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked not in ("cpu", "cuda"):
        raise UserError(f"--device {asked}: give cpu, cuda or auto")
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here: use --device cpu or auto")
    return torch.device(asked)


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """bf16 where its matrix products are fast: CUDA, and CPUs with AVX512-BF16 or AMX; else fp32."""
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked]
    fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def open_rows(data_dir: str, split: Split, token_budget: int, on_long: OnLong, limit: int | None) -> Rows:
    dataset = open_dataset(data_dir, split)
    packing = pack_rows(dataset.lengths, token_budget, on_long)
    count = len(packing) if limit is None else min(limit, len(packing))
    return Rows(dataset, packing, count)


def describe_rows(rows: Rows, what: str) -> str:
    counts = (
        ", ".join(f"{n} {reason}" for reason, n in rows.packing.counts.items() if n) or "none cut or left out"
    )
    return (
        f"{what}: {len(rows.dataset)} documents, {int(rows.dataset.lengths.sum()):,} tokens in "
        f"{len(rows.packing)} rows, {rows.count} of them used, "
        f"{rows.packing.utilisation:.1%} full ({counts})"
    )


def drafter_config(config: TrainConfig, target: Target, mask_token_id: int) -> DrafterConfig:
    """The drafter's own geometry: from the settings and its defaults; hidden size and vocabulary from the
    target.
    """
    heads, kv_heads, head_dim = default_heads(target.hidden_size)
    if config.heads is not None:
        heads, kv_heads = (
            config.heads,
            max(d for d in range(1, heads + 1) if config.heads % d == 0 and d <= kv_heads),
        )
    return DrafterConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=config.layers,
        num_heads=heads,
        num_kv_heads=config.kv_heads or kv_heads,
        head_dim=config.head_dim or head_dim,
        intermediate_size=config.intermediate_size or default_intermediate(target.hidden_size),
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target.target_layer_ids,
        num_target_layers=target.num_layers,
        rope_theta=target.rope_theta,
        sliding_window=config.sliding_window,
        input_embedding_scale=target.input_embedding_scale,
        max_position_embeddings=target.config.max_position_embeddings,
    )


def check_target(target: Target, rows: Rows, display: Display) -> None:
    """The start-up self-checks on the fullest of the first rows; a failure ends the run with what to do."""
    sample = max((rows.row(i) for i in range(min(rows.count, 8))), key=lambda row: row.spans()[-1][1])
    if (found := sample.spans()[-1][1]) < MIN_SAMPLE_TOKENS:
        raise UserError(
            f"{rows.dataset.shards[0].path.parent}: rows of {found} tokens are too few to check the target "
            f"with ({MIN_SAMPLE_TOKENS} at least): raise --token-budget, or prepare longer documents"
        )
    failed = []
    for check in self_check(target, sample):
        display.say(f"check: {check.name}: {'ok' if check.ok else 'FAILED'} ({check.detail})")
        if not check.ok:
            failed.append(f"{check.name}: {check.detail}: {check.mend}")
    if failed:
        raise UserError(f"target: {failed[0]}")


def largest_token_id(dataset: TokenDataset) -> int:
    """The tokenizer's largest id where the shards know it, else the largest id in the documents."""
    if dataset.vocab_size is not None:
        return dataset.vocab_size - 1
    return max(int(shard.tokens.max()) for shard in dataset.shards)


def check_ids(target: Target, tokenizer: PreTrainedTokenizerBase, rows: Rows, heldout: Rows | None) -> None:
    """The token ids of both splits are the target's: its tokenizer's, and rows of its embedding."""
    for part in (rows, heldout):
        if part is not None:
            check_tokenizer(part.dataset, tokenizer)
            check_vocab(target, largest_token_id(part.dataset))


def check_anchors(rows: Rows, config: TrainConfig) -> None:
    if config.max_anchors < 1:
        raise UserError(f"--max-anchors {config.max_anchors}: at least one block a row is needed")
    if config.block_size > config.token_budget:
        raise UserError(
            f"--block-size {config.block_size}: no such block fits into a row of {config.token_budget} "
            "tokens: lower it, or raise --token-budget"
        )
    if not any(len(anchor_candidates(row)) for row in rows):
        raise UserError(
            f"{config.data_dir}: no row of {config.token_budget} tokens has two neighbouring supervised "
            "tokens, so no anchor is possible: raise --token-budget, or prepare data with longer answers"
        )


def tap_facts(target: Target, rows: Rows, heldout: Rows | None, token_budget: int) -> TapFacts:
    return TapFacts(
        target=target_fingerprint(target),
        target_layer_ids=target.target_layer_ids,
        width=len(target.target_layer_ids) * target.hidden_size,
        dtype=str(target.dtype).removeprefix("torch."),
        token_budget=token_budget,
        packing=rows.packing.fingerprint + rows.dataset.fingerprint,
        heldout_packing="" if heldout is None else heldout.packing.fingerprint + heldout.dataset.fingerprint,
        rows=rows.count,
        heldout_rows=0 if heldout is None else heldout.count,
    )


def heldout_rows(data_dir: str, token_budget: int, on_long: OnLong, limit: int) -> Rows | None:
    """The first `limit` held-out rows; None where the data has no held-out part."""
    if not len(open_dataset(data_dir, "heldout")):
        return None
    rows = open_rows(data_dir, "heldout", token_budget, on_long, limit)
    return rows if rows.count else None


def load_tokenizer(target_model: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(target_model)
    except (OSError, ValueError, KeyError) as e:
        why = " ".join(str(e).split())[:200]
        raise UserError(
            f"{target_model}: no tokenizer can be loaded from it: {why}: copy the target's own there"
        ) from None


def open_run(config: TrainConfig, display: Display) -> Run:
    """All of a run, checked: user errors come from here, before the first step and before anything is
    written.
    """
    if config.dp_pairs > 0:
        raise UserError(
            f"--dp-pairs {config.dp_pairs}: split placement over several GPUs is not there yet: "
            "leave it out (or 0) to train on one device"
        )
    check_run_folder(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    attention = choose_attention(config.attention, device, config.compile)

    cache = None if config.taps_dir is None else TapCache.open(config.taps_dir)
    rows = open_rows(
        config.data_dir,
        "train",
        config.token_budget,
        config.on_long,
        None if cache is None else cache.facts.rows,
    )
    display.say(describe_rows(rows, "data"))
    heldout = heldout_rows(config.data_dir, config.token_budget, config.on_long, config.eval_rows)
    check_anchors(rows, config)
    if heldout is None:
        display.say("data: no held-out rows: validation and the last decoding are left out")

    target = load_target(config.target_model, config.target_layer_ids, config.taps, device, dtype)
    tokenizer = load_tokenizer(config.target_model)
    check_ids(target, tokenizer, rows, heldout)
    mask_token_id, source = choose_mask_token(
        config.mask_token_id, target.model_type, target.vocab_size, tokenizer, stop_ids(target)
    )
    geometry = drafter_config(config, target, mask_token_id)
    check_target(target, rows, display)
    torch.manual_seed(config.seed)
    drafter = Drafter(geometry).to(device)
    display.say(describe_drafter(drafter, target, source))

    taps, heldout_taps = online_taps(target), online_taps(target)
    if cache is not None:
        cache.check(tap_facts(target, rows, heldout, config.token_budget))
        cache.check_recorded("train", rows.count)
        cache.check_recorded("heldout", 0 if heldout is None else heldout.count)
        taps, heldout_taps = cache.link("train", device), cache.link("heldout", device)
    plan = Plan(config.seed, rows.count, config.accumulation)
    steps = plan.steps(config.epochs) if config.max_steps is None else config.max_steps
    gamma = config.gamma or default_gamma(config.block_size)
    decay_B = decay_weights(config.block_size, gamma).to(device) if config.loss == "decay" else None
    facts = tap_facts(target, rows, None, config.token_budget)
    run = Run(
        config=config,
        folder=Path(config.output_dir),
        device=device,
        dtype=dtype,
        target=target,
        drafter=drafter,
        rows=rows,
        heldout=heldout,
        taps=taps,
        heldout_taps=heldout_taps,
        plan=plan,
        steps=steps,
        attention=attention,
        slot_weights=SlotWeights(decay_B, config.dpace_floor),
        fingerprint=run_fingerprint(config, facts, geometry, dtype),
    )
    check_same_run(run)
    return run


def stop_ids(target: Target) -> tuple[int, ...]:
    """Token ids that end the target's own generation."""
    generation = target.model.generation_config
    eos = None if generation is None else generation.eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def run_fingerprint(config: TrainConfig, facts: TapFacts, geometry: DrafterConfig, dtype: torch.dtype) -> str:
    """Hash of all that the losses depend on."""
    settings = {k: v for k, v in asdict(config).items() if k not in WATCHING}
    text = json.dumps([settings, asdict(facts), asdict(geometry), str(dtype)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_run_folder(config: TrainConfig) -> None:
    """A new or empty folder, or one that holds this very run; another run's settings are named."""
    folder = Path(config.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file: give a new --output-dir")
    unfinished = {f".{name}.partial" for name in ("config.yaml", "env.json")}  # killed before its first step
    if not folder.exists() or not {p.name for p in folder.iterdir()} - unfinished:
        return
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: is not empty and holds no run of slipstream: give a new --output-dir")
    before = asdict(from_dict(TrainConfig, read_yaml(folder / "config.yaml"), str(folder / "config.yaml")))
    for name, value in asdict(config).items():
        if name not in WATCHING and before[name] != value:
            raise UserError(
                f"{folder}: holds another run: its {name} is {before[name]}, asked for is {value}: "
                "give a new --output-dir, or that run's settings to resume it"
            )


def check_same_run(run: Run) -> None:
    """The checkpoint to resume from is this run's: same data, target and geometry behind the same paths."""
    newest, _ = newest_checkpoint(run.folder)
    if newest is None or json.loads((newest / "position.json").read_text())["fingerprint"] == run.fingerprint:
        return
    env = run.folder / "env.json"
    before = json.loads(env.read_text()) if env.is_file() else {}
    now = run_facts(run)
    what = ", ".join(name for name in MADE_OF if before.get(name) != now[name]) or "configuration"
    raise UserError(
        f"{newest}: made with another {what} (see {env}): give a new --output-dir, or what that run was made "
        "with"
    )


def write_run_facts(run: Run) -> None:
    """`config.yaml` (resolved) and `env.json`: written before the first step."""
    run.folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("config.yaml", to_yaml(run.config)),
        ("env.json", json.dumps(run_facts(run), indent=2) + "\n"),
    ):
        partial = run.folder / f".{name}.partial"
        partial.write_text(text)
        os.replace(partial, run.folder / name)


def run_facts(run: Run) -> dict[str, Any]:
    """What the run is made of and where it runs; plain JSON."""
    facts = {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(run.device),
        "threads": torch.get_num_threads(),
        "git": git_revision(),
        "target": target_fingerprint(run.target),
        "data": run.rows.dataset.fingerprint,
        "packing": run.rows.packing.fingerprint,
        "drafter": asdict(run.drafter.config),
        "dtype": str(run.dtype).removeprefix("torch."),
        "run": run.fingerprint,
    }
    return json.loads(json.dumps(facts))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"CPU: {model}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def git_revision() -> str | None:
    where = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(where), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except OSError:
        return None
    return found.stdout.strip() or None


def describe_drafter(drafter: Drafter, target: Target, mask_source: str) -> str:
    c = drafter.config
    millions = sum(p.numel() for p in drafter.parameters()) / 1e6
    return (
        f"drafter: {millions:.1f} M parameters, {c.num_layers} layers, "
        f"heads {c.num_heads}/{c.num_kv_heads} of {c.head_dim}, MLP {c.intermediate_size}, "
        f"block {c.block_size}, taps {list(c.target_layer_ids)} of {c.num_target_layers}, "
        f"mask token {c.mask_token_id} ({mask_source}); target {target.model_type}, "
        f"H {target.hidden_size}, V {target.vocab_size}, documents {target.isolation}"
    )


def describe_plan(run: Run) -> str:
    """Placement, rows and steps in one paragraph, for `--plan` and the start of a run."""
    config = run.config
    epochs = run.steps * config.accumulation / run.rows.count
    bound = "" if config.max_minutes is None else f", at most {config.max_minutes:g} minutes"
    return (
        f"plan: target and drafter on {device_name(run.device)}, "
        f"{str(run.dtype).removeprefix('torch.')} matrix work, "
        f"{run.attention} attention, taps {'from ' + config.taps_dir if config.taps_dir else 'online'}; "
        f"{run.steps} steps of {config.accumulation} × {config.token_budget} tokens with at most "
        f"{config.max_anchors} anchors a row ({epochs:.2f} epochs of {run.rows.count} rows){bound}"
    )
