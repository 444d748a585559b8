"""`slipstream data stats`: its figures against what packing, blocks and documents say one by one."""

from __future__ import annotations

import io
import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import cli
from slipstream.config import DataConfig
from slipstream.data import stats as module
from slipstream.data.pack import make_row, pack_rows
from slipstream.data.records import Document
from slipstream.data.stats import ANCHORS, BLOCK, BUDGETS, chances, find_runs, labelled, split_stats, stats
from slipstream.training.blocks import anchor_candidates, draw_anchors, make_blocks
from tests.fixtures_data import memory_dataset, write_jsonl

MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=5)


def dataset_of(masks: list[list[bool]]):
    return memory_dataset([Document(np.arange(len(m)) % 7 + 1, np.array(m)) for m in masks])


def chat_documents(count: int, seed: int = 0) -> list[Document]:
    """Prompts of which every fourth is said again, answers of their own."""
    source = np.random.default_rng(seed)
    out = []
    for i in range(count):
        prompt = np.arange(5 + i % 4 * 2) + 10 + 100 * (i // 2 if i % 4 == 1 else i)
        answer = source.integers(1, 90, int(source.integers(2, 400)))
        ids = np.concatenate((prompt, answer))
        out.append(Document(ids, np.arange(len(ids)) >= len(prompt)))
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MASKS)
def test_runs_are_the_supervised_stretches_of_each_document(masks):
    runs = find_runs(dataset_of(masks))
    expected = []
    for document, mask in enumerate(masks):
        edges = np.flatnonzero(np.diff([0, *mask, 0]))
        expected += [(document, int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    assert (
        list(zip(*(a.tolist() for a in (runs.document_K, runs.start_K, runs.end_K)), strict=True)) == expected
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(MASKS, st.integers(1, 2))
def test_coverage_is_the_mean_over_all_draws_of_anchors(masks, anchors):
    data = dataset_of(masks[:2])
    row = make_row(data, pack_rows(data.lengths, 80, "reject"), 0)
    candidates = anchor_candidates(row)
    draws = list(itertools.combinations(range(len(candidates)), min(anchors, len(candidates))))
    found = [make_blocks(row, candidates[list(d)], anchors, BLOCK, 0).labelled for d in draws]
    runs = find_runs(data)
    before_RB, possible_R = chances(np.zeros(len(runs.end_K), int), runs.end_K - runs.start_K, 1)
    assert possible_R.tolist() == [len(candidates)]
    assert labelled(before_RB, possible_R, anchors) == pytest.approx(np.mean(found))


def test_rows_and_coverage_are_those_that_training_draws_in_truncated_rows():
    documents = [d for seed in range(3) for d in chat_documents(60, seed)]
    documents.append(Document(np.arange(3000) % 90 + 1, np.arange(3000) % 50 > 9))
    data = memory_dataset(documents)
    found = split_stats(data)
    for budget, n in ((1024, 64), (1024, 1024), (2048, 128)):
        packed = next(p for p in found.packed if p.token_budget == budget)
        packing = pack_rows(data.lengths, budget, "truncate")
        rows = [make_row(data, packing, r) for r in range(len(packing))]
        assert (packed.rows, packed.utilisation) == (len(packing), packing.utilisation)
        assert (packed.documents_cut, packed.tokens_cut) == (1, 3000 - budget)
        assert packed.anchors_possible == pytest.approx(np.mean([len(anchor_candidates(r)) for r in rows]))
        drawn = [
            make_blocks(row, draw_anchors(row, n, (0, epoch, 0)), n, BLOCK, 0).labelled
            for row in rows
            for epoch in range(8)
        ]
        supervised = sum(int(r.supervised.sum()) for r in rows)
        assert packed.coverage[n] == pytest.approx(sum(drawn) / 8 / supervised, abs=0.005)


def test_sizes_lengths_and_distinct_prompts_are_those_of_the_documents():
    unprompted = [Document(np.arange(9) + i, np.ones(9, bool)) for i in (1, 2)]
    documents = [*chat_documents(79), *unprompted]
    found = split_stats(memory_dataset(documents))
    lengths = [len(d.ids) for d in documents]
    assert (found.documents, found.tokens) == (81, sum(lengths))
    assert found.supervised_tokens == sum(int(d.supervised.sum()) for d in documents)
    assert found.distinct_prompts == len({d.prompt_hash() for d in documents})
    assert sum(found.histogram.values()) == 81
    for size, n in found.histogram.items():
        assert n == sum(size <= length < 2 * size for length in lengths)
    assert (found.lengths["min"], found.lengths["max"]) == (min(lengths), max(lengths))
    assert [p.token_budget for p in found.packed] == list(BUDGETS)


@pytest.fixture
def ready_ids(tmp_path):
    """An unprepared folder of completions."""
    folder = tmp_path / "ids"
    folder.mkdir()
    rows = [
        {"input_ids": d.ids.tolist(), "loss_mask": d.supervised.astype(int).tolist()}
        for d in chat_documents(90)
    ]
    write_jsonl(folder / "a.jsonl", rows)
    return folder


def test_an_unprepared_folder_is_told_by_split_as_text_and_as_json(ready_ids, capsys):
    assert cli.main(["data", "stats", str(ready_ids)]) == 0
    text = capsys.readouterr().out
    assert cli.main(["data", "stats", str(ready_ids), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["train", "heldout"]
    assert sum(s["documents"] for s in found.values()) == 90
    for split, facts in found.items():
        assert f"{split}: {facts['documents']} documents, {facts['tokens']:,} tokens" in text
        assert [p["token_budget"] for p in facts["packed"]] == list(BUDGETS)
        assert list(facts["packed"][0]["coverage"]) == [str(n) for n in ANCHORS]
    assert "█" in text


def test_the_plot_is_a_picture_and_without_matplotlib_one_line_says_what_to_install(
    ready_ids, tmp_path, monkeypatch, capsys
):
    from PIL import Image

    path = tmp_path / "plot.png"
    stats(DataConfig(data_dir=str(ready_ids), png=str(path)))
    picture = np.asarray(Image.open(io.BytesIO(path.read_bytes())))
    assert picture.shape[0] > 300
    assert (picture[..., :3] < 250).any(axis=2).mean() > 0.01, "something is drawn"
    path.unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["data", "stats", str(ready_ids), "--png", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "pip install 'slipstream[report]'" in told
    assert not path.exists()


def test_a_folder_that_is_none_is_one_line(tmp_path, capsys):
    assert cli.main(["data", "stats", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert cli.main(["data", "stats"]) == 2
    assert "--data-dir is missing" in capsys.readouterr().err


def test_masks_are_read_a_shard_at_a_time_and_never_token_by_token(monkeypatch):
    """The work in Python is by document and shard: its lines do not grow with the tokens."""
    counts = []
    for size in (50, 500):
        data = memory_dataset([Document(np.arange(size) + 1, np.arange(size) > 9) for _ in range(200)])
        count = 0

        def trace(frame, event, _argument):
            nonlocal count
            if frame.f_code.co_filename != module.__file__:
                return None
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            split_stats(data)
        finally:
            sys.settrace(before)
        counts.append(count)
    assert abs(counts[1] - counts[0]) < 20
