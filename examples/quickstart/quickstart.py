"""`make quickstart`: from nothing to a drafter that is decoded with, and a table of what it gained.

Every step is a command of slipstream that is printed before it runs; a second call goes on where the first
one stopped. On a CPU a small drafter (recipes/quickstart-cpu.yaml) trains for six minutes, on a CUDA device
the usual one (recipes/quickstart-cuda.yaml) for five.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
console = Console(highlight=False)


def say(step: int, what: str) -> None:
    console.rule(f"[bold]{step}/6 {what}", align="left")


def slipstream(*args: object) -> None:
    words = ["slipstream", *map(str, args)]
    console.print(f"$ {shlex.join(words)}", soft_wrap=True, markup=False)
    child = subprocess.Popen([sys.executable, "-m", "slipstream.cli", *words[1:]])
    # A stop is the child's to handle: it finishes its step and saves. Ctrl-C reaches it from the terminal.
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number)),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
    }
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if code:
        raise SystemExit(code)


def summarise(run: Path, result: dict, seconds: float) -> dict:
    facts = result["datasets"][0]
    position = json.loads((run / "export" / "slipstream.json").read_text())["position"]
    return {
        "tau_control": facts["tau_control"]["mean"],
        "tau": facts["tau"]["mean"],
        "tau_interval": [facts["tau"]["low"], facts["tau"]["high"]],
        "tau_prompt_lookup": facts["tau_lookup"]["mean"],
        "tau_ngram": facts["tau_ngram"]["mean"],
        "lossless": result["lossless"]["lossless"],
        "seconds": round(seconds),
        "device": result["device"],
        "steps": position["step"],
        "label_tokens": position["labels"],
        "block_size": result["block_size"],
        "prompts": facts["requests"],
        "tokens_per_second_plain": facts["plain"]["tokens_per_second"],
        "tokens_per_second_speculative": facts["speculative"]["tokens_per_second"],
    }


def show(summary: dict, base: Path, target: Path, run: Path) -> None:
    low, high = summary["tau_interval"]
    table = Table(
        title="slipstream quickstart: SmolLM2-135M-Instruct (dequantised Q4_1), held-out prompts, greedy"
    )
    table.add_column("", justify="left")
    table.add_column("", justify="right")
    rows = {
        "τ untrained drafter (control)": f"{summary['tau_control']:.2f}",
        "τ trained drafter": f"{summary['tau']:.2f}  (95 % interval {low:.2f}–{high:.2f})",
        f"τ prompt-lookup, same block of {summary['block_size']}": f"{summary['tau_prompt_lookup']:.2f}",
        "τ n-gram table of the training answers": f"{summary['tau_ngram']:.2f}",
        "tokens/s plain": f"{summary['tokens_per_second_plain']:.1f}",
        "tokens/s speculative": f"{summary['tokens_per_second_speculative']:.1f}",
        "output equal to plain decoding (fp32)": "yes" if summary["lossless"] else "NO",
        "device": summary["device"],
        "training": f"{summary['steps']} steps, {summary['label_tokens']:,} labels",
        "time in all": f"{summary['seconds'] // 60} min {summary['seconds'] % 60} s",
        "target": str(target),
        "run, metrics, checkpoints": str(run),
        "drafter as served": str(run / "export"),
        "these figures": str(base / "summary.json"),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    console.print(
        "τ = tokens per target pass, its own included: 1 means that no draft was right.\n"
        "On a CPU a pass over a block costs more than a pass over one token: there a\n"
        "higher τ need not be faster."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/quickstart"), help="where everything goes")
    parser.add_argument("--minutes", type=float, default=None, help="training time instead of the recipe's")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--gguf", type=Path, default=None, help="the target's GGUF instead of the package's")
    args = parser.parse_args()
    began, base = time.monotonic(), args.dir
    cuda = args.device != "cpu" and torch.cuda.is_available()
    target, data, taps, run = base / "target", base / "data", base / "taps", base / "run"
    base.mkdir(parents=True, exist_ok=True)

    say(1, "the small real target")
    convert = [sys.executable, str(ROOT / "examples/quickstart/convert_target.py"), str(target)]
    if args.gguf is not None:
        convert += ["--gguf", str(args.gguf)]
    if code := subprocess.run(convert, check=False).returncode:
        raise SystemExit(code)

    say(2, "prepare the example chats (prompts and answers by the target itself)")
    if not (data / "manifest.json").exists():
        chats = ROOT / "examples/quickstart/chats.jsonl.gz"
        slipstream(
            "prepare", "--input", chats, "--tokenizer", target, "--output-dir", data, "--max-length", 512
        )

    where = ["--target-model", target, "--data-dir", data, "--device", "cuda" if cuda else "cpu"]
    recipe = ROOT / f"recipes/quickstart-{'cuda' if cuda else 'cpu'}.yaml"
    if cuda:
        say(3, "taps: the GPU reads the target online, nothing to record")
    else:
        say(3, "record the target's taps once")
        slipstream("cache", *where, "--output-dir", taps, "--token-budget", 1024, "--limit-rows", 128)
        where += ["--taps-dir", taps]

    say(4, "train a drafter")
    minutes = [] if args.minutes is None else ["--max-minutes", args.minutes]
    slipstream("train", "--config", recipe, *where, "--output-dir", run, "--decode-prompts", 0, *minutes)
    if not (run / "export").exists():
        raise SystemExit("stopped: the same command goes on from here")

    say(5, "decode held-out prompts with the exported drafter")
    result = base / "eval.json"
    slipstream(
        "eval", *where[:2], *where[4:6], "--drafter", run / "export", "--prompts", data, "--ngram-data", data,
        "--control", "--max-prompts", 16 if cuda else 10, "--max-new-tokens", 128 if cuda else 60,
        "--lossless-tokens", 60, "--output", result,
    )  # fmt: skip

    say(6, "what it gained")
    summary = summarise(run, json.loads(result.read_text()), time.monotonic() - began)
    (base / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show(summary, base, target, run)


if __name__ == "__main__":
    main()
