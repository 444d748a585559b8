"""Shards come back as they were written, and a broken folder is named, never read."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.config import UserError
from slipstream.data import shards
from slipstream.data.records import Document
from slipstream.data.shards import (
    FORMAT,
    Manifest,
    ShardWriter,
    check_tokenizer,
    open_dataset,
    write_atomic,
    write_manifest,
)
from slipstream.data.tokenizer import tokenizer_fingerprint
from tests.fixtures_data import blank_prefix_tokenizer, byte_tokenizer, write_jsonl

RNG = np.random.default_rng(0)
DOCUMENTS = [
    Document(RNG.integers(0, 300, n), RNG.integers(0, 2, n).astype(bool)) for n in (1, 7, 30, 12, 2, 25, 9)
]


def write(folder, documents=DOCUMENTS, heldout=(), shard_tokens=32):
    folder.mkdir(exist_ok=True)
    splits = {}
    for split, mine in (("train", documents), ("heldout", heldout)):
        writer = ShardWriter(folder, split, shard_tokens)
        for d in mine:
            writer.add(d)
        splits[split] = writer.close()
    fingerprint = tokenizer_fingerprint(byte_tokenizer())
    write_manifest(folder, Manifest(FORMAT, splits, fingerprint, "t", 400, [2], {"records": 7}, [], {}))
    return splits


def test_documents_come_back_in_order_across_shards(tmp_path):
    files = write(tmp_path, heldout=DOCUMENTS[:2])["train"]
    assert len(files) > 2
    assert all(f.tokens <= 32 for f in files)
    data = open_dataset(tmp_path, "train")
    assert len(data) == len(DOCUMENTS)
    assert data.lengths.tolist() == [len(d.ids) for d in DOCUMENTS]
    assert data.lengths.dtype == np.int64
    for i in (3, 0, 6, 1, 2, 5, 4):
        ids, supervised = data.document(i)
        np.testing.assert_array_equal(ids, DOCUMENTS[i].ids)
        np.testing.assert_array_equal(supervised, DOCUMENTS[i].supervised)
        assert ids.dtype == np.int64
        assert supervised.dtype == bool
    assert (data.vocab_size, data.eos_ids, data.counts) == (400, (2,), {"records": 7})
    assert sum(f.supervised_tokens for f in files) == sum(int(d.supervised.sum()) for d in DOCUMENTS)
    assert len(open_dataset(tmp_path, "heldout")) == 2


def test_the_fingerprint_changes_with_any_token_and_any_mask(tmp_path):
    seen = set()
    changed_id = [Document(DOCUMENTS[0].ids + 1, DOCUMENTS[0].supervised), *DOCUMENTS[1:]]
    changed_mask = [Document(DOCUMENTS[0].ids, ~DOCUMENTS[0].supervised), *DOCUMENTS[1:]]
    for k, documents in enumerate((DOCUMENTS, changed_id, changed_mask)):
        write(tmp_path / str(k), documents)
        seen.add(open_dataset(tmp_path / str(k), "train").fingerprint)
    assert len(seen) == 3
    write(tmp_path / "again")
    assert open_dataset(tmp_path / "again", "train").fingerprint in seen


def test_large_shards_are_memory_mapped_not_read(tmp_path):
    write(tmp_path)
    assert all(isinstance(s.tokens, np.memmap) for s in open_dataset(tmp_path, "train").shards)


class TestBroken:
    """Every damage is a one-line error that names the file."""

    @pytest.fixture
    def shard(self, tmp_path):
        write(tmp_path)
        return tmp_path / "train-00000.safetensors"

    def fails(self, folder, *told):
        with pytest.raises(UserError) as e:
            open_dataset(folder, "train")
        assert all(t in str(e.value) for t in told), str(e.value)
        assert "\n" not in str(e.value)

    def test_a_truncated_shard(self, shard):
        shard.write_bytes(shard.read_bytes()[:-3])
        self.fails(shard.parent, shard.name + ": truncated: ")

    def test_a_missing_shard(self, shard):
        shard.unlink()
        self.fails(shard.parent, shard.name + ": missing, ")

    def test_a_flipped_bit(self, shard):
        data = bytearray(shard.read_bytes())
        data[-40] ^= 1
        shard.write_bytes(data)
        self.fails(shard.parent, shard.name + ": corrupt: its sha256")

    @pytest.mark.parametrize("at", [0, 7, 20])
    def test_a_broken_header_where_the_split_is_too_large_to_hash(self, shard, monkeypatch, at):
        monkeypatch.setattr(shards, "HASH_WHOLE_BELOW", 0)
        data = bytearray(shard.read_bytes())
        data[at] ^= 0xFF
        shard.write_bytes(data)
        self.fails(shard.parent, shard.name + ": corrupt: ")

    def test_broken_offsets_where_the_split_is_too_large_to_hash(self, shard, monkeypatch):
        monkeypatch.setattr(shards, "HASH_WHOLE_BELOW", 0)
        arrays = shards.safetensors.numpy.load_file(shard)
        arrays["offsets"][1] = 10**6
        shard.write_bytes(shards.safetensors.numpy.save(arrays))
        self.fails(shard.parent, shard.name + ": corrupt: its documents do not add up")

    @pytest.mark.parametrize("name", ["tokens", "supervised", "checks"])
    def test_a_changed_document_is_told_when_it_is_read_where_the_split_is_too_large_to_hash(
        self, shard, monkeypatch, name
    ):
        monkeypatch.setattr(shards, "HASH_WHOLE_BELOW", 0)
        arrays = shards.safetensors.numpy.load_file(shard)
        arrays[name][-1] ^= 1
        shard.write_bytes(shards.safetensors.numpy.save(arrays))
        data = open_dataset(shard.parent, "train")
        last = len(data.shards[0].offsets) - 2
        assert [len(ids) for ids, _ in data.documents(range(last))] == data.lengths[:last].tolist()
        with pytest.raises(
            UserError, match=rf"train-00000.*corrupt: document {last} is not what was written"
        ):
            data.documents([0, last])

    def test_a_broken_manifest(self, shard):
        path = shard.parent / "manifest.json"
        path.write_text(path.read_text()[:-20])
        self.fails(shard.parent, "manifest.json", "broken")
        path.write_text("{}")
        self.fails(shard.parent, "manifest.json", "broken")

    def test_a_later_format(self, shard):
        path = shard.parent / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
        self.fails(shard.parent, "manifest.json", "99")

    def test_a_folder_without_manifest_is_no_dataset(self, shard):
        (shard.parent / "manifest.json").unlink()
        self.fails(shard.parent, "manifest.json")

    def test_no_folder(self, tmp_path):
        self.fails(tmp_path / "nowhere", "nowhere", "slipstream prepare")

    def test_no_training_documents(self, tmp_path):
        write(tmp_path, [], DOCUMENTS)
        self.fails(tmp_path, "no training documents")


def test_a_full_disk_is_an_error_of_the_user_and_leaves_nothing_partial(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "x").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="x: disk full"):
        write_atomic(tmp_path / "x", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_another_tokenizer_is_refused(tmp_path):
    write(tmp_path)
    data = open_dataset(tmp_path, "train")
    check_tokenizer(data, byte_tokenizer())
    padded = byte_tokenizer()
    padded.pad_token = "<|endoftext|>"
    check_tokenizer(data, padded)
    with pytest.raises(UserError, match="another tokenizer"):
        check_tokenizer(data, blank_prefix_tokenizer())
    renamed = byte_tokenizer()
    renamed.eos_token = "<|eot_id|>"
    with pytest.raises(UserError, match="another tokenizer"):
        check_tokenizer(data, renamed)


class TestCompletions:
    """A folder of tokenised completions opens as a dataset without preparing it."""

    records = [  # noqa: RUF012
        {"prompt_ids": RNG.integers(0, 300, 4).tolist(), "response_ids": RNG.integers(0, 300, 6).tolist()}
        for _ in range(100)
    ]

    def written(self, folder, kind):
        if kind == "jsonl":
            write_jsonl(folder / "a.jsonl", self.records)
            return
        table = pa.Table.from_pylist(self.records)
        if kind == "parquet":
            pq.write_table(table, folder / "a.parquet", row_group_size=30)
            return
        new = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
        with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)

    @pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow file", "arrow stream"])
    def test_every_file_format_gives_the_same_split(self, tmp_path, kind):
        self.written(tmp_path, kind)
        train, heldout = open_dataset(tmp_path, "train"), open_dataset(tmp_path, "heldout")
        assert (len(train), len(heldout)) == (98, 2)
        assert train.counts == {"records": 100, "kept": 100, "skipped": {}}
        assert train.tokenizer_fingerprint is None
        ids = sorted(d.document(i)[0].tolist() for d in (train, heldout) for i in range(len(d)))
        assert ids == sorted(r["prompt_ids"] + r["response_ids"] for r in self.records)
        assert train.document(0)[1].tolist() == [False] * 4 + [True] * 6
        (tmp_path / "two").mkdir()
        self.written(tmp_path / "two", "jsonl")
        assert open_dataset(tmp_path / "two", "train").fingerprint == train.fingerprint

    def test_answers_to_one_prompt_stay_on_one_side(self, tmp_path):
        many = [{"prompt_ids": [i % 5, 1], "response_ids": [i]} for i in range(100)]
        write_jsonl(tmp_path / "a.jsonl", many)
        sides = [
            {d.document(i)[0][0] for i in range(len(d))}
            for d in (open_dataset(tmp_path, "train"), open_dataset(tmp_path, "heldout"))
        ]
        assert [len(s) for s in sides] == [4, 1]
        assert not sides[0] & sides[1]

    def test_one_prompt_alone_is_for_training(self, tmp_path):
        write_jsonl(tmp_path / "a.jsonl", [{"prompt_ids": [1], "response_ids": [i]} for i in range(5)])
        assert len(open_dataset(tmp_path, "train")) == 5
        assert len(open_dataset(tmp_path, "heldout")) == 0

    def test_unsupervised_records_are_counted(self, tmp_path):
        masked = {"input_ids": [1, 2], "loss_mask": [0, 0]}
        write_jsonl(tmp_path / "a.jsonl", [*self.records[:3], masked])
        counts = open_dataset(tmp_path, "train").counts
        assert counts == {"records": 4, "kept": 3, "skipped": {"no supervised token": 1}}

    def test_ids_beyond_the_targets_vocabulary_are_refused(self, tmp_path):
        write_jsonl(tmp_path / "a.jsonl", [{"prompt_ids": [1], "response_ids": [5000]}])
        with pytest.raises(UserError, match=r"a.jsonl: token id 5000"):
            check_tokenizer(open_dataset(tmp_path, "train"), byte_tokenizer())

    def test_broken_rows_are_told_with_file_and_row(self, tmp_path):
        columns = {"prompt_ids": pa.array([[1], None], pa.list_(pa.int64())), "response_ids": [[2], [3]]}
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        with pytest.raises(UserError, match=r"a.parquet:row 1: prompt_ids: null"):
            open_dataset(tmp_path, "train")
        (tmp_path / "a.parquet").write_bytes(b"not parquet")
        with pytest.raises(UserError, match=r"a.parquet: not readable as parquet"):
            open_dataset(tmp_path, "train")
