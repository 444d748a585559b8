"""A training run: what it is made of (`Run`), its folder, the facts it writes and the lines it prints.

Putting a run together and checking it is setup.py's, the steps are loop.py's.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream import __version__
from slipstream.config import TrainConfig, UserError, from_dict, read_yaml, to_yaml
from slipstream.data.pack import Packing, Row, make_row
from slipstream.data.shards import TokenDataset, write_atomic
from slipstream.distributed.crew import Crew
from slipstream.distributed.link import TapFacts, TapLink
from slipstream.distributed.placement import Placement, Plan
from slipstream.models.drafter import Drafter
from slipstream.models.ends import TargetEnds
from slipstream.models.target import Target
from slipstream.training.checkpoint import newest_checkpoint, read_position, verify_checkpoint
from slipstream.training.flops import RowFlops
from slipstream.training.loss import SlotWeights

WATCHING = {
    "log_interval", "save_interval", "keep_checkpoints", "eval_interval", "eval_rows", "decode_prompts",
    "decode_tokens", "plan", "output_dir", "taps_dir", "target_model", "data_dir", "data_cache",
    "data_cache_gib", "ranks", "dp_pairs",
    "target_ranks", "drafter_ranks", "link_credits", "drafter_sharding", "target_sharding", "max_restarts",
    "device", "dtype", "attention", "compile", "activation_checkpointing", "probe",
}  # fmt: skip
"""Settings that change nothing in the losses but their rounding, or only through what the fingerprint holds:
the contents behind paths, and the device, dtype and attention that were chosen.
"""
MADE_OF = ("target", "data", "packing", "drafter", "dtype", "device_type", "attention")
"""The facts in `env.json` that the losses depend on."""


@dataclass(frozen=True)
class Rows:
    """The packed rows of one split."""

    dataset: TokenDataset
    packing: Packing
    count: int

    def row(self, index: int) -> Row:
        return make_row(self.dataset, self.packing, index)

    def used(self, index: int) -> int:
        """Tokens of a row that are not padding."""
        return sum(end - start for _, start, end in self.packing.pieces(index))

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
    crew: Crew
    """This rank among the others."""
    target: Target | None
    """On ranks that read it."""
    ends: TargetEnds
    """The target's embedding, head and facts, on all ranks."""
    drafter: Drafter
    rows: Rows
    heldout: Rows | None
    """The rows of the validation; None without any."""
    heldout_data: TokenDataset
    """All held-out documents, maybe none: the last decode takes its prompts from them."""
    taps: TapLink
    """On a rank that drafts only: noise for the warm-up; the loop opens the link to the readers."""
    heldout_taps: TapLink
    plan: Plan
    steps: int
    attention: str
    flops: RowFlops
    slot_weights: SlotWeights
    facts: TapFacts
    """What the taps of the training rows belong to."""

    @property
    def compiled(self) -> bool:
        """Whether layers and loss run compiled: on a GPU, unless asked not to."""
        return self.device.type == "cuda" and self.config.compile

    @property
    def fingerprint(self) -> str:
        """Hash of all that the losses depend on."""
        settings = {k: v for k, v in asdict(self.config).items() if k not in WATCHING}
        made_of = [
            asdict(self.facts),
            asdict(self.drafter.config),
            str(self.dtype),
            self.device.type,
            self.attention,
        ]
        text = json.dumps([settings, *made_of], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_run_folder(config: TrainConfig) -> None:
    """A new or empty folder, or one that holds this very run; another run's settings are named."""
    folder = Path(config.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file: give a new --output-dir")
    unfinished = {"env.json", "env.json.tmp", "config.yaml.tmp", "logs"}  # killed before its first step
    metrics = folder / "metrics.jsonl"
    if newest_checkpoint(folder)[0] is None and not (metrics.exists() and metrics.stat().st_size):
        unfinished |= {"config.yaml", "metrics.jsonl", "checkpoints"}  # out of memory in its warm-up, say
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
    if newest is None:
        return
    verify_checkpoint(newest)
    if read_position(newest).fingerprint == run.fingerprint:
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
    """`config.yaml` (resolved) and `env.json`: written before the first step, by the first rank."""
    if not run.crew.first:
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(run.folder / "env.json", (json.dumps(run_facts(run), indent=2) + "\n").encode())
    write_atomic(run.folder / "config.yaml", to_yaml(run.config).encode())


def run_facts(run: Run) -> dict[str, Any]:
    """What the run is made of and where it runs; plain JSON."""
    facts = {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(run.device),
        "ranks": run.crew.place.describe(),
        "threads": torch.get_num_threads(),
        "git": git_revision(),
        "target": run.facts.target,
        "data": run.rows.dataset.fingerprint,
        "packing": run.rows.packing.fingerprint,
        "drafter": asdict(run.drafter.config),
        "dtype": str(run.dtype).removeprefix("torch."),
        "device_type": run.device.type,
        "attention": run.attention,
        "records": run.rows.dataset.counts,
        "packed": run.rows.packing.counts,
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


def describe_rows(rows: Rows, what: str) -> str:
    """One line; records skipped and documents cut or left out are named."""
    lost = dict(rows.dataset.counts.get("skipped", {})) | rows.packing.counts
    lost.pop("documents", None)
    counts = ", ".join(f"{n} {reason}" for reason, n in lost.items() if n) or "nothing skipped or cut"
    return (
        f"{what}: {len(rows.dataset)} documents, {int(rows.dataset.lengths.sum()):,} tokens in "
        f"{len(rows.packing)} rows, {rows.count} of them used, "
        f"{rows.packing.utilisation:.1%} full ({counts})"
    )


def describe_drafter(drafter: Drafter, target: TargetEnds, isolation: str, mask_source: str) -> str:
    c = drafter.config
    millions = sum(p.numel() for p in drafter.parameters()) / 1e6
    return (
        f"drafter: {millions:.1f} M parameters, {c.num_layers} layers, "
        f"heads {c.num_heads}/{c.num_kv_heads} of {c.head_dim}, MLP {c.intermediate_size}, "
        f"block {c.block_size}, taps {list(c.target_layer_ids)} of {c.num_target_layers}, "
        f"mask token {c.mask_token_id} ({mask_source}); target {target.model_type}, "
        f"H {target.hidden_size}, V {target.vocab_size}, documents {isolation}"
    )


def describe_plan(
    config: TrainConfig,
    place: Placement,
    rows: int,
    steps: int,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> str:
    """Placement, rows and steps in one paragraph, for `--plan` and the start of a run."""
    assert config.rows_per_step is not None
    epochs = steps * config.rows_per_step / (config.anchor_draws * rows)
    bound = "" if config.max_minutes is None else f", at most {config.max_minutes:g} minutes"
    return (
        f"plan: {place.describe()} ({device_name(device)}), "
        f"{str(dtype).removeprefix('torch.')} matrix work, "
        f"{attention} attention, taps {'from ' + config.taps_dir if config.taps_dir else 'online'}; "
        f"{steps} steps of {config.rows_per_step} × {config.token_budget} tokens with at most "
        f"{config.max_anchors} anchors a row ({epochs:.2f} epochs of {rows} rows){bound}"
    )
