"""The tool-call parser, the messages, and the token-prefix extension."""

import json
import random

import pytest
from conftest import QWEN35_STYLE_TEMPLATE, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_templates import GEMMA_STYLE_TEMPLATE, LLAMA_STYLE_TEMPLATE, tokenizer_of

from protocol import (
    TOOL_NAME, ChatTokens, PrefixViolation, TemplateMismatch, check_prefix_extension, first_messages, parse_tool_call,
    tool_call_text, tool_result,
)  # fmt: skip


def json_call(action, name=TOOL_NAME):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'action': action}})}</tool_call>"


# --- the parser -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        tool_call_text("go to drawer 1"),
        json_call("go to drawer 1"),
        "I should look there.\n\n" + tool_call_text("  Go  TO\tdrawer\n1 ") + " \n",
        "<tool_call>\n<function=alfworld_step>\n<parameter=action>\ngo to drawer 1\n</parameter>\n</function>\n</tool_call>",
        '<tool_call>\n{"arguments": {"action": "GO TO drawer 1"}, "name": "alfworld_step"}\n</tool_call>',
    ],
)
def test_a_single_call_at_the_end_is_valid_in_both_forms(text):
    assert parse_tool_call(text).action == "go to drawer 1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no tool call"),
        ("go to drawer 1", "no tool call"),
        ("<tool_call>", "cut off"),
        ("</tool_call><tool_call>", "cut off"),
        (tool_call_text("look")[:-3], "cut off"),
        (tool_call_text("look") + "done", "text after"),
        (tool_call_text("look") * 2, "more than one"),
        (tool_call_text("look") + json_call("look"), "more than one"),
        (tool_call_text(""), "empty"),
        (tool_call_text(" \n\t"), "empty"),
        (json_call(""), "empty"),
        (json_call(3), "not a string"),
        (json_call(None), "not a string"),
        (json_call(["look"]), "not a string"),
        (json_call("look", name="other"), "unknown function"),
        ("<tool_call><function=other><parameter=action>look</parameter></function></tool_call>", "unknown function"),
        ("<tool_call><function=alfworld_step><parameter=do>look</parameter></function></tool_call>", "only parameter"),
        ("<tool_call><function=alfworld_step></function></tool_call>", "only parameter"),
        (tool_call_text("look</parameter><parameter=action>look"), "more than one function or parameter"),
        (tool_call_text("<function=alfworld_step>look"), "more than one function or parameter"),
        ("<tool_call>look</tool_call>", "neither XML nor JSON"),
        ("<tool_call>{}</tool_call>", "exactly a name"),
        ("<tool_call>{'name': 1}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "alfworld_step", "arguments": "look"}</tool_call>', "exactly a name"),
        ('<tool_call>{"name": "alfworld_step", "name": "x", "arguments": {"action": "look"}}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "alfworld_step", "arguments": {"action": "a", "x": 1}}</tool_call>', "only parameter"),
        ('<tool_call>{"name": ' + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "alfworld_step", "arguments": {"action": ' + "9" * 5_000 + "}}</tool_call>", "not valid JSON"),
    ],
)
def test_anything_else_is_malformed_and_says_why(text, why):
    call = parse_tool_call(text)
    assert call.action is None and why in call.error


def test_unicode_survives_and_is_lower_cased():
    assert parse_tool_call(tool_call_text("Nimm\u00a0den  ÄPFEL 1")).action == "nimm den äpfel 1"


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=alfworld_step>", "</function>", "<parameter=action>", "</parameter>", "{", "}",
     '"name"', '"alfworld_step"', '"arguments"', ":", ",", '"action"', '"look"', " ", "\n", "go to drawer 1"]
)  # fmt: skip


@given(st.lists(PIECES | st.text(max_size=5), max_size=14).map("".join))
@settings(max_examples=1000, deadline=None)
def test_parser_never_raises_and_answers_exactly_one_of_action_and_error(text):
    call = parse_tool_call(text)
    assert (call.action is None) != (call.error is None)
    if call.action is not None:
        assert call.action == " ".join(call.action.lower().split()) != ""
        assert text.count("<tool_call>") == 1 and text.rstrip().endswith("</tool_call>")


