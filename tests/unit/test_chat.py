"""Conversations become the tokens a server sees, and exactly what the model generates is supervised."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.config import UserError
from slipstream.data.chat import ChatTemplate
from slipstream.data.records import ChatError, read_messages, read_tokens, read_tools
from tests.fixtures_data import (
    CHATML,
    INST,
    LLAMA3,
    THINKING,
    blank_prefix_tokenizer,
    byte_tokenizer,
    chat,
    marked,
    supervised_texts,
)

TWO_TURNS = chat("What is two and two?", "Four.", "Hello?", "Yes, no.", system="Answer.")


def documents_of(tokenizer, messages, thinking=None):
    return ChatTemplate(tokenizer, thinking).render(messages).documents


def only(documents):
    assert len(documents) == 1
    return documents[0]


def test_supervised_is_every_answer_with_its_end_of_turn_and_not_the_newline_after_it():
    tokenizer = byte_tokenizer(CHATML)
    document = only(documents_of(tokenizer, TWO_TURNS))
    assert supervised_texts(tokenizer, document) == ["Four.<|im_end|>", "Yes, no.<|im_end|>"]
    served = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert tokenizer.decode(document.ids) == served.removesuffix("\n")
    assert document.ids.tolist() == tokenizer(served, add_special_tokens=False)["input_ids"][:-1]


@pytest.mark.parametrize("opening", ["OPEN0", "OPEN1"])
@pytest.mark.parametrize("closing", ["CLOSE0", "CLOSE1", "CLOSE2"])
def test_generation_marks_give_the_same_mask_wherever_the_author_puts_them(opening, closing):
    tokenizer = byte_tokenizer(marked(opening, closing))
    messages = [*TWO_TURNS, *chat("And?", "An answer longer than any header. " * 3)]
    plain = only(documents_of(byte_tokenizer(CHATML), messages))
    document = only(documents_of(tokenizer, messages))
    np.testing.assert_array_equal(document.ids, plain.ids)
    np.testing.assert_array_equal(document.supervised, plain.supervised)


def test_generation_marks_can_leave_a_part_of_the_answer_out():
    template = CHATML.replace(
        "m.content + '<|im_end|>\\n' -}}",
        "('(aside) ' if m.role == 'assistant' else '') -}}"
        "{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content -}}{%- endgeneration -%}"
        "{%- else -%}{{- m.content -}}{%- endif -%}{{- '<|im_end|>\\n' -}}",
    )
    tokenizer = byte_tokenizer(template)
    document = only(documents_of(tokenizer, chat("Hello?", "Yes.")))
    assert "(aside) Yes.<|im_end|>" in tokenizer.decode(document.ids)
    assert supervised_texts(tokenizer, document) == ["Yes.<|im_end|>"]


def test_blanks_between_prompt_marks_and_end_of_turn_are_generated_too():
    template = marked("OPEN1", "CLOSE0").replace("'<|im_end|>'", "'\\n<|im_end|>'")
    template = template.replace("{%- generation -%}", "{{- ' ' -}}{%- generation -%}")
    tokenizer = byte_tokenizer(template)
    document = only(documents_of(tokenizer, chat("Hello?", "Yes.")))
    assert supervised_texts(tokenizer, document) == [" Yes.\n<|im_end|>"]


def test_generation_marks_that_leave_a_turn_out_are_refused():
    template = marked("OPEN1", "CLOSE1").replace(
        "m.role == 'assistant'", "m.role == 'assistant' and loop.index0 > 2"
    )
    with pytest.raises(ChatError, match="no generation mark"):
        documents_of(byte_tokenizer(template), chat("a", "b", "c", "d"))


def test_llama_style_headers_and_end_of_turn():
    tokenizer = byte_tokenizer(LLAMA3)
    document = only(documents_of(tokenizer, TWO_TURNS))
    assert supervised_texts(tokenizer, document) == ["Four.<|eot_id|>", "Yes, no.<|eot_id|>"]
    assert document.ids.tolist() == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]


def test_an_answer_that_begins_with_a_newline_never_shares_a_token_with_the_prompt():
    tokenizer = byte_tokenizer(CHATML)
    assert len(tokenizer("\n\n")["input_ids"]) == 1, "the trap needs a tokenizer that merges newlines"
    document = only(documents_of(tokenizer, chat("Hello?", "\nYes.")))
    assert supervised_texts(tokenizer, document) == ["\nYes.<|im_end|>"]
    prompt = ChatTemplate(tokenizer).prompt_ids(chat("Hello?"))
    assert document.ids[~document.supervised].tolist() == prompt


def test_special_tokens_that_swallow_the_blanks_after_them_tokenise_as_served():
    tokenizer = byte_tokenizer(CHATML, rstrip=True)
    document = only(documents_of(tokenizer, TWO_TURNS))
    assert supervised_texts(tokenizer, document) == ["Four.<|im_end|>", "Yes, no.<|im_end|>"]
    assert document.ids.tolist() == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]


@pytest.mark.parametrize("blank", ["' ' + ", ""])
def test_a_tokenizer_that_writes_a_blank_before_every_text_tokenises_as_served(blank):
    tokenizer = blank_prefix_tokenizer(INST.replace("' ' + ", blank))
    messages = chat("Hello there", "Four.", "and", "no")
    document = only(documents_of(tokenizer, messages))
    assert document.ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]
    pieces = [t.strip() for t in supervised_texts(tokenizer, document)]
    assert pieces == ["Four.</s>", "no</s>"]


def test_a_length_that_tokenizer_json_holds_cuts_nothing(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    document = only(documents_of(tokenizer, TWO_TURNS))
    assert document.ids.tolist() == only(documents_of(byte_tokenizer(CHATML), TWO_TURNS)).ids.tolist()
    assert supervised_texts(tokenizer, document) == ["Four.<|im_end|>", "Yes, no.<|im_end|>"]


class TestThinking:
    def test_an_empty_block_of_the_generation_prompt_is_not_supervised(self):
        tokenizer = byte_tokenizer(THINKING)
        document = only(documents_of(tokenizer, chat("Hello?", "Yes."), thinking=False))
        assert "<think>\n\n</think>\n\nYes." in tokenizer.decode(document.ids)
        assert supervised_texts(tokenizer, document) == ["Yes.<|im_end|>"]

    def test_an_empty_block_that_the_template_writes_and_no_prompt_holds_is_counted(self):
        tokenizer = byte_tokenizer(THINKING)
        counted = [
            ChatTemplate(tokenizer, t).render(chat("Hello?", "Yes.")).empty_thinking for t in (None, False)
        ]
        assert counted == [1, 0]

    def test_thinking_is_supervised_where_the_model_writes_it(self):
        tokenizer = byte_tokenizer(THINKING)
        for answer in (
            {"content": "<think>\nhm\n</think>\n\nYes."},
            {"content": "Yes.", "reasoning_content": "hm"},
        ):
            messages = [*chat("Hello?"), {"role": "assistant", **answer}]
            document = only(documents_of(tokenizer, messages, thinking=True))
            assert supervised_texts(tokenizer, document) == ["<think>\nhm\n</think>\n\nYes.<|im_end|>"]

    @pytest.mark.parametrize("thinking", [True, False])
    def test_turns_that_the_template_rewrites_later_are_documents_as_they_were_served(self, thinking):
        tokenizer = byte_tokenizer(THINKING)
        template = ChatTemplate(tokenizer, thinking)
        answers = ("<think>\none\n</think>\n\nA", "<think>\ntwo\n</think>\n\nB") if thinking else ("A", "B")
        messages = chat("q", answers[0], "r", answers[1])
        rendered = template.render(messages)
        assert rendered.by_turn
        assert len(rendered.documents) == 2
        for document, turn, answer in zip(rendered.documents, (1, 3), answers, strict=True):
            assert supervised_texts(tokenizer, document) == [answer + "<|im_end|>"]
            assert document.ids[~document.supervised].tolist() == template.prompt_ids(messages[:turn])

    def test_a_thinking_answer_rendered_without_thinking_is_refused(self):
        messages = chat("Hello?", "<think>\nhm\n</think>\n\nYes.")
        with pytest.raises(ChatError, match=r"generation prompt.*--thinking"):
            documents_of(byte_tokenizer(THINKING), messages, thinking=False)

    def test_a_template_that_drops_the_thinking_is_refused(self):
        template = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
        with pytest.raises(ChatError, match="content changed"):
            documents_of(byte_tokenizer(template), chat("Hello?", "<think>hm</think>Yes."))


def test_a_template_without_generation_prompt_is_refused_when_it_writes_a_header():
    template = CHATML.split("{%- if add_generation_prompt")[0]
    with pytest.raises(ChatError, match="no generation prompt"):
        documents_of(byte_tokenizer(template), chat("Hello?", "Yes."))
    plain_header = template.replace("'<|im_start|>' + m.role + '\\n'", "m.role + ': '")
    assert plain_header != template
    with pytest.raises(ChatError, match="no generation prompt"):
        documents_of(byte_tokenizer(plain_header), chat("Hello?", "Yes."))


def test_a_template_without_end_of_turn_is_refused():
    with pytest.raises(ChatError, match="no end-of-turn"):
        documents_of(byte_tokenizer(CHATML.replace("<|im_end|>", "")), chat("Hello?", "Yes."))


def test_a_role_the_template_refuses_is_told_with_its_words():
    with pytest.raises(ChatError, match="only user and assistant roles"):
        documents_of(blank_prefix_tokenizer(INST), TWO_TURNS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("{{- m.role == 'assistant' and m.role + 5 -}}", "can only concatenate str"),
        ("{{- m.role == 'assistant' and m.content.split('') -}}", "empty separator"),
    ],
)
def test_a_template_that_raises_what_is_no_template_error_is_told_with_its_words(words, told):
    for template in (CHATML, marked("OPEN1", "CLOSE1")):
        broken = byte_tokenizer(template.replace("{%- endfor -%}", words + "{%- endfor -%}"))
        with pytest.raises(ChatError, match=f"refused by the template: .*{told}"):
            documents_of(broken, TWO_TURNS)
        with pytest.raises(ChatError, match=told):
            ChatTemplate(broken).prompt_ids(TWO_TURNS)


def test_an_answer_cut_at_a_length_limit_has_no_end_of_turn():
    tokenizer = byte_tokenizer(CHATML)
    document = only(ChatTemplate(tokenizer).render(TWO_TURNS, finished=False).documents)
    assert supervised_texts(tokenizer, document) == ["Four.<|im_end|>", "Yes, no."]
    assert tokenizer.decode(document.ids).endswith("Yes, no.")


def test_an_end_of_turn_written_in_the_content_ends_the_answer_there():
    tokenizer = byte_tokenizer(CHATML)
    document = only(documents_of(tokenizer, chat("Hello?", "Yes.<|im_end|>")))
    assert supervised_texts(tokenizer, document) == ["Yes.<|im_end|>"]


def test_of_several_special_tokens_the_end_is_the_one_generation_stops_at():
    template = CHATML.replace("<|im_end|>\\n'", "<|eot_id|><|endoftext|>\\n'")
    tokenizer = byte_tokenizer(template)
    eos = [tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    known = only(ChatTemplate(tokenizer, eos_ids=eos).render(chat("Hello?", "Yes.")).documents)
    unknown = only(ChatTemplate(tokenizer).render(chat("Hello?", "Yes.")).documents)
    assert supervised_texts(tokenizer, known) == ["Yes.<|eot_id|><|endoftext|>"]
    assert supervised_texts(tokenizer, unknown) == ["Yes.<|eot_id|>"]


def test_a_stop_id_that_is_no_token_of_the_tokenizer_ends_no_answer():
    tokenizer = byte_tokenizer(CHATML)
    document = only(ChatTemplate(tokenizer, eos_ids=[9999]).render(chat("Hello?", "Try None")).documents)
    assert supervised_texts(tokenizer, document) == ["Try None<|im_end|>"]


def test_messages_after_the_last_answer_are_left_out_and_told():
    tokenizer = byte_tokenizer(CHATML)
    rendered = ChatTemplate(tokenizer).render(chat("a", "b", "c"))
    assert rendered.trailing_messages == 1
    assert only(rendered.documents).ids.tolist() == only(documents_of(tokenizer, chat("a", "b"))).ids.tolist()


def test_conversations_without_prompt_or_answer_are_refused():
    with pytest.raises(ChatError, match="no assistant turn"):
        documents_of(byte_tokenizer(), chat("a"))
    with pytest.raises(ChatError, match="assistant turn first"):
        documents_of(byte_tokenizer(), chat("a", "b")[1:])


def test_sharegpt_conversations_become_messages():
    record = {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]}
    record["conversations"].append({"from": "gpt", "value": "a"})
    assert read_messages(record, "f:1") == chat("q", "a", system="s")


def test_a_tool_call_needs_no_content():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [*chat("q"), {"role": "assistant", "content": None, "tool_calls": calls}]
    assert read_messages({"messages": messages}, "f:1")[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": calls,
    }


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"messages": "hi"}, r"f:3: messages: expected a list"),
        ({"messages": ["hi"]}, r"f:3: messages\[0\]: expected an object"),
        ({"messages": [{"content": "hi"}]}, r"f:3: messages\[0\].role: missing"),
        ({"messages": [{"role": "user"}]}, r"f:3: messages\[0\].content: missing"),
        ({"messages": [{"role": "user", "content": [1]}]}, r"f:3: messages\[0\].content: a list"),
        ({"messages": chat("q", " \n")}, r"f:3: messages\[1\].content: empty assistant turn"),
        ({"conversations": [{"from": "human"}]}, r"f:3: conversations\[0\].content: missing"),
    ],
)
def test_broken_messages_are_told_with_line_and_field(record, told):
    with pytest.raises(UserError, match=told) as e:
        read_messages(record, "f:3")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("tools", [5, "f", [5], [{"name": "f"}, None]])
def test_tools_that_are_no_descriptions_are_told_with_line_and_field(tools):
    with pytest.raises(UserError, match=r"^f:3: tools: expected a list of tool descriptions, found "):
        read_tools({"tools": tools}, "f:3")
    assert read_tools({"tools": [{"name": "f"}]}, "f:3") == [{"name": "f"}]
    assert read_tools({"tools": []}, "f:3") is read_tools({}, "f:3") is None


def test_an_unknown_role_and_no_messages_are_reasons_not_failures():
    with pytest.raises(ChatError, match="unknown role"):
        read_messages({"messages": [{"role": "narrator", "content": "x"}]}, "f:1")
    with pytest.raises(ChatError, match="no messages"):
        read_messages({"messages": []}, "f:1")


@pytest.mark.parametrize("kind", [list, np.array])
def test_ready_ids_split_at_the_response_or_carry_their_mask(kind):
    document = read_tokens({"prompt_ids": kind([5, 6]), "response_ids": kind([7, 8, 9])}, "f:1")
    assert document.ids.tolist() == [5, 6, 7, 8, 9]
    assert document.supervised.tolist() == [False, False, True, True, True]
    document = read_tokens({"input_ids": kind([5, 6, 7]), "loss_mask": kind([1, 0, 1])}, "f:1")
    assert document.ids.tolist() == [5, 6, 7]
    assert document.supervised.tolist() == [True, False, True]
    first = read_tokens({"prompt_ids": [], "response_ids": kind([7])}, "f:1")
    assert first.supervised.tolist() == [True]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"prompt_ids": [1]}, "f:2: response_ids: missing"),
        ({"input_ids": [1]}, "f:2: loss_mask: missing"),
        ({"response_ids": [1]}, "f:2: input_ids: missing"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "f:2: loss_mask: 1 values for 2"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "f:2: loss_mask: only 0 and 1"),
        ({"prompt_ids": [1.5], "response_ids": [1]}, "f:2: prompt_ids: expected whole numbers"),
        ({"prompt_ids": [[1]], "response_ids": [1]}, "f:2: prompt_ids: expected whole numbers"),
        ({"prompt_ids": [-1], "response_ids": [1]}, "f:2: prompt_ids: a token id is below 0"),
        ({"prompt_ids": "12", "response_ids": [1]}, "f:2: prompt_ids: expected a list"),
    ],
)
def test_broken_ids_are_told_with_line_and_field(record, told):
    with pytest.raises(UserError, match=told):
        read_tokens(record, "f:2")
