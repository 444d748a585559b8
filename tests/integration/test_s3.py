"""Data at `s3://`: written, read, trained from, with a store that fails; nothing is skipped, all faults are
named.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream import cli
from slipstream.config import PrepareConfig, UserError
from slipstream.data import layout, remote, shards
from slipstream.data.prepare import prepare
from slipstream.data.remote import Cache
from slipstream.data.shards import TokenDataset, open_dataset
from slipstream.data.verify import verify
from tests.integration.conftest import World, losses
from tests.s3 import Store, serving

SMALL_SHARDS = ("--shard-tokens", "700", "--max-length", "256", "--holdout", "0.1")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with serving() as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.001)


@pytest.fixture(scope="module")
def local(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world's chats in many small shards, on the disk."""
    out = tmp_path_factory.mktemp("local") / "data"
    assert cli.main(["prepare", *world.prepare(world.chats, out), *SMALL_SHARDS]) == 0
    return out


@pytest.fixture(scope="module")
def uploaded(world: World, store: Store) -> str:
    """The same, prepared from and to the store."""
    store.write("bucket", "in/chats.jsonl", world.chats.read_bytes())
    flags = ["--input", "s3://bucket/in/*.jsonl", "--output-dir", "s3://bucket/data"]
    assert cli.main(["prepare", *flags, "--tokenizer", str(world.target), *SMALL_SHARDS]) == 0
    return "s3://bucket/data"


def every(number: int, what: str, method: str = ""):
    return lambda k, m: what if k % number == 0 and m.startswith(method) else None


def same_documents(data: TokenDataset, other: TokenDataset) -> None:
    assert data.lengths.tolist() == other.lengths.tolist()
    found = data.documents(range(len(data)))
    for (a, b), (c, d) in zip(found, other.documents(range(len(other))), strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)


def cache_of(tmp_path: Path, limit: int = 2**30) -> Cache:
    return Cache(tmp_path / "cache", limit)


def wait_for(data: TokenDataset) -> None:
    """Until all shards are in the cache."""
    end = time.monotonic() + 20
    while any(s.local() is None for s in data.shards):  # type: ignore[union-attr]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_prepared_at_s3_is_what_is_prepared_on_the_disk_and_the_manifest_comes_last(store, uploaded, local):
    names = [n.removeprefix("data/") for n in store.names("bucket", "data/")]
    assert names == sorted(p.name for p in local.iterdir())
    assert len(names) > 5
    for name in names:
        if name != "manifest.json":
            assert store.read("bucket", f"data/{name}") == (local / name).read_bytes()
    both = store.read("bucket", "data/manifest.json"), (local / "manifest.json").read_bytes()
    ours, theirs = (json.loads(x) for x in both)
    assert ours["splits"] == theirs["splits"]
    assert ours["sources"][0]["path"] == "s3://bucket/in/chats.jsonl"
    assert len(ours["sources"][0]["version"]) == 32, "the store's ETag"
    puts = [path for method, path in store.requests if method == "PUT" and "/data/" in path]
    assert puts[-1].endswith("manifest.json")
    assert len(puts) == len(names)


@pytest.mark.parametrize("limit", [2**30, 30_000, 0], ids=["fits", "half fits", "nothing fits"])
def test_documents_come_back_whatever_the_cache_holds_which_keeps_its_bound(
    uploaded, local, tmp_path, store, limit
):
    cache = cache_of(tmp_path, limit)
    for split in ("train", "heldout"):
        data, there = open_dataset(uploaded, split, cache), open_dataset(local, split)
        assert data.fingerprint == there.fingerprint
        assert data.largest_id == there.largest_id
        before = len(store.requests)
        same_documents(data, there)
        assert len(store.requests) > before
        if limit == 2**30:
            wait_for(data)
            before = len(store.requests)
            same_documents(data, there)
            assert len(store.requests) == before, "all is local now"
    files = list(cache.folder.iterdir()) if cache.folder.exists() else []
    assert sum(p.stat().st_size for p in files) <= limit
    assert bool(files) == bool(limit)


def test_the_longest_unused_files_make_room(uploaded, tmp_path):
    files = shards.read_manifest(remote.RemoteFolder(uploaded)).splits["train"]
    cache, folder = cache_of(tmp_path, sum(f.bytes for f in files[:2])), remote.RemoteFolder(uploaded)
    for k in (0, 1, 0, 2):
        time.sleep(0.01)
        assert cache.find(files[k]) is not None or cache.fetch(folder, files[k])
    assert [cache.find(f) is not None for f in files[:3]] == [True, False, True]


@pytest.mark.parametrize(
    "fault", [every(10, "fail"), every(5, "short", "GET")], ids=["every 10th fails", "short"]
)
def test_a_store_that_fails_or_answers_short_changes_nothing(store, uploaded, local, world, tmp_path, fault):
    with store.failing(fault):
        config = PrepareConfig(
            input=("s3://bucket/in/chats.jsonl",), output_dir=f"s3://bucket/{tmp_path.name}",
            tokenizer=str(world.target), shard_tokens=700, max_length=256, holdout=0.1,
        )  # fmt: skip
        prepare(config)
        data = open_dataset(config.output_dir, "train", cache_of(tmp_path))
        same_documents(data, open_dataset(local, "train"))
        wait_for(data)
        same_documents(data, open_dataset(local, "train"))
        assert verify(config.output_dir)[1] == []


