"""A tiny world for whole runs: target, tokenizer, chats, prepared shards; and processes to kill.

Everything goes through the command line, so that a run here is a user's run of a second or two.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream import cli
from tests.fixtures_data import byte_tokenizer, chat, write_jsonl
from tests.tiny import tiny_target

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
VOCAB = 416


@dataclass(frozen=True)
class World:
    root: Path
    target: Path
    chats: Path
    data: Path

    def prepare(self, chats: Path, out: Path) -> list[str]:
        """Flags of `prepare`; its verb stands before them."""
        return ["--input", str(chats), "--output-dir", str(out), "--tokenizer", str(self.target)]

    def train(self, run: Path, *flags: str) -> list[str]:
        """Arguments of a run of milliseconds a step; later flags win."""
        small = (
            "--layers 1 --intermediate-size 64 --taps 2 --block-size 4 --token-budget 256 --max-anchors 16"
        )
        machine = "--device cpu --dtype float32 --decode-prompts 0"
        watch = "--log-interval 1 --eval-rows 1"
        places = ["--target-model", str(self.target), "--data-dir", str(self.data), "--output-dir", str(run)]
        return ["train", *places, *f"{small} {machine} {watch} --max-steps 4".split(), *flags]

    def cache(self, folder: Path, *flags: str) -> list[str]:
        places = [
            "--target-model",
            str(self.target),
            "--data-dir",
            str(self.data),
            "--output-dir",
            str(folder),
        ]
        small = "--taps 2 --token-budget 256 --device cpu --dtype float32"
        return ["cache", *places, *small.split(), *flags]


def counting(index: int, words: int) -> dict[str, Any]:
    """A chat whose answer is predictable: it counts on, round and round."""
    start = index % len(WORDS)
    answer = " ".join(WORDS[(start + 1 + j) % len(WORDS)] for j in range(words))
    return {"messages": chat(f"count on from {WORDS[start]}, number {index}", answer)}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    tiny_target("qwen3", root / "target", vocab_size=VOCAB, layers=8)
    byte_tokenizer().save_pretrained(root / "target")
    lengths = random.Random(0)
    chats = [counting(i, lengths.randint(8, 16)) for i in range(80)]
    made = World(root, root / "target", write_jsonl(root / "chats.jsonl", chats), root / "data")
    arguments = ["--input", str(made.chats), "--output-dir", str(made.data), "--tokenizer", str(made.target)]
    assert cli.main(["prepare", *arguments, "--holdout", "0.1"]) == 0
    return made


LOSSES = (
    "loss", "tau", "accuracy", "slot_accuracy", "slot_ce", "blocks", "blocks_short", "labels", "coverage",
    "lr", "grad_norm",
)  # fmt: skip


def losses(run: Path, kind: str = "train") -> dict[int, dict[str, Any]]:
    """Step → all that must repeat to the last bit, of `metrics.jsonl`; a step may stand there only once."""
    out: dict[int, dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        value = json.loads(line)
        if value["kind"] == kind:
            assert value["step"] not in out, f"step {value['step']} stands twice"
            out[value["step"]] = {k: value[k] for k in LOSSES if k in value}
    return out


SERVER = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from slipstream import cli
from slipstream.decoding import evaluate
from slipstream.training import loop, record
import transformers.models.qwen3.modeling_qwen3
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    code = 1
    try:
        code = cli.main(order["arguments"])
    finally:
        sys.stderr.flush(), sys.stdout.flush()
        os._exit(code)
"""


class Forks:
    """Runs of the command line in processes of their own, forked from one that has imported everything.

    That one never trains, so that what it forks starts as clean as a new process, without the seconds of
    imports.
    """

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def _ask(self, order: dict[str, Any]) -> int:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def start(self, arguments: list[str], log: Path) -> int:
        """The process id of `slipstream ARGUMENTS…`, its output in `log`."""
        return self._ask({"arguments": arguments, "log": str(log)})

    def wait(self, pid: int) -> int:
        """Its exit code, negative for a signal."""
        return self._ask({"wait": pid})

    def run(self, arguments: list[str], log: Path) -> int:
        return self.wait(self.start(arguments, log))


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    assert forks.server.stdin is not None
    forks.server.stdin.close()
    forks.server.wait(timeout=30)
