"""`--decontaminate` leaves out what holds a question of an evaluation file; `--show` writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from slipstream import cli
from slipstream.config import PrepareConfig, UserError
from slipstream.data.filters import Evaluations
from slipstream.data.records import ChatError
from slipstream.data.show import show
from tests.fixtures_data import byte_tokenizer, chat, write_jsonl

WORDS = [f"word{i}" for i in range(40)]
QUESTION = " ".join(WORDS[:20])


def evaluations(tmp_path: Path, *files: list, words: int = 13) -> Evaluations:
    paths = [str(write_jsonl(tmp_path / f"eval{k}.jsonl", rows)) for k, rows in enumerate(files)]
    return Evaluations(paths, words, byte_tokenizer())


def met(found: Evaluations, *texts: str) -> str | None:
    try:
        found.check(texts)
    except ChatError as e:
        return e.reason
    return None


@pytest.mark.parametrize("n", [3, 13])
def test_n_words_in_a_row_are_an_overlap_and_one_fewer_is_none(tmp_path, n):
    found = evaluations(tmp_path, [{"turns": [QUESTION]}], words=n)
    for start in (0, 4, 20 - n):
        same = " ".join(WORDS[start : start + n])
        assert met(found, f"Well, {same} and more") == "overlaps eval0.jsonl"
        assert met(found, " ".join(WORDS[start : start + n - 1])) is None
        assert met(found, " ".join(reversed(same.split()))) is None


def test_case_punctuation_and_layout_do_not_hide_a_question(tmp_path):
    found = evaluations(tmp_path, [{"prompt": QUESTION}])
    assert met(found, "fine", ",\n".join(WORDS[3:17]).upper()) == "overlaps eval0.jsonl"
    with pytest.raises(ChatError, match=r"13 words in a row: 'word3 word4 .* word15'"):
        found.check([",\n".join(WORDS[3:17]).upper()])


def test_a_question_of_few_words_is_met_by_the_same_message_only(tmp_path):
    found = evaluations(tmp_path, [{"turns": ["What is two and two?"]}])
    assert met(found, "what is TWO and two") == "overlaps eval0.jsonl"
    assert met(found, "what is two and two please") is None
    assert met(found, f"what is two and two {QUESTION}") is None


def test_what_many_questions_share_is_wrapping(tmp_path):
    wrap = " ".join(f"solve{i}" for i in range(15))
    rows = [{"turns": [f"{wrap} {' '.join(f'q{k}x{i}' for i in range(15))}"]} for k in range(12)]
    found = evaluations(tmp_path, rows)
    assert met(found, wrap) is None
    assert met(found, rows[5]["turns"][0]) == "overlaps eval0.jsonl"
    assert met(evaluations(tmp_path, rows[:5]), wrap) == "overlaps eval0.jsonl"


def test_the_reason_names_the_file_that_holds_the_question(tmp_path):
    other = " ".join(WORDS[20:])
    ids = byte_tokenizer()(QUESTION)["input_ids"]
    kinds = [[{"messages": chat(other, "answer")}], [{"prompt_ids": ids}], [{"turns": ["x", "second turn"]}]]
    found = evaluations(tmp_path, *kinds)
    assert met(found, other) == "overlaps eval0.jsonl"
    assert met(found, QUESTION) == "overlaps eval1.jsonl"
    assert met(found, "Second turn!") == "overlaps eval2.jsonl"
    assert met(found, "answer") is None, "only what is asked"


def test_characters_are_words_where_no_blanks_are_written(tmp_path):
    found = evaluations(tmp_path, [{"prompt": "小明有五个苹果他吃了两个还剩几个苹果呢"}])
    assert met(found, "问题：小明有五个苹果，他吃了两个，还剩几个？") == "overlaps eval0.jsonl"
    assert met(found, "小明有五个苹果，小红有三个") is None


@pytest.mark.parametrize("row", [{"text": "x"}, {"turns": [5]}, {"prompt": None}])
def test_an_evaluation_file_of_another_shape_or_without_questions_is_told(tmp_path, row):
    with pytest.raises(UserError, match=r"eval0.jsonl:1: turns: missing"):
        evaluations(tmp_path, [row])
    with pytest.raises(UserError, match=r"eval0.jsonl: no questions in it"):
        evaluations(tmp_path, [{"prompt": "?!"}])


@pytest.fixture
def given(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    ids = byte_tokenizer()(f"Say: {QUESTION}")["input_ids"]
    records = [
        {"messages": chat("What is it?", "It is.")},
        {"messages": chat(f"Please: {QUESTION}", "It is.")},
        {"messages": chat("What else?", f"You asked: {QUESTION}")},
        {"prompt_ids": ids, "response_ids": [7, 8]},
        {"messages": chat("only a question")},
        {"messages": chat("And then?", "é [b]no[/b] 🙂.")},
    ]
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    return ["--input", str(path), "--tokenizer", str(tmp_path / "tokenizer")]


def test_prepare_counts_overlaps_by_file_with_an_example(given, tmp_path):
    eval_file = write_jsonl(tmp_path / "gsm.jsonl", [{"turns": [QUESTION]}])
    flags = ["--output-dir", str(tmp_path / "out"), "--decontaminate", str(eval_file)]
    assert cli.main(["prepare", *given, *flags]) == 0
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]
    assert (counts["records"], counts["kept"]) == (6, 2)
    assert counts["skipped"] == {"overlaps gsm.jsonl": 3, "no assistant turn": 1}
    assert (
        "chats.jsonl:2: overlaps gsm.jsonl: 13 words in a row: 'word0"
        in counts["skipped_examples"]["overlaps gsm.jsonl"]
    )
    flags = ["--output-dir", str(tmp_path / "more"), "--decontaminate", str(eval_file)]
    assert cli.main(["prepare", *given, *flags, "--decontaminate-words", "21"]) == 0
    counts = json.loads((tmp_path / "more" / "manifest.json").read_text())["counts"]
    assert counts["skipped"] == {"no assistant turn": 1}, "a question of fewer words is met as a whole only"


def test_show_prints_what_is_supervised_and_what_is_left_out_and_writes_nothing(given, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["prepare", *given, "--show", "9"]) == 0
    said = capsys.readouterr().out
    assert "<|im_start|>assistant\n⟦It is.<|im_end|>⟧" in said
    assert "⟦é [b]no[/b] 🙂.<|im_end|>⟧" in said
    assert "chats.jsonl:6: " in said
    assert "left out: 1 no assistant turn (the first: " in said
    assert "show: 5 of 5 kept among the first 6 records" in said
    assert sorted(tmp_path.rglob("*")) == before
    assert cli.main(["prepare", *given, "--show", "1", "--output-dir", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.count("⟦") == 1
    assert "nothing was written" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_show_colours_on_a_terminal_and_tells_when_there_is_nothing_to_show(given, tmp_path, capsys):
    config = PrepareConfig(input=(given[1],), tokenizer=given[3], show=1)
    console = Console(force_terminal=True, color_system="standard", highlight=False)
    show(config, console)
    said = capsys.readouterr().out
    assert "\x1b[1;32mIt is.<|im_end|>" in said
    assert "⟦" not in said
    write_jsonl(Path(given[1]), [{"messages": []}])
    with pytest.raises(UserError, match="none of 1 records is of use"):
        show(config, console)
    assert "1 no messages" in capsys.readouterr().out
    assert cli.main(["prepare", *given]) == 2
    assert "--output-dir is missing" in capsys.readouterr().err
