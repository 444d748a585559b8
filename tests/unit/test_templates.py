"""The masks of the templates people serve: supervised is exactly what the model generates after its prompt.

The templates under tests/templates behave as those of the models they are named after, in words of our own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from slipstream.data.chat import ChatTemplate
from slipstream.data.records import ChatError, read_messages, read_tools
from tests.fixtures_data import _byte_level, chat, supervised_texts

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEADERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|endoftext|>")

# special tokens; added tokens that are none; tokenizer's eos; what generation_config stops at
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, tuple[str, ...]]] = {
    "qwen3": (QWEN, ("<think>", "</think>", "<tool_call>", "</tool_call>"), "<|im_end|>", QWEN[::2]),
    "qwen3_5": (QWEN, ("<think>", "</think>", "<tool_call>", "</tool_call>"), "<|im_end|>", QWEN[::2]),
    "llama3_1": (
        (*HEADERS, "<|eot_id|>", "<|eom_id|>"), (), "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "gemma3": (
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), (), "<eos>", ("<eos>", "<end_of_turn>"),
    ),
    "smollm2": (QWEN, (), "<|im_end|>", ("<|im_end|>",)),
    "gpt_oss": (HARMONY, (), "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>")),
}  # fmt: skip
BEGIN = {"llama3_1": "<|begin_of_text|>", "gemma3": "<bos>"}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    specials, plain, eos, _ = FAMILIES[family]
    inner = Tokenizer.from_str(_byte_level(specials, False))
    inner.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, bos_token=BEGIN.get(family))
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer


def template_of(family: str, thinking: bool | None = None, stops: bool = True) -> ChatTemplate:
    tokenizer = tokenizer_of(family)
    ids = [tokenizer.convert_tokens_to_ids(t) for t in FAMILIES[family][3]] if stops else []
    return ChatTemplate(tokenizer, thinking, ids)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            },
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}


def says(content: str | None = None, thought: str | None = None, call: bool = False) -> dict[str, Any]:
    more = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": content, **more, **({"tool_calls": [CALL]} if call else {})}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


RESULT = {"role": "tool", "content": "4"}
SYSTEM = {"role": "system", "content": "Answer in a word."}
QUESTION = user("What is two and two?")
AGAIN = user("And now?")


@dataclass
class Case:
    family: str
    name: str
    messages: list[dict[str, Any]]
    generated: list[str]  # by assistant turn, as the model writes it, its end-of-turn token included
    thinking: bool | None = None
    tools: list | None = None
    by_turn: bool = False  # earlier turns are rewritten: a document each
    follows: list[bool] = field(
        default_factory=list
    )  # whether the whole text begins with the prompt (default: all)
    empty: int = 0


THOUGHT = "<think>\nhm\n</think>\n\n"
EMPTY = "<think>\n\n</think>\n\n"
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
TAG_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>"
)
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HARMONY_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 2}<|call|>'
TWO = [QUESTION, says("Four."), AGAIN, says("Yes, no.")]
TWO_THOUGHT = [QUESTION, says("Four.", "hm"), AGAIN, says("Yes, no.", "hm")]
LOOP = [QUESTION, says(None, "hm", call=True), RESULT, says("Four.", "hm")]

CASES = [
    Case("qwen3", "thinking", [SYSTEM, QUESTION, says("Four.", "hm")], [THOUGHT + "Four.<|im_end|>"], True),
    Case("qwen3", "thinking in the content", [QUESTION, says(THOUGHT + "Four.")],
         [THOUGHT + "Four.<|im_end|>"]),
    Case("qwen3", "thinking off", [QUESTION, says("Four.")], ["Four.<|im_end|>"], False),
    Case("qwen3", "no thinking, left on", [QUESTION, says("Four.")], [EMPTY + "Four.<|im_end|>"], True,
         empty=1),
    Case("qwen3", "turns without thinking", [SYSTEM, *TWO], ["Four.<|im_end|>", "Yes, no.<|im_end|>"], False,
         by_turn=True),
    Case("qwen3", "turns with thinking", TWO_THOUGHT,
         [THOUGHT + "Four.<|im_end|>", THOUGHT + "Yes, no.<|im_end|>"], True, by_turn=True),
    Case("qwen3", "a call with thinking and its answer", LOOP,
         [THOUGHT + JSON_CALL, THOUGHT + "Four.<|im_end|>"], True, TOOLS),
    Case("qwen3", "words before a call", [QUESTION, says("Let me.", "hm", call=True)],
         [THOUGHT + "Let me.\n" + JSON_CALL], None, TOOLS),
    Case("qwen3", "calls without thinking", [QUESTION, says(call=True), RESULT, says("Four.")],
         [JSON_CALL, "Four.<|im_end|>"], False, TOOLS, by_turn=True),
    Case("qwen3_5", "thinking", [SYSTEM, QUESTION, says("Four.", "hm")], ["hm\n</think>\n\nFour.<|im_end|>"]),
    Case("qwen3_5", "thinking off", [SYSTEM, QUESTION, says("Four.")], ["Four.<|im_end|>"], False),
    Case("qwen3_5", "no thinking, left on", [QUESTION, says("Four.")], ["\n</think>\n\nFour.<|im_end|>"],
         empty=1),
    Case("qwen3_5", "turns with thinking", TWO_THOUGHT,
         ["hm\n</think>\n\nFour.<|im_end|>", "hm\n</think>\n\nYes, no.<|im_end|>"], True, by_turn=True),
    Case("qwen3_5", "turns without thinking", TWO, ["Four.<|im_end|>", "Yes, no.<|im_end|>"], False,
         by_turn=True),
    Case("qwen3_5", "a call with thinking and its answer", LOOP,
         ["hm\n</think>\n\n" + TAG_CALL, "hm\n</think>\n\nFour.<|im_end|>"], True, TOOLS),
    Case("qwen3_5", "a call and its answer, thinking off", [QUESTION, says(call=True), RESULT, says("Four.")],
         [TAG_CALL, "Four.<|im_end|>"], False, TOOLS),
    Case("llama3_1", "turns", TWO, ["Four.<|eot_id|>", "Yes, no.<|eot_id|>"]),
    Case("llama3_1", "system", [SYSTEM, *TWO], ["Four.<|eot_id|>", "Yes, no.<|eot_id|>"]),
    Case("llama3_1", "a call and its answer", [QUESTION, says(call=True), RESULT, says("Four.")],
         ['{"name": "add", "parameters": {"a": 2, "b": 2}}<|eot_id|>', "Four.<|eot_id|>"], None, TOOLS),
    Case("gemma3", "turns", TWO, ["Four.<end_of_turn>", "Yes, no.<end_of_turn>"]),
    Case("gemma3", "system", [SYSTEM, *TWO], ["Four.<end_of_turn>", "Yes, no.<end_of_turn>"]),
    Case("smollm2", "turns after its own system text", TWO, ["Four.<|im_end|>", "Yes, no.<|im_end|>"]),
    Case("smollm2", "system", [SYSTEM, *TWO], ["Four.<|im_end|>", "Yes, no.<|im_end|>"]),
    Case("gpt_oss", "analysis", [SYSTEM, QUESTION, says("Four.", "hm")],
         [ANALYSIS + FINAL + "Four.<|return|>"]),
    Case("gpt_oss", "no analysis", [QUESTION, says("Four.")], [FINAL + "Four.<|return|>"]),
    Case("gpt_oss", "turns with analysis", TWO_THOUGHT,
         [ANALYSIS + FINAL + "Four.<|return|>", ANALYSIS + FINAL + "Yes, no.<|return|>"], by_turn=True),
    Case("gpt_oss", "turns without analysis", TWO, [FINAL + "Four.<|return|>", FINAL + "Yes, no.<|return|>"],
         by_turn=True),
    Case("gpt_oss", "a call with analysis and its answer", [SYSTEM, *LOOP],
         [ANALYSIS + HARMONY_CALL, ANALYSIS + FINAL + "Four.<|return|>"], None, TOOLS, follows=[True, False]),
    Case("gpt_oss", "a call without analysis", [QUESTION, says(call=True), RESULT, says("Four.")],
         [HARMONY_CALL, FINAL + "Four.<|return|>"], None, TOOLS),
    Case("gpt_oss", "calls in a second exchange", [*LOOP, AGAIN, *LOOP[1:]],
         [ANALYSIS + HARMONY_CALL, ANALYSIS + FINAL + "Four.<|return|>"] * 2, None, TOOLS, by_turn=True,
         follows=[True, False, True, False]),
]  # fmt: skip


def served(case: Case, tokenizer: PreTrainedTokenizerFast, before: list, generation: bool) -> str:
    """The text a server makes of these messages, asked of transformers itself."""
    switches = {} if case.thinking is None else {"enable_thinking": case.thinking}
    text = tokenizer.apply_chat_template(
        before, case.tools, tokenize=False, add_generation_prompt=generation, **switches
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.family}, {c.name}")
@pytest.mark.parametrize("stops", [True, False], ids=["", "stop tokens unknown"])
def test_supervised_is_exactly_what_the_model_generates_after_the_prompt_it_is_served(case, stops):
    template = template_of(case.family, case.thinking, stops)
    tokenizer = template.tokenizer
    messages = read_messages({"messages": case.messages}, "f:1")
    rendered = template.render(messages, tools=case.tools)
    assert rendered.by_turn == case.by_turn
    assert rendered.empty_thinking == case.empty
    assert not rendered.tools_ignored
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    assert len(rendered.documents) == (len(turns) if case.by_turn else 1)
    marks = []  # (first, last + 1) of every answer in its document
    for k, (i, generated) in enumerate(zip(turns, case.generated, strict=True)):
        prompt = tokenizer(served(case, tokenizer, messages[:i], True), add_special_tokens=False)["input_ids"]
        answer = tokenizer(generated, add_special_tokens=False)["input_ids"]
        document = rendered.documents[k if case.by_turn else 0]
        assert template.prompt_ids(messages[:i], case.tools) == prompt
        assert document.ids[: len(prompt) + len(answer)].tolist() == prompt + answer
        marks.append((len(prompt), len(prompt) + len(answer)))
        whole = served(case, tokenizer, messages[: i + 1], False)
        if case.follows[k] if case.follows else True:
            text = str(tokenizer.decode(prompt + answer))
            assert whole.startswith(text)
            assert whole.removeprefix(text) in ("", "\n"), "a newline at most follows the end of turn"
            if not generated.startswith("\n"):  # else prompt and answer share a token that is never served
                again = tokenizer(whole, add_special_tokens=False)["input_ids"]
                assert again[: marks[-1][1]] == prompt + answer
        else:
            assert not whole.startswith(tokenizer.decode(prompt)), "the template rewrites what came before"
    for k, document in enumerate(rendered.documents):
        mask = np.zeros(len(document.ids), bool)
        for a, b in marks[k : k + 1] if case.by_turn else marks:
            mask[a:b] = True
        np.testing.assert_array_equal(document.supervised, mask)
        assert len(mask) == marks[k if case.by_turn else -1][1], "nothing follows the last answer"


@pytest.mark.parametrize(
    ("family", "thinking", "messages", "reason", "told"),
    [
        (
            "qwen3",
            False,
            [QUESTION, says("Four.", "hm")],
            "answer does not follow the generation prompt",
            "hm",
        ),
        (
            "qwen3_5",
            False,
            [QUESTION, says("Four.", "hm")],
            "answer does not follow the generation prompt",
            "hm",
        ),
        ("gemma3", None, [QUESTION, says("Four.", "hm")], "content changed by the template", "hm"),
        ("smollm2", None, [QUESTION, says("Four.", "hm")], "content changed by the template", "hm"),
        (
            "llama3_1",
            None,
            [QUESTION, says("Let me.", call=True)],
            "content changed by the template",
            "Let me.",
        ),
        ("smollm2", None, [QUESTION, says(call=True)], "tool call dropped by the template", "add"),
        ("gemma3", None, [QUESTION, says(call=True)], "tool call dropped by the template", "add"),
        ("gemma3", None, [QUESTION, AGAIN, says("Four.")], "refused by the template", "alternate"),
        ("gpt_oss", None, [QUESTION, says("Let me.", "hm", call=True)], "refused by the template", "both"),
        ("qwen3_5", None, [QUESTION, SYSTEM, says("Four.")], "refused by the template", "comes first"),
    ],
)
def test_what_a_template_cannot_write_is_refused_with_the_reason(family, thinking, messages, reason, told):
    with pytest.raises(ChatError, match=told) as e:
        template_of(family, thinking).render(read_messages({"messages": messages}, "f:1"))
    assert e.value.reason == reason


def test_an_answer_is_not_sought_in_an_earlier_turn_that_looks_the_same():
    """Same question twice: where the last generation prompt does not fit, no other is taken for it."""
    messages = [QUESTION, says("Four."), QUESTION, says("Four.", "hm")]
    with pytest.raises(ChatError, match="generation prompt"):
        template_of("qwen3", False).render(read_messages({"messages": messages}, "f:1"))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_cut_at_a_length_limit_ends_where_the_model_was_stopped(family):
    template = template_of(family, False)
    (document,) = template.render(chat("What is two and two?", "Four"), finished=False).documents
    (said,) = supervised_texts(template.tokenizer, document)
    assert said == ("<|channel|>final<|message|>Four" if family == "gpt_oss" else "Four")
    assert document.supervised[-1]


@pytest.mark.parametrize(("family", "ignored"), [("qwen3", False), ("gemma3", True), ("smollm2", True)])
def test_tools_that_a_template_does_not_write_are_told(family, ignored):
    messages = read_messages({"messages": [QUESTION, says("Four.")]}, "f:1")
    assert template_of(family, False).render(messages, tools=TOOLS).tools_ignored == ignored
    assert not template_of(family, False).render(messages).tools_ignored


def test_many_conversations_tokenised_at_once_are_what_they_are_alone():
    for family in FAMILIES:
        template = template_of(family, False)
        conversations = [chat(f"What is {i}?", "Four. " * i, "And?", "No.") for i in range(1, 5)]
        alone = [template.render(c).documents for c in conversations]
        together = template.tokenise([template.script(c) for c in conversations])
        for a, b in zip(alone, together, strict=True):
            assert not isinstance(b, ChatError)
            for d, e in zip(a, b.documents, strict=True):
                assert (d.ids.tolist(), d.supervised.tolist()) == (e.ids.tolist(), e.supervised.tolist())


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    ("family", "opens"), [("qwen3", "<think>\nhm"), ("gpt_oss", "<|channel|>analysis<|message|>hm")]
)
def test_thinking_is_found_under_every_name_that_servers_give_it(family, opens, name):
    messages = [QUESTION, {"role": "assistant", "content": "Four.", name: "hm"}]
    template = template_of(family)
    read = read_messages({"messages": messages}, "f:1")
    assert {read[1][n] for n in ("reasoning_content", "reasoning", "thinking")} == {"hm"}
    (document,) = template.render(read).documents
    assert supervised_texts(template.tokenizer, document)[0].startswith(opens)


class TestRecords:
    def test_arguments_and_tools_given_as_json_text_become_what_they_say(self):
        first, second = read_messages({"messages": [QUESTION, says(call=True)]}, "f:1")
        assert second["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}
        assert CALL["function"]["arguments"] == '{"a": 2, "b": 2}', "the record itself is left alone"
        assert read_tools({"tools": json.dumps(TOOLS)}, "f:1") == TOOLS
        assert first == QUESTION

    @pytest.mark.parametrize("arguments", ["{", "[1]", "x", "[" * 100_000])
    def test_arguments_that_are_no_object_are_a_reason(self, arguments):
        call = {"function": {"name": "add", "arguments": arguments}}
        with pytest.raises(ChatError, match="tool call without a JSON object"):
            read_messages({"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}]}, "f:1")

    def test_fields_that_parquet_fills_with_null_are_as_if_absent(self):
        messages = [
            {**m, "tool_calls": None, "name": None, "thinking": None} for m in (QUESTION, says("Four."))
        ]
        assert read_messages({"messages": messages}, "f:1") == [QUESTION, says("Four.")]

    def test_text_parts_are_joined_and_other_parts_are_a_reason(self):
        parts = [{"type": "text", "text": "What is"}, {"text": "two and two?", "image": None}]
        assert read_messages({"messages": [user(parts)]}, "f:1") == [user("What is\ntwo and two?")]
        for kind in ("image", "image_url", "input_audio", "video"):
            with pytest.raises(ChatError, match=f"multimodal: .*{kind}"):
                read_messages({"messages": [user([*parts, {"type": kind, kind: "x"}])]}, "f:1")

    def test_media_beside_the_messages_are_a_reason(self):
        with pytest.raises(ChatError, match="multimodal: the record holds images"):
            read_messages({"messages": [QUESTION], "images": ["x.png"]}, "f:1")
        assert read_messages({"messages": [QUESTION], "images": [], "audio": None}, "f:1") == [QUESTION]

    def test_half_a_surrogate_pair_is_a_reason(self):
        with pytest.raises(ChatError, match="no valid Unicode"):
            template_of("smollm2").render(chat("What \ud800?", "Four."))