@given(st.text(min_size=1, max_size=60).filter(lambda s: s.split() and "<" not in s), st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_both_forms_of_any_action_parse_to_the_same_thing(action, reasoning):
    reasoning = reasoning.replace("<", "")
    expected = " ".join(action.lower().split())
    if expected:
        assert parse_tool_call(reasoning + tool_call_text(action)).action == expected
        assert parse_tool_call(reasoning + json_call(action)).action == expected


# --- messages -------------------------------------------------------------------------------------------------------


def test_first_message_holds_task_room_and_admissible_actions_but_never_help():
    observation = "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.\n\nYour task is to: put a mug in bed."
    _, user = first_messages("put a mug in bed.", observation, ["go to bed 1", "help", "look"])
    assert user["content"] == (
        "Task: put a mug in bed.\nObservation: You are in the middle of a room.\nAdmissible actions:\ngo to bed 1\nlook"
    )
    assert "Admissible" not in first_messages("t", observation, None)[1]["content"]


def test_tool_result_holds_step_status_observation_and_admissible_actions():
    assert tool_result(3, 50, "not admissible", "Nothing happens.", ["help", "look"]) == (
        "Step 3 of 50: not admissible\nObservation: Nothing happens.\nAdmissible actions:\nlook"
    )


# --- token-prefix extension -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[None, QWEN35_STYLE_TEMPLATE, LLAMA_STYLE_TEMPLATE, GEMMA_STYLE_TEMPLATE],
                ids=["chatml", "qwen35", "llama", "gemma"])  # fmt: skip
def chat(request):
    chatml = request.param in (None, QWEN35_STYLE_TEMPLATE)
    return ChatTokens(make_tokenizer(request.param) if chatml else tokenizer_of(request.param))


def test_template_with_tools_is_used_as_it_is_and_one_without_gets_the_built_in_one(chatml_tokenizer, qwen35_tokenizer):
    assert ChatTokens(qwen35_tokenizer).chat_template is None
    assert ChatTokens(chatml_tokenizer).chat_template is not None
    no_tools = make_tokenizer("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    assert ChatTokens(no_tools).chat_template is not None
    no_system = make_tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    assert ChatTokens(no_system).chat_template is not None


def test_extended_prompt_reads_as_the_template_would_render_the_conversation(chat):
    """The one place where a re-rendering is compared: for turns that the template does not change, both agree."""
    messages = first_messages("put a mug in bed.", "You are in the middle of a room.", ["go to bed 1", "look"])
    tokens = chat.first_prompt(messages)
    closing = chat.stop_token_ids[-1] if len(chat.stop_token_ids) == 1 else chat._encode(chat._before_result)[0]
    for step, action in enumerate(["go to drawer 1", "open drawer 1", "look"], 1):
        text = f"Next I {action}.\n" + tool_call_text(action)
        result = tool_result(step, 50, "executed", f"You see nothing in drawer {step}.", ["look", "go to bed 1"])
        completion = chat._encode(text) + [closing]
        tokens += completion + chat.extension(completion, result)
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": result}]
    assert chat.tokenizer.decode(tokens) == chat._render(messages, generate=True)


def test_length_stopped_completion_is_closed_and_a_finished_one_is_not_closed_twice(chat):
    closing = chat._encode(chat._before_result)[0]
    words = chat._encode("I was going to")
    after_length_stop, after_closing = chat.extension(words, "r"), chat.extension(words + [closing], "r")
    assert after_length_stop == [closing, *after_closing]
    assert closing not in after_closing[:1]
    assert chat.extension([], "r") == after_length_stop


def test_completion_text_drops_only_the_token_that_ended_the_turn(chat):
    closing = chat._encode(chat._before_result)[0]
    text = "look <|im_start|> " + tool_call_text("look")
    assert chat.completion_text(chat._encode(text) + [closing]) == text
    assert chat.completion_text(chat._encode(text)) == text
    assert chat.completion_text([closing]) == "" == chat.completion_text([])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_sampled_tokens_make_strict_prefix_extensions(chat, data):
    vocabulary = len(chat.tokenizer)
    tokens = chat.first_prompt(first_messages("put a mug in bed.", "You are in a room.", ["look"]))
    prompts, lengths, spans = [], [], []
    for _ in range(data.draw(st.integers(1, 6))):
        completion = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=12))
        result = data.draw(st.text(max_size=30))
        prompts.append((list(tokens), completion))
        lengths.append(len(tokens))
        spans.append((len(tokens), len(tokens) + len(completion)))
        tokens = tokens + completion + chat.extension(completion, result)
    check_prefix_extension(len(tokens), lengths, spans)
    for prompt, completion in prompts:
        assert tokens[: len(prompt) + len(completion)] == prompt + completion
        assert len(tokens) > len(prompt) + len(completion)
    # the tool result is read back whole, whatever was sampled before it
    assert chat.tokenizer.decode(tokens).endswith(chat._after_result)


