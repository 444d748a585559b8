"""`slipstream prepare` at scale: its rate beside the bare tokenizer's on the same cores, memory, and the
first row.

    python -m benchmarks.prepare --tokenizer TARGET [--documents 1000000] [--texts more.jsonl …]

Documents are small real chats, each with a suffix of its own so that none is a copy. The bare rate is
`tokenizer(texts)` over the same conversations, rendered, in batches of 1000, with the tokenizer's own threads
on all cores. Both are wall time on whatever else the machine does; CPU seconds stand beside them. Memory is
the sum of proportional set sizes (shared pages counted once) of prepare's processes.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.data.workers import cores

CHATS = Path(__file__).parents[1] / "examples" / "quickstart" / "chats.jsonl.gz"
BATCH = 1000
BUDGET = 8192


def make(texts: list[Path], count: int, out: Path) -> None:
    """`count` chats in JSON Lines: those of the files round and round, a number after each question."""
    chats = []
    for path in texts:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as f:
            for line in f:
                record = json.loads(line)
                turns = record.get("turns")
                if turns:  # questions alone: the first one is its own answer
                    record = {"messages": [{"role": r, "content": turns[0]} for r in ("user", "assistant")]}
                chats.append(record)
    with out.open("w") as f:
        for k, record in enumerate(itertools.islice(itertools.cycle(chats), count)):
            first = next(m for m in record["messages"] if m["role"] == "user")
            said = first["content"]
            first["content"] = f"{said} ({k})"
            f.write(json.dumps(record) + "\n")
            first["content"] = said


def bare(tokenizer_dir: str, chats: Path, count: int) -> dict[str, float]:
    """In a process of its own, whose environment lets the tokenizer use its threads."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    with chats.open() as f:
        messages = [json.loads(line)["messages"] for line in itertools.islice(f, count)]
    texts = [str(tokenizer.apply_chat_template(m, tokenize=False)) for m in messages]
    tokenizer(texts[:BATCH], add_special_tokens=False)
    start, cpu, tokens = time.perf_counter(), time.process_time(), 0
    for at in range(0, len(texts), BATCH):
        ids = tokenizer(texts[at : at + BATCH], add_special_tokens=False)["input_ids"]
        tokens += sum(map(len, ids))
    return {
        "tokens": tokens, "seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu
    }  # fmt: skip


def first_row(data: str) -> dict[str, float]:
    """Seconds, after imports, to the first packed row; in a process of its own."""
    from slipstream.data.pack import make_row, pack_rows
    from slipstream.data.shards import open_dataset

    start = time.perf_counter()
    dataset = open_dataset(data, "train")
    opened = time.perf_counter() - start
    packing = pack_rows(dataset.lengths, BUDGET, "truncate")
    make_row(dataset, packing, 0)
    seconds = time.perf_counter() - start
    return {"opening": opened, "seconds": seconds, "utilisation": packing.utilisation, "rows": len(packing)}


def family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def memory(pid: int) -> int:
    """Bytes of a process and all below it."""
    total = 0
    for member in family(pid):
        try:
            text = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:  # it has just ended
            continue
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    return total


def prepare(tokenizer: str, chats: Path, out: Path, processes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "slipstream.cli", "prepare", "--input", str(chats)]
    command += ["--output-dir", str(out), "--tokenizer", tokenizer, "--processes", str(processes)]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command)
    peaks: list[int] = []
    while process.poll() is None:
        peaks.append(memory(process.pid))
        time.sleep(0.5)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"prepare ended with code {process.returncode}")
    files = json.loads((out / "manifest.json").read_text())["splits"].values()
    third = len(peaks) // 3
    return {
        "tokens": sum(f["tokens"] for split in files for f in split),
        "bytes": sum(f["bytes"] for split in files for f in split),
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "memory": max(peaks),
        "memory_second_third": max(peaks[third : 2 * third], default=0),
        "memory_last_third": max(peaks[2 * third :], default=0),
    }


def alone(what: str, *arguments: str, threads: bool = False) -> dict[str, float]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true" if threads else "false"}
    environment["RAYON_NUM_THREADS"] = str(cores())  # by itself it may leave half of them idle
    command = [sys.executable, "-m", "benchmarks.prepare", what, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["bare"]:
        print(json.dumps(bare(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
        return
    if sys.argv[1:2] == ["first-row"]:
        print(json.dumps(first_row(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="more: `messages` or `turns`")
    parser.add_argument("--bare-documents", type=int, default=50_000, help="of them, for the bare rate")
    parser.add_argument("--processes", type=int, default=cores())
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/prepare"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    chats, out = options.folder / "chats.jsonl", options.folder / "data"
    make([CHATS, *options.texts], options.documents, chats)
    plain = alone("bare", options.tokenizer, str(chats), str(options.bare_documents), threads=True)
    ours = prepare(options.tokenizer, chats, out, options.processes)
    row = alone("first-row", str(out))
    rate, our_rate = (x["tokens"] / x["seconds"] for x in (plain, ours))
    cpu, our_cpu = (x["tokens"] / x["cpu_seconds"] for x in (plain, ours))
    thirds = [f"{ours[f'memory_{k}_third'] / 2**20:,.0f}" for k in ("second", "last")]
    size = chats.stat().st_size / 2**30
    for name, told in (
        ("documents", f"{options.documents:,}, {ours['tokens']:,} tokens, {size:.2f} GiB in"),
        ("bare tokenizer", f"{rate:,.0f} tokens/s ({cpu:,.0f} a CPU second)"),
        ("prepare", f"{our_rate:,.0f} tokens/s ({our_cpu:,.0f} a CPU second), {ours['seconds']:.0f} s"),
        ("ratio", f"{our_rate / rate:.2f} of wall time, {our_cpu / cpu:.2f} of CPU time"),
        ("memory, MiB", f"{ours['memory'] / 2**20:,.0f} at most; in the later thirds {', '.join(thirds)}"),
        ("packing", f"{row['utilisation']:.2%} of {row['rows']:,} rows of {BUDGET} tokens"),
        ("first row", f"{row['seconds']:.2f} s, of {ours['bytes'] / 2**30:.2f} GiB of shards"),
    ):
        print(f"{name:16}{told}")


if __name__ == "__main__":
    main()
