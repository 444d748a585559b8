"""Whatever lies in an input file: every record is kept or left out for a counted reason, or the run ends with
one line, exit code 2 and nothing written. 300 damaged inputs, the same ones every time.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream import cli
from slipstream.data.shards import open_dataset
from tests.fixtures_data import byte_tokenizer, chat
from tests.unit.test_templates import CALL, TOOLS, tokenizer_of

Files = dict[str, bytes]
SEEDS = 12
ODD: list[Any] = [
    None, True, 0, -1, 3.5, float("nan"), 10**30, "", " ", "x", "\x00", "\ud800", "\udfff\ud800", "\ufeff",
    "<|im_end|>", "</think>", [], {}, [None], [[]], {"a": None}, {"type": "text"},
    {"type": "image_url", "image_url": {}},
    [{"type": "text", "text": "x"}], [{"type": "text", "text": 5}], {"role": "user"}, "é" * 50, "{{ x }}",
]  # fmt: skip


def good(r: random.Random) -> dict[str, Any]:
    n = r.randrange(10**9)
    kind = r.randrange(4)
    if kind == 0:
        return {"prompt_ids": [5, 6, n % 200], "response_ids": [7, n // 200 % 200, 9]}
    if kind == 1:
        return {
            "conversations": [{"from": "human", "value": f"What is {n}?"}, {"from": "gpt", "value": f"{n}."}]
        }
    more = chat(f"And {n}?", "No.") if kind == 2 else []
    return {"id": n, "messages": [*chat(f"What is {n}?", f"It is {n}.", system="Answer."), *more]}


def lines(records: list[Any], end: bytes = b"\n") -> bytes:
    return b"".join(json.dumps(r).encode() + end for r in records)


def some(r: random.Random, n: int = 6) -> list[dict[str, Any]]:
    return [good(r) for _ in range(n)]


def spoil(r: random.Random, data: bytes, times: int) -> bytes:
    out = bytearray(data)
    for _ in range(times):
        out[r.randrange(len(out))] = r.randrange(256)
    return bytes(out)


def insert(r: random.Random, data: bytes, junk: bytes) -> bytes:
    at = r.randrange(len(data))
    return data[:at] + junk + data[at:]


def mutate(r: random.Random, value: Any) -> Any:
    """One node of a JSON value, anywhere in it, replaced, removed or wrapped."""
    if not isinstance(value, dict | list) or not value or r.random() < 0.15:
        return r.choice([r.choice(ODD), [value], {"content": value}])
    if isinstance(value, dict):
        key = r.choice(list(value))
        if r.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate(r, value[key])}
    k = r.randrange(len(value))
    return value[:k] + ([mutate(r, value[k])] if r.random() < 0.85 else []) + value[k + 1 :]


def with_content(r: random.Random, content: Any) -> dict[str, Any]:
    messages = chat("What is it?", f"It is {r.random()}.")
    messages[r.randrange(2)]["content"] = content
    return {"messages": messages}


def among(r: random.Random, *records: Any) -> list[Any]:
    """The records in the middle of good ones."""
    out = some(r)
    for record in records:
        out.insert(r.randrange(len(out) + 1), record)
    return out


def flipped_bytes(r: random.Random) -> Files:
    return {"a.jsonl": spoil(r, lines(some(r)), r.randrange(1, 9))}


def cut_lines(r: random.Random) -> Files:
    data = lines(some(r))
    return {"a.jsonl": data[: r.randrange(len(data))]}


def invalid_utf8(r: random.Random) -> Files:
    junk = r.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80\x81"])
    return {"a.jsonl": insert(r, lines(some(r)), junk)}


def nul_bytes(r: random.Random) -> Files:
    data = lines(some(r))
    return {
        "a.jsonl": r.choice([insert(r, data, b"\0"), b"\0\0" + data, data + b"\0" * 99, data + b"\n\0\n"])
    }


def duplicates(r: random.Random) -> Files:
    records = some(r)
    again = [{**x, "id": 7} for x in r.choices(records, k=9)]
    return {"a.jsonl": lines([*records, *again[:4]]), "b.jsonl": lines(again[4:])}


def odd_contents(r: random.Random) -> Files:
    return {"a.jsonl": lines(among(r, *(with_content(r, r.choice(ODD)) for _ in range(r.randrange(1, 3)))))}


def mutated_records(r: random.Random) -> Files:
    return {"a.jsonl": lines(among(r, mutate(r, good(r))))}


def nested_nulls(r: random.Random) -> Files:
    record = r.choice(
        [
            {"messages": None}, {"messages": [None]}, {"messages": [{"role": None, "content": None}]},
            {None: None}, {"conversations": [{"from": None}]}, {"input_ids": None, "loss_mask": None},
            {"prompt_ids": [None]},
            {"messages": [*chat("q"), {"role": "assistant", "content": None, "tool_calls": [None]}]},
            {"messages": [*chat("q"), {"role": "assistant", "content": [None]}]}, {"messages": {}, "x": None},
        ]
    )  # fmt: skip
    return {"a.jsonl": lines(among(r, record))}


def deep_nesting(r: random.Random) -> Files:
    n = r.choice([10, 900, 5_000, 200_000])
    deep = r.choice([b"[" * n + b"]" * n, b'{"a":' * n + b"1" + b"}" * n, b"[" * n])
    key = r.choice([b"x", b"messages", b"tools", b"prompt_ids"])
    record = lines(some(r, 1)).rstrip()[:-1] + b', "' + key + b'": ' + deep + b"}\n"
    return {"a.jsonl": lines(some(r)) + record}


def byte_order_marks(r: random.Random) -> Files:
    data = lines(some(r))
    text = data.decode()
    return {"a.jsonl": r.choice([b"\xef\xbb\xbf" + data, text.encode("utf-16"), text.encode("utf-32-le")])}


def line_ends(r: random.Random) -> Files:
    end = r.choice([b"\r\n", b"\r", b"\n\n\n", b" \t\r\n", "\u2028".encode(), b"\x0b\n", b""])
    return {"a.jsonl": lines(some(r), end)}


def lone_surrogates(r: random.Random) -> Files:
    bad = r.choice(["\ud800", "\udc00x", "x\udbff", "\udc00\ud800"])
    record = r.choice(
        [
            with_content(r, f"What {bad}?"), {"messages": [{"role": bad, "content": "x"}]}, {bad: 1},
            {"messages": [*chat("q"), {"role": "assistant", "content": "a", "reasoning_content": bad}]},
            {"messages": chat("q", "a"), "tools": bad}, {**good(r), bad: bad},
        ]
    )  # fmt: skip
    return {"a.jsonl": lines(among(r, record))}


def broken_gzip(r: random.Random) -> Files:
    data = gzip.compress(lines(some(r, 30)))
    cut = data[: r.randrange(len(data))]
    return {
        "a.jsonl.gz": r.choice(
            [cut, cut, spoil(r, data, 3), data + b"junk", lines(some(r)), b"", data + data]
        )
    }


def broken_zstd(r: random.Random) -> Files:
    data = pa.compress(lines(some(r, 30)), "zstd", asbytes=True)
    assert isinstance(data, bytes)
    cut = data[: r.randrange(len(data))]
    return {"a.jsonl.zst": r.choice([cut, cut, spoil(r, data, 3), data + b"junk", lines(some(r)), b"", data])}


def empty_files(r: random.Random) -> Files:
    empty = r.choice([b"", b"\n", b" \n\t\n", b"{}\n", b"[]\n", b"null", b"\r"])
    return r.choice([{"a.jsonl": empty}, {"a.jsonl": empty, "b.jsonl": lines(some(r))}])


def good_and_bad_file(r: random.Random) -> Files:
    kind = r.choice([flipped_bytes, broken_gzip, broken_parquet, empty_files, broken_arrow])
    return {"good.jsonl": lines(some(r)), **{"bad-" + k: v for k, v in kind(r).items()}}


def huge_lines(r: random.Random) -> Files:
    big = r.choice(["word " * 50_000, "x" * 200_000, "\n" * 200_000, "🙂" * 50_000])
    record = r.choice([with_content(r, big), {big: 1}, {"messages": big}, [big], {"x": big, **good(r)}])
    return {"a.jsonl": lines(among(r, record))}


def wrong_values(r: random.Random) -> Files:
    line = r.choice(
        [b"5", b'"x"', b"[]", b"NaN", b"Infinity", b"1" * 5000, b"{'a': 1}", b"{} {}", b"[{}]", b"tru",
         b"// x",
         b'{"messages": ' + b"9" * 5000 + b"}", b'{"input_ids": [' + b"9" * 5000 + b'], "loss_mask": [1]}']
    )  # fmt: skip
    return {"a.jsonl": lines(some(r)) + line + b"\n" + lines(some(r))}


def odd_ids(r: random.Random) -> Files:
    ids = r.choice(
        [[], [1.5], [-1], [2**40], [10**30], [True], [[1]], ["1"], "12", {}, None, [399], [400], [0] * 9, 5]
    )
    both = r.choice([("prompt_ids", "response_ids"), ("input_ids", "loss_mask")])
    record = {both[0]: ids, both[1]: r.choice([[7, 8], ids, [0], [1], [2]])}
    return {"a.jsonl": lines(among(r, *([record] * r.choice([1, 2]))))}


def odd_parts(r: random.Random) -> Files:
    kinds = ["text", "image", "image_url", "input_audio", "video", "", None, 5]
    parts = [{"type": r.choice(kinds), "text": r.choice(["x", None, 5])} for _ in range(r.randrange(4))]
    record = with_content(r, parts)
    return {"a.jsonl": lines(among(r, {**record, **({"images": ["x.png"]} if r.random() < 0.2 else {})}))}


def odd_tools(r: random.Random) -> Files:
    messages = [*chat(f"What is {r.random()}?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    record = {"messages": [*messages, {"role": "tool", "content": "4"}], "tools": TOOLS}
    key = r.choice(["tools", "messages"])
    record[key] = mutate(r, record[key])
    return {"a.jsonl": lines(among(r, record))}


def table(r: random.Random) -> pa.Table:
    records = [{"messages": chat(f"What is {r.random()}?", "It is.")} for _ in range(6)]
    ids = {"prompt_ids": [[5, 6, k] for k in range(6)], "response_ids": [[7, 8]] * 6}
    return pa.table(ids) if r.random() < 0.3 else pa.Table.from_pylist(records)


def parquet(t: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(t, sink)
    return sink.getvalue().to_pybytes()


def arrow(t: pa.Table, stream: bool) -> bytes:
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, t.schema) as writer:
        writer.write_table(t)
    return sink.getvalue().to_pybytes()


def broken_parquet(r: random.Random) -> Files:
    data = parquet(table(r))
    cut = data[: r.randrange(len(data))]
    return {
        "a.parquet": r.choice(
            [cut, spoil(r, data, 3), spoil(r, data, 30), b"", b"PAR1", lines(some(r)), data]
        )
    }


def broken_arrow(r: random.Random) -> Files:
    data = arrow(table(r), stream=r.random() < 0.5)
    return {
        "a.arrow": r.choice(
            [data[: r.randrange(len(data))], spoil(r, data, 2), b"", b"ARROW1", lines(some(r)), data]
        )
    }


def wrong_columns(r: random.Random) -> Files:
    column = r.choice(
        [
            pa.array(["a", None]), pa.array([1, 2]), pa.array([[], []]), pa.array([["x"], [None]]),
            pa.array([b"\xff", b""]), pa.array([[{"role": "user", "content": 5}], []]),
            pa.array([[{"role": 1}], None]), pa.nulls(2),
            pa.array([[[1]], [[2]]]), pa.array([1.5, None]), pa.array(["a", "b"]).dictionary_encode(),
            pa.array([0, 1], pa.timestamp("s")),
            pa.array([[{"role": "user", "content": "x", "tool_calls": [{"a": 1}]}]] * 2),
        ]
    )  # fmt: skip
    names = r.choice(
        [["messages"], ["conversations"], ["prompt_ids", "response_ids"], ["input_ids", "loss_mask"], ["x"]]
    )
    if r.random() < 0.2:
        names = ["messages", "messages"]
    t = pa.table([column] * len(names), names=names)
    return {"a.parquet": parquet(t)} if r.random() < 0.5 else {"a.arrow": arrow(t, stream=True)}


KINDS: list[Callable[[random.Random], Files]] = [
    flipped_bytes, cut_lines, invalid_utf8, nul_bytes, duplicates, odd_contents, mutated_records,
    nested_nulls, deep_nesting, byte_order_marks, line_ends, lone_surrogates, broken_gzip, broken_zstd,
    empty_files, good_and_bad_file, huge_lines, wrong_values, odd_ids, odd_parts, odd_tools, broken_parquet,
    broken_arrow, wrong_columns, mutated_records,
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("tools")]
    byte_tokenizer().save_pretrained(folders[0])
    tokenizer_of("qwen3").save_pretrained(folders[1])
    return folders


def outcome(files: Files, tmp_path: Path, tokenizer: Path, capfd: pytest.CaptureFixture[str]) -> dict | str:
    """Counts of a finished dataset whose books balance, or the one line that says why there is none."""
    paths = []
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        paths.append(str(tmp_path / name))
    out = tmp_path / "out"
    capfd.readouterr()
    flags = ["--output-dir", str(out), "--tokenizer", str(tokenizer), "--max-length", "4096"]
    code = cli.main(["prepare", "--input", *paths, *flags])
    said = capfd.readouterr().err
    assert "Traceback" not in said
    if code == 2:
        errors = [line for line in said.splitlines() if line and not line.startswith("prepare ")]
        assert len(errors) == 1, said
        assert errors[0].startswith("error: ")
        assert len(errors[0]) < 2000, "a line to read"
        assert not out.exists(), "nothing half-written"
        return errors[0]
    assert code == 0
    counts = json.loads((out / "manifest.json").read_text())["counts"]
    skipped = counts["skipped"]
    assert counts["records"] == counts["kept"] + sum(skipped.values())
    if all(name.endswith(".jsonl") for name in files):
        assert counts["records"] == sum(bool(line.strip()) for f in files.values() for line in f.split(b"\n"))
    assert set(counts["skipped_examples"]) == set(skipped)
    written = sum(len(open_dataset(out, split)) for split in ("train", "heldout"))
    assert written == counts["documents"] >= counts["kept"]
    return counts


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda k: f"{k} {KINDS[k].__name__}")
def test_a_damaged_input_is_counted_or_one_line_and_the_books_balance(kind, tmp_path, tokenizers, capfd):
    for seed in range(SEEDS):
        r = random.Random(f"{kind} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome(KINDS[kind](r), folder, tokenizers[KINDS[kind] is odd_tools], capfd)


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
PLAIN = {"messages": chat("What is it?", "It is.")}
NO_TEXT = arrow(pa.table({"messages": [chat("What is it?", "xyzzy")]}), stream=True).replace(
    b"xyzzy", b"xy\xffzy"
)


def test_what_is_left_out_is_counted_by_its_reason(tmp_path, tokenizers, capfd):
    broken = {"function": {"name": "f", "arguments": "{"}}
    call = {"role": "assistant", "content": None, "tool_calls": [broken]}
    records = [
        PLAIN,
        {**PLAIN, "id": 2},
        {"messages": [{"role": "user", "content": [IMAGE]}, *chat("q", "a")[1:]]},
        {**PLAIN, "images": ["x.png"]},
        {"messages": [*chat("q"), call]},
        {"messages": [*chat("q"), {**call, "tool_calls": [CALL]}]},
        {"messages": chat("q \ud800", "a")},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, *chat("q", "b")[1:]]},
        {"messages": []},
    ]
    counts = outcome({"a.jsonl": lines(records)}, tmp_path, tokenizers[0], capfd)
    assert isinstance(counts, dict)
    assert (counts["records"], counts["kept"]) == (9, 2)
    assert counts["skipped"] == {
        "multimodal": 2, "duplicate": 1, "tool call without a JSON object": 1, "no valid Unicode": 1,
        "tool call dropped by the template": 1, "no messages": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a.jsonl": lines([PLAIN]) + b'{"x": "\xff"}\n'}, "a.jsonl:2: not UTF-8 at byte 7"),
        ({"a.jsonl": lines([PLAIN]) + b"\0\n"}, "a.jsonl:2: "),
        ({"a.jsonl": lines([PLAIN]) + b"[" * 200_000 + b"\n"}, "a.jsonl:2: "),
        ({"a.jsonl": lines([PLAIN]) + b"1" * 5000 + b"\n"}, "a.jsonl:2: "),
        (
            {"a.jsonl": lines([with_content(random.Random(1), 5)])},
            ".content: a int; write the text as one string",
        ),
        ({"a.jsonl": lines([PLAIN]), "b.jsonl": b"{"}, "b.jsonl:1: broken JSON"),
        ({"a.jsonl.gz": gzip.compress(lines([PLAIN] * 99))[:-20]}, "a.jsonl.gz: broken gzip file"),
        ({"a.jsonl": b"", "b.jsonl": b"\n"}, "no records in it"),
        ({"a.parquet": parquet(pa.table({"messages": ["x"]}))}, "messages: expected a list of messages"),
        ({"a.parquet": b"PAR1"}, "a.parquet: not readable as parquet"),
        ({"a.arrow": NO_TEXT}, "a.arrow: not readable as arrow (In column 0"),
        ({"a.arrow": arrow(pa.table([["x"], ["y"]], names=["m", "m"]), True)}, "m: two columns of this name"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_broken_is_named(files, told, tmp_path, tokenizers, capfd):
    said = outcome(files, tmp_path, tokenizers[0], capfd)
    assert isinstance(said, str)
    assert told in said


@pytest.mark.parametrize("how", ["bom", "crlf", "no last newline", "blank lines"])
def test_files_of_other_editors_are_read_whole(how, tmp_path, tokenizers, capfd):
    data = lines(some(random.Random(how)), b"\r\n" if how == "crlf" else b"\n")
    before = {"bom": b"\xef\xbb\xbf", "blank lines": b"\n \n"}.get(how, b"")
    data = before + (data.rstrip() if how == "no last newline" else data)
    counts = outcome({"a.jsonl": data}, tmp_path, tokenizers[0], capfd)
    assert isinstance(counts, dict)
    assert (counts["records"], counts["kept"]) == (6, 6)


def test_a_message_of_ten_megabytes_is_one_truncated_document(tmp_path, tokenizers, capfd):
    records = [{"messages": chat("What is it?", " assistant" * 1_000_000)}, PLAIN]
    counts = outcome({"a.jsonl": lines(records)}, tmp_path, tokenizers[0], capfd)
    assert isinstance(counts, dict)
    assert (counts["records"], counts["kept"], counts["truncated_documents"]) == (2, 2, 1)