@pytest.mark.parametrize(
    ("n_tokens", "lengths", "spans"),
    [
        (30, [10], []),  # a prompt without its completion
        (30, [10, 20], [(10, 10), (20, 25)]),  # an empty completion
        (30, [10, 20], [(9, 12), (20, 25)]),  # a completion that does not start at its prompt's end
        (30, [10, 12], [(10, 14), (12, 16)]),  # a prompt that is shorter than what came before
        (30, [10, 14], [(10, 14), (14, 16)]),  # nothing between two completions: not a strict extension
        (15, [10, 14], [(10, 12), (14, 16)]),  # tokens missing
        (30, [0], [(0, 3)]),  # no prompt
    ],
)
def test_broken_extensions_are_found(n_tokens, lengths, spans):
    with pytest.raises(PrefixViolation):
        check_prefix_extension(n_tokens, lengths, spans)


def test_extension_cost_does_not_depend_on_the_history(chat, monkeypatch):
    encoded = []
    original = chat.tokenizer.encode
    monkeypatch.setattr(chat.tokenizer, "encode", lambda text, **k: encoded.append(len(text)) or original(text, **k))
    monkeypatch.setattr(chat.tokenizer, "apply_chat_template", None)  # a turn renders nothing
    for history in (10, 1_000, 10_000):
        chat.extension([5] * history, "You see nothing.")
    assert len(set(encoded)) == 1


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (QWEN35_STYLE_TEMPLATE.replace("message.content | trim + '<|im_end|>", "message.content[:3] + '<|im_end|>"), "does not keep"),
        (QWEN35_STYLE_TEMPLATE.replace("{%- if add_generation_prompt %}", "{%- if add_generation_prompt and messages|length == 2 %}"), "generation prompt"),
        (QWEN35_STYLE_TEMPLATE.replace("<|im_end|>", "END"), "special token"),
    ],
)  # fmt: skip
def test_template_that_cannot_be_extended_is_refused_with_the_reason(template, why):
    with pytest.raises(TemplateMismatch, match=why):
        ChatTokens(make_tokenizer(template))


def test_tokenizer_without_chatml_marks_and_without_tools_is_refused():
    tokenizer = make_tokenizer()
    tokenizer._tokenizer = type(tokenizer._tokenizer).from_str(
        tokenizer._tokenizer.to_str().replace("<|im_start|>", "<|other|>")
    )
    with pytest.raises(TemplateMismatch, match="is not there; the tokenizer lacks"):
        ChatTokens(tokenizer)


def test_texts_of_tokens_join_to_what_was_written(chat):
    """Also where a character has several tokens, and where bytes are none."""
    text = "Go.\n🙂 漢字, é  and then\n" + tool_call_text("open drawer 1")
    tokens = chat._encode(text) + chat.stop_token_ids[:1]
    texts = chat.token_texts(tokens)
    assert len(texts) == len(tokens) and "".join(texts[:-1]) == chat.completion_text(tokens) == text
    assert texts[-1] == chat.tokenizer.decode(tokens[-1:])
    rng = random.Random(0)
    noise = [rng.randrange(len(chat.tokenizer)) for _ in range(300)]
    assert len(chat.token_texts(noise)) == 300 and chat.token_texts([]) == []