def test_a_store_that_stays_down_is_named_and_prepare_leaves_nothing(store, uploaded, world):
    config = PrepareConfig(
        input=("s3://bucket/in/chats.jsonl",), output_dir="s3://bucket/down", tokenizer=str(world.target)
    )
    with store.failing(lambda k, m: "fail" if m == "PUT" else None), pytest.raises(UserError) as e:
        prepare(config)
    assert str(e.value).startswith("s3://bucket/down/train-00000.safetensors: failed 6 times (")
    assert store.names("bucket", "down") == []
    with pytest.raises(UserError, match=r"s3://bucket/in/none\.jsonl: no such file or bucket"):
        prepare(dataclasses.replace(config, input=("s3://bucket/in/none.jsonl",)))
    with pytest.raises(UserError, match="s3://bucket/data: holds a finished dataset"):
        prepare(dataclasses.replace(config, output_dir="s3://bucket/data"))
    with pytest.raises(UserError, match=r"s3://nobucket.*: no such file or bucket"):
        prepare(dataclasses.replace(config, output_dir="s3://nobucket/x"))


def test_a_killed_prepare_leaves_no_dataset_and_the_next_one_starts_over(store, world):
    program = (
        "import os, signal, sys\n"
        "from slipstream import cli\n"
        "from slipstream.data import prepare\n"
        "prepare.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cli.main(sys.argv[1:])\n"
    )
    arguments = ["prepare", *world.prepare(world.chats, Path("X"))]
    arguments += ["--shard-tokens", "700", "--max-length", "256"]
    arguments[arguments.index("X")] = "s3://bucket/killed"
    died = subprocess.run([sys.executable, "-c", program, *arguments], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert "killed/train-00001.safetensors" in store.names("bucket", "killed")
    with pytest.raises(UserError, match=r"s3://bucket/killed: neither manifest\.json"):
        open_dataset("s3://bucket/killed", "train")
    assert cli.main([*arguments, "--shard-tokens", "100000"]) == 0
    assert "killed/train-00001.safetensors" not in store.names("bucket", "killed")


def test_corrupt_and_missing_shards_are_named_wherever_they_are_met(store, uploaded, tmp_path, capsys):
    names = store.names("bucket", "data/")
    for name in names:
        store.write("bucket", name.replace("data/", "bad/"), store.read("bucket", name))
    key = "bad/train-00001.safetensors"
    whole = store.read("bucket", key)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    store.write("bucket", key, bytes(flipped))
    told = f"s3://bucket/{key}: corrupt: "
    data = open_dataset("s3://bucket/bad", "train", cache_of(tmp_path, 0))
    first = data.first_documents[2]
    assert len(data.documents(range(first - 1))) == first - 1, "what is whole is read"
    with pytest.raises(UserError, match=f"{told}document "):
        data.documents(range(len(data)))
    data = open_dataset("s3://bucket/bad", "train", cache_of(tmp_path))
    data.document(0)
    data.shards[0].split._prefetch._thread.join(20)  # type: ignore[union-attr]
    with pytest.raises(UserError, match=f"{told}its sha256"):
        data.document(first - 2)
    assert cli.main(["data", "verify", "s3://bucket/bad"]) == 1
    shown = capsys.readouterr().out
    assert f"FAULT {told}" in shown
    assert shown.count("FAULT") == 1
    store.write("bucket", key, whole[:-1])
    with pytest.raises(UserError, match=f"s3://bucket/{key}: truncated: "):
        open_dataset("s3://bucket/bad", "train")
    store.remove("bucket", key)
    with pytest.raises(UserError, match=f"s3://bucket/{key}: missing, though the manifest lists it"):
        open_dataset("s3://bucket/bad", "train")


def test_a_copy_in_the_cache_that_went_bad_is_replaced(uploaded, local, tmp_path):
    cache = cache_of(tmp_path)
    data, there = open_dataset(uploaded, "train", cache), open_dataset(local, "train")
    data.document(0)
    wait_for(data)
    for path in cache.folder.iterdir():
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
    same_documents(open_dataset(uploaded, "train", cache), there)


def test_training_from_s3_killed_and_resumed_gives_the_losses_of_training_from_the_disk(
    store, uploaded, local, world, tmp_path
):
    flags = ["--data-cache", str(tmp_path / "cache"), "--max-steps", "60", "--save-interval", "3"]
    there = world.train(tmp_path / "there", "--data-dir", uploaded, *flags)
    assert cli.main(world.train(tmp_path / "here", "--data-dir", str(local), *flags)) == 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", *there],
        env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        saved = tmp_path / "there" / "checkpoints" / "step_00000003" / "manifest.json"
        end = time.monotonic() + 60
        while not saved.exists():
            assert process.poll() is None, shlex.join(there)
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    with store.failing(every(10, "fail")):
        assert cli.main(there) == 0
    assert losses(tmp_path / "there") == losses(tmp_path / "here")


def test_the_layout_of_a_shard_begins_with_what_opening_reads(local):
    """Else opening a remote dataset would read whole shards."""
    known = shards.read_manifest(local).splits["train"][0]
    start = (local / known.name).read_bytes()[: 8 + layout.HEADER_AT_MOST]
    places = [at for _, at, _ in layout.read_layout("x", known, start)]
    assert places == sorted(places)
    assert int.from_bytes(start[:8], "little") < layout.HEADER_AT_MOST
