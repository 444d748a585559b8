"""Files are read in chunks that depend on the file alone, and every kind gives the same records."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.config import UserError
from slipstream.data import sources
from slipstream.data.sources import describe_source, find_sources, iter_chunks, iter_records

RECORDS = [{"prompt": f"What is {i}?", "n": i} for i in range(50)]
LINES = "".join(json.dumps(r) + "\n" for r in RECORDS).encode()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)


def write(folder, kind):
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        path.write_bytes(LINES)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(LINES[:500]) + gzip.compress(LINES[500:]))
    elif kind == "jsonl.zst":
        path.write_bytes(b"".join(pa.compress(x, "zstd", asbytes=True) for x in (LINES[:500], LINES[500:])))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=20)
    else:
        table = pa.Table.from_pylist(RECORDS)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return str(path)


KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [None, 1, 7, 23, 50, 99])
def test_every_kind_of_file_gives_its_records_in_small_chunks_up_to_the_limit(tmp_path, kind, limit):
    path = write(tmp_path, kind)
    chunks = list(iter_chunks(path, limit))
    assert [r.value for c in chunks for r in c.records()] == RECORDS[:limit]
    assert [c.count for c in chunks] == [len(list(c.records())) for c in chunks]
    if limit is None:
        assert len(chunks) > 2
        assert chunks[-1].at_byte == (tmp_path / f"a.{kind}").stat().st_size
    first = 1 if "jsonl" in kind else 0
    places = [r.where for c in chunks for r in c.records()]
    assert places[0] == f"{path}:{'' if first else 'row '}{first}"
    assert len(set(places)) == len(places)


def test_lines_are_counted_over_blank_ones_and_chunks(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n\n" + LINES.replace(b"\n", b"\n \n") + b"{}")
    found = list(iter_records(tmp_path / "a.jsonl"))
    assert [r.where.rpartition(":")[2] for r in found] == [str(3 + 2 * i) for i in range(51)]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_a_cut_file_is_told_by_its_name(tmp_path, kind):
    path = write(tmp_path, kind)
    whole = (tmp_path / f"a.{kind}").read_bytes()
    (tmp_path / f"a.{kind}").write_bytes(whole[: len(whole) - 40])
    with pytest.raises(UserError, match=rf"a\.{kind}: (broken|not readable|cannot read)"):
        list(iter_records(path))


def test_memory_and_file_urls_are_read_like_paths(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    path = write(tmp_path, "parquet")
    assert [r.value for r in iter_records(f"file://{path}")] == RECORDS
    store = fsspec.filesystem("memory")
    for kind in KINDS:
        with open(write(tmp_path, kind), "rb") as f:
            store.pipe_file(f"/sources/a.{kind}", f.read())
        assert [r.value for r in iter_records(f"memory://sources/a.{kind}")] == RECORDS
    assert find_sources("memory://sources/*.jsonl*") == [f"memory:///sources/a.{k}" for k in KINDS[:3]]
    known = describe_source("memory://sources/a.jsonl")
    assert known["bytes"] == len(LINES)
    store.pipe_file("/sources/a.jsonl", LINES + LINES)
    assert describe_source("memory://sources/a.jsonl")["version"] != known["version"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("memory://sources/none.jsonl", "no such file or bucket"),
        ("memory://sources/none*.jsonl", "matches no file"),
        ("memory://sources/a.txt", "unknown kind of file"),
        ("nothing://sources/a.jsonl", "not known"),
    ],
)
def test_a_url_that_leads_nowhere_is_told_in_one_line(given, told):
    with pytest.raises(UserError, match=told) as e:
        list(iter_records(given))
    assert str(e.value).startswith(given[:15])
    assert "\n" not in str(e.value)
