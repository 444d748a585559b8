"""`slipstream regenerate`: every prompt ends once, as done, failed or skipped, whatever servers and kills
do.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream import cli
from slipstream.data import conversation, server
from slipstream.data.records import read_tokens
from tests.completions import STOP, Stub, ids_of, words_of
from tests.fixtures_data import chat, write_jsonl


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(server, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(server, "LONGEST_WAIT", 0.05)


def prompts(folder: Path, n: int) -> Path:
    return write_jsonl(folder / "prompts.jsonl", [{"prompt": f"question {i}"} for i in range(n)])


def flags(out: Path, source: Path, *urls: str) -> list[str]:
    places = ["--output-dir", str(out), "--input", str(source)]
    return ["regenerate", *places, *(["--server", *urls] if urls else []), "--max-new-tokens", "64"]


def answers(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]


def counts(out: Path) -> dict[str, Any]:
    found = json.loads((out / "regenerate.json").read_text())["counts"]
    ended = found["done"] + sum(found["failed"].values()) + sum(found["skipped"].values())
    assert ended + found["left"] == found["prompts"]
    return found


def asked_for(record: dict[str, Any]) -> str:
    """The user's words of a stub's single-turn answer of ids."""
    return bytes(i - 3 for i in record["prompt_ids"][1:-1]).decode()


# ---- what is written ----


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_ids_of_the_server_are_written_as_they_came(tmp_path, style):
    with Stub(gives_ids=style) as stub:
        assert cli.main(flags(tmp_path / "out", prompts(tmp_path, 3), stub.url)) == 0
    records = answers(tmp_path / "out")
    assert len({r["id"] for r in records}) == 3
    for record in records:
        question = asked_for(record)
        said = words_of([{"content": question}])
        assert record["prompt_ids"] == [1, *ids_of(question), STOP]
        assert record["response_ids"] == [*ids_of(said), STOP]
        assert record["finished"] is True
        assert "messages" not in record
    sent = stub.requests[0]
    assert sent["path"] == "/v1/chat/completions"
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("stub", 0.0, 64)


@pytest.mark.parametrize("style", ["no", "refused"])
def test_a_server_without_ids_gives_messages_that_prepare_reads(tmp_path, world, style):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    record = {"messages": chat("one", "old answer", "two", "old too"), "tools": tools}
    with Stub(gives_ids=style, said=lambda r: {"finish_reason": "stop"}) as stub:
        assert cli.main(flags(tmp_path / "out", write_jsonl(tmp_path / "in.jsonl", [record]), stub.url)) == 0
    (written,) = answers(tmp_path / "out")
    assert [m["content"] for m in written["messages"]] == ["one", "answer 1 to one", "two", "answer 3 to two"]
    assert written["tools"] == tools
    assert stub.requests[-1]["tools"] == tools
    out = tmp_path / "out" / "answers.jsonl"
    prepared = ["--input", str(out), "--output-dir", str(tmp_path / "data"), "--tokenizer", str(world.target)]
    assert cli.main(["prepare", *prepared, "--holdout", "0"]) == 0


def test_turns_that_continue_each_other_are_one_sequence(tmp_path):
    record = {"messages": chat("one", "dropped", "two", "dropped too", "three", system="be brief")}
    with Stub() as stub:
        assert cli.main(flags(tmp_path / "out", write_jsonl(tmp_path / "in.jsonl", [record]), stub.url)) == 0
    (written,) = answers(tmp_path / "out")
    supervised = [i for i, m in zip(written["input_ids"], written["loss_mask"], strict=True) if m]
    said = ["answer 2 to one", "answer 4 to two", "answer 6 to three"]
    assert supervised == [i for text in said for i in [*ids_of(text), STOP]]
    assert not any("dropped" in json.dumps(r) for r in stub.requests)


def test_turns_that_the_template_rewrites_are_a_line_each_of_one_conversation(tmp_path):
    def otherwise(request: dict[str, Any]) -> dict[str, Any]:
        return {"token_ids": [77, *ids_of(words_of(request["messages"])), STOP]}  # thinking, say: not kept

    record = {"turns": ["one", "two"]}
    with Stub(said=otherwise) as stub:
        assert cli.main(flags(tmp_path / "out", write_jsonl(tmp_path / "in.jsonl", [record]), stub.url)) == 0
    first, second = answers(tmp_path / "out")
    assert (first["part"], second["part"], second["parts"]) == (1, 2, 2)
    assert first["id"] == first["conversation"] == second["conversation"]
    documents = [read_tokens(r, "here") for r in (first, second)]
    assert documents[0].prompt_hash() == documents[1].prompt_hash()  # both are held out, or none
    alone = [read_tokens({**r, "conversation": None}, "here").prompt_hash() for r in (first, second)]
    assert alone[0] != alone[1]
    assert first["response_ids"][0] == second["response_ids"][0] == 77
    assert counts(tmp_path / "out")["done"] == 1


def test_a_truncated_answer_is_marked_and_ends_its_conversation(tmp_path):
    def cut(request: dict[str, Any]) -> dict[str, Any]:
        return {"finish_reason": "length" if len(request["messages"]) == 3 else "stop"}

    record = {"turns": ["one", "two", "three"]}
    with Stub(said=cut) as stub:
        assert cli.main(flags(tmp_path / "out", write_jsonl(tmp_path / "in.jsonl", [record]), stub.url)) == 0
    (written,) = answers(tmp_path / "out")
    assert written["finished"] is False
    assert len(stub.requests) == 2
    found = counts(tmp_path / "out")
    assert (found["done"], found["truncated"]) == (1, 1)


def test_thinking_turns_and_sampling_reach_the_server_and_seeds_differ_by_turn(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"turns": ["a", "b", "c"]}, {"turns": ["a", "b", "c"]}])
    more = ["--turns", "2", "--thinking", "False", "--temperature", "0.7", "--top-p", "0.9"]
    with Stub() as stub:
        assert cli.main([*flags(tmp_path / "out", source, stub.url), *more]) == 0
    assert len(stub.requests) == 4
    assert len({r["seed"] for r in stub.requests}) == 4
    assert {r["chat_template_kwargs"]["enable_thinking"] for r in stub.requests} == {False}
    assert {(r["temperature"], r["top_p"]) for r in stub.requests} == {(0.7, 0.9)}
    assert len({r["id"] for r in answers(tmp_path / "out")}) == 2  # equal prompts are told apart


def test_prompts_of_no_use_are_skipped_and_counted_by_reason(tmp_path):
    tool = {"role": "tool", "content": "42"}
    records = [
        {"messages": [{"role": "system", "content": "nobody asks"}]},
        {"prompt_ids": [1, 2], "response_ids": [3]},
        {"conversations": [{"from": "human", "value": "fine"}, {"from": "gpt", "value": ""}]},
        {"messages": [*chat("call it", "calling"), tool, *chat("and now?")]},
    ]
    with Stub() as stub:
        assert cli.main(flags(tmp_path / "out", write_jsonl(tmp_path / "in.jsonl", records), stub.url)) == 0
    found = counts(tmp_path / "out")
    assert found["skipped"] == {"no user turn": 1, "no text": 1}
    assert found["done"] == 2
    assert stub.asked == {"fine": 1, "call it": 1}  # nothing after a tool result


def test_a_broken_input_line_is_told_before_anything_is_asked(tmp_path, capsys):
    source = prompts(tmp_path, 3)
    source.write_text(source.read_text() + "{broken\n")
    with Stub() as stub:
        assert cli.main(flags(tmp_path / "out", source, stub.url)) == 2
    assert "prompts.jsonl:4: broken JSON" in capsys.readouterr().err
    assert stub.requests == []


def test_self_prompts_are_user_turns_of_the_model_and_then_answers(tmp_path, world):
    self_prompt = ["--self-prompt", "5", "--target-model", str(world.target), "--turns", "2"]

    def said(request: dict[str, Any]) -> dict[str, Any]:
        return {"finish_reason": "length"} if request.get("seed", 0) == unfinished else {}

    unfinished = -1
    for attempt in ("first", "with one unfinished"):
        out = tmp_path / attempt
        with Stub(said=said) as stub:
            assert cli.main(["regenerate", "--output-dir", str(out), "--server", stub.url, *self_prompt]) == 0
        turns = [r for r in stub.requests if r["path"] == "/v1/completions"]
        assert {r["temperature"] for r in turns} == {1.0}
        found = counts(out)
        if unfinished == -1:
            assert (len(turns), found["done"]) == (10, 5)
            assert {r["temperature"] for r in stub.requests if r not in turns} == {0.0}
            unfinished = turns[0]["seed"]
        else:
            assert found["done"] == 4
            assert found["skipped"] == {"user turn not finished": 1}
            with Stub(said=said) as again:
                assert (
                    cli.main(["regenerate", "--output-dir", str(out), "--server", again.url, *self_prompt])
                    == 0
                )
            assert again.requests == []
            assert counts(out)["skipped"] == {"user turn not finished": 1}


# ---- faults ----


def test_faults_that_pass_are_tried_again_and_no_prompt_is_lost_or_doubled(tmp_path):
    faults, tries = [429, 500, "cut", 503, 502, 408, 504], Counter[str]()

    def fault(n: int, request: dict[str, Any]) -> int | str | None:
        tries[words := request["messages"][-1]["content"]] += 1
        return faults[n % len(faults)] if tries[words] <= int(words.split()[1]) % 4 else None

    with Stub(fault) as stub:
        assert cli.main(flags(tmp_path / "out", prompts(tmp_path, 40), stub.url)) == 0
    assert counts(tmp_path / "out")["done"] == 40
    assert len(stub.requests) == 40 + 10 * (1 + 2 + 3)
    assert sorted(asked_for(r) for r in answers(tmp_path / "out")) == sorted(
        f"question {i}" for i in range(40)
    )


def test_what_fails_for_good_is_counted_by_reason_and_only_that_is_asked_again(tmp_path):
    def fault(_: int, request: dict[str, Any]) -> int | str | None:
        number = int(request["messages"][-1]["content"].split()[1])
        return {0: 400, 1: 500, 2: "stall"}.get(number % 10) if broken else None

    broken, source, out = True, prompts(tmp_path, 20), tmp_path / "out"
    more = ["--retries", "1", "--timeout", "0.5"]
    with Stub(fault) as stub:
        assert cli.main([*flags(out, source, stub.url), *more]) == 0
        found = counts(out)
        assert found["failed"] == {"HTTP 400": 2, "HTTP 500": 2, "deadline": 2}
        assert found["done"] == 14
        assert "told to say 400" in found["examples"]["HTTP 400"]
        noted = [json.loads(line) for line in (out / "left_out.log").read_text().splitlines()]
        assert sorted(n["reason"] for n in noted) == sorted([*["HTTP 400", "HTTP 500", "deadline"] * 2])
        broken = False
        stub.asked.clear()
        assert cli.main([*flags(out, source, stub.url), *more]) == 0
    assert stub.asked.total() == 6
    assert counts(out)["done"] == len(answers(out)) == 20


@pytest.mark.parametrize(
    ("said", "reason"),
    [({"finish_reason": "abort"}, "finish reason abort"), ({"message": None}, "not a completion")],
)
def test_an_answer_that_is_none_is_a_failure(tmp_path, said, reason):
    with Stub(said=lambda _: said) as stub:
        assert cli.main(flags(tmp_path / "out", prompts(tmp_path, 2), stub.url)) == 0
    assert counts(tmp_path / "out")["failed"] == {reason: 2}


def test_an_empty_answer_without_ids_is_skipped(tmp_path):
    with Stub(gives_ids="no", said=lambda _: {"message": {"role": "assistant", "content": None}}) as stub:
        assert cli.main(flags(tmp_path / "out", prompts(tmp_path, 1), stub.url)) == 0
    assert counts(tmp_path / "out")["skipped"] == {"empty answer": 1}


def test_thinking_that_a_server_takes_out_of_the_text_is_kept(tmp_path):
    said = {"message": {"role": "assistant", "content": "four", "reasoning": "two and two"}}
    with Stub(gives_ids="no", said=lambda _: said) as stub:
        assert cli.main(flags(tmp_path / "out", prompts(tmp_path, 1), stub.url)) == 0
    (record,) = answers(tmp_path / "out")
    assert record["messages"][-1] == {
        "role": "assistant",
        "content": "four",
        "reasoning_content": "two and two",
    }


def test_two_servers_share_the_work_and_one_does_it_all_when_the_other_dies(tmp_path):
    first, second = Stub(seconds=0.01), Stub(seconds=0.01)
    first.misbehave = lambda n, _: dying(n)

    def dying(n: int) -> str | None:
        if n == 20:  # from now on, connections are refused
            first.http.server_close()
        return "cut" if n >= 20 else None

    with first, second:
        more = ["--concurrency", "8"]
        assert cli.main([*flags(tmp_path / "out", prompts(tmp_path, 120), first.url, second.url), *more]) == 0
    assert counts(tmp_path / "out")["done"] == 120
    assert first.asked.total() == 20
    assert second.asked.total() == 100
    assert 2 <= first.most_in_flight < 8  # the rest was at the other one


def test_no_more_conversations_are_under_way_than_asked_for(tmp_path):
    with Stub(seconds=0.15) as stub:
        command = flags(tmp_path / "out", prompts(tmp_path, 16), stub.url)
        assert cli.main([*command, "--concurrency", "4"]) == 0
    assert stub.most_in_flight == 4


def test_when_no_server_is_left_the_run_ends_and_the_rest_is_left(tmp_path, capsys):
    source, out = prompts(tmp_path, 30), tmp_path / "out"
    stub = Stub(lambda n, _: "cut" if n >= 10 else None)
    with stub:
        assert cli.main([*flags(out, source, stub.url), "--retries", "2", "--concurrency", "4"]) == 2
    told = capsys.readouterr().err
    assert f"--server {stub.url}/v1: not reached in 3 tries; what was answered is kept" in told
    found = counts(out)
    assert found["done"] == len(answers(out)) == 10
    assert found["left"] >= 16
    with Stub() as stub:
        assert cli.main(flags(out, source, stub.url)) == 0
    assert counts(out)["done"] == len(answers(out)) == 30
    assert stub.asked.total() == 20


# ---- kills ----


@pytest.mark.slow
def test_killed_at_five_moments_and_resumed_every_prompt_is_there_once(tmp_path, forks):
    n, out, draws = 250, tmp_path / "out", random.Random(0)
    source = prompts(tmp_path, n)
    with Stub(seconds=0.02) as stub:
        command = [*flags(out, source, stub.url), "--concurrency", "8"]
        for kill in range(5):
            pid = forks.start(command, tmp_path / f"log{kill}")
            before = len(stub.requests)
            until = time.monotonic() + 30
            while len(stub.requests) == before and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(draws.uniform(0.0, 0.15))
            os.kill(pid, signal.SIGKILL)
            assert forks.wait(pid) == -signal.SIGKILL
            if kill % 2:  # what a machine that dies leaves behind
                with (out / "answers.jsonl").open("ab") as f:
                    f.write(b'{"id": "abc-0", "part": 1, "parts": 1, "finis')
        assert forks.run(command, tmp_path / "log") == 0, (tmp_path / "log").read_text()
        asked = stub.asked.total()
    records = answers(out)
    assert sorted(asked_for(r) for r in records) == sorted(f"question {i}" for i in range(n))
    assert counts(out)["done"] == n
    assert asked <= n + 5 * 8  # a kill costs what was on its way, no more


def test_half_a_conversation_at_the_end_is_dropped_and_done_again(tmp_path):
    def otherwise(request: dict[str, Any]) -> dict[str, Any]:
        return {"token_ids": [77, STOP]}

    source, out = (
        write_jsonl(tmp_path / "in.jsonl", [{"turns": ["a", "b"]}, {"turns": ["c", "d"]}]),
        tmp_path / "out",
    )
    with Stub(said=otherwise) as stub:
        assert cli.main([*flags(out, source, stub.url), "--concurrency", "1"]) == 0
        whole = (out / "answers.jsonl").read_bytes()
        lines = whole.splitlines(keepends=True)
        assert len(lines) == 4
        (out / "answers.jsonl").write_bytes(b"".join(lines[:3]))
        stub.asked.clear()
        assert cli.main([*flags(out, source, stub.url), "--concurrency", "1"]) == 0
    assert stub.asked == {"c": 1, "d": 1}
    assert (out / "answers.jsonl").read_bytes() == whole


def test_the_input_may_change_its_order_and_grow(tmp_path):
    source, out = prompts(tmp_path, 10), tmp_path / "out"
    with Stub() as stub:
        assert cli.main(flags(out, source, stub.url)) == 0
        lines = [{"prompt": f"question {i}"} for i in (11, 3, 9, 10, *range(3), *range(4, 9))]
        write_jsonl(source, lines)
        assert cli.main(flags(out, source, stub.url)) == 0
    assert set(stub.asked.values()) == {1}
    assert counts(out)["done"] == len(answers(out)) == 12


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--temperature", "0.5"], "--temperature 0.5: {out} holds answers made with 0.0; choose another"),
        (["--self-prompt", "3"], "give prompts with --input, or --self-prompt N"),
        (["--top-p", "0"], "--top-p 0.0: must be above 0 and at most 1"),
        (["--timeout", "0"], "--timeout 0.0: must be above 0"),
    ],
)
def test_settings_that_cannot_be_are_one_line(tmp_path, capsys, change, told):
    with Stub() as stub:
        command = flags(tmp_path / "out", prompts(tmp_path, 2), stub.url)
        assert cli.main(command) == 0
        capsys.readouterr()
        assert cli.main([*command, *change]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert told.format(out=tmp_path / "out") in err


def test_a_folder_of_other_files_and_one_in_use_are_refused(tmp_path, capsys):
    from slipstream.data.journal import Journal

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    source = prompts(tmp_path, 1)
    assert cli.main(flags(tmp_path / "other", source, "http://127.0.0.1:9")) == 2
    assert "holds other files" in capsys.readouterr().err
    settings = {
        "temperature": 0.0,
        "top_p": 1.0,
        "max_new_tokens": 64,
        "thinking": None,
        "turns": None,
        "seed": 0,
    }
    journal = Journal(tmp_path / "used", settings)
    assert cli.main(flags(tmp_path / "used", source, "http://127.0.0.1:9")) == 2
    assert "another process is writing into it" in capsys.readouterr().err
    journal.close({})


# ---- in this process ----


def test_without_a_server_the_device_answers_and_equals_decoding_alone(tmp_path, world, capsys):
    import torch

    from slipstream.data.tokenizer import load_tokenizer
    from slipstream.decoding.speculative import generate_plain
    from slipstream.models.target import load_target

    out, model = tmp_path / "out", str(world.target)
    here = ["--target-model", model, "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "24"]
    command = [*flags(out, world.chats), *here, "--limit", "12", "--batch-size", "5"]
    assert cli.main(command) == 0
    told = capsys.readouterr().err
    assert "12 prompts: 12 done" in told
    assert "tokens/s" in told
    target = load_target(model, None, 1, torch.device("cpu"), torch.float32, "stock")
    tokenizer, stops = load_tokenizer(model), {2}
    for record in answers(out):
        assert isinstance(tokenizer.eos_token_id, int)
        stops = {tokenizer.eos_token_id, 2}
        alone = generate_plain(target, record["prompt_ids"], 24, 0.0, stops)
        assert record["response_ids"] == alone.tokens
        assert record["finished"] is (alone.tokens[-1] in stops)
    before = (out / "answers.jsonl").read_bytes()
    assert cli.main(command) == 0
    assert (out / "answers.jsonl").read_bytes() == before
    assert cli.main([*command[:-4], "--limit", "14", "--batch-size", "2"]) == 0
    assert (out / "answers.jsonl").read_bytes().startswith(before)
    assert counts(out)["done"] == 14


def test_self_prompts_on_the_device_repeat_whatever_the_batch(tmp_path, world, monkeypatch):
    monkeypatch.setattr(conversation, "USER_TURN_TOKENS", 48)
    here = [
        "--target-model",
        str(world.target),
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--max-new-tokens",
        "8",
    ]
    made = []
    for rows in ("2", "7"):
        out = tmp_path / rows
        command = ["regenerate", "--output-dir", str(out), "--self-prompt", "9", *here, "--batch-size", rows]
        assert cli.main(command) == 0
        found = counts(out)
        assert found["left"] == 0
        made.append((found["skipped"], sorted((out / "answers.jsonl").read_text().splitlines())))
    assert made[0] == made[1]
