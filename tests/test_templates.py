"""Chat templates of other families, in our words and as published: which way each is rendered, and what is refused."""

import re
from pathlib import Path

import pytest
from conftest import QWEN35_STYLE_TEMPLATE, ROOT, make_tokenizer

from protocol import ChatTokens, TemplateMismatch, first_messages, tool_call_text, tool_result

# A header of tokens, today's date, the tools in the first user message, and a tool result as a JSON string.
LLAMA_STYLE_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set words, turns = messages[0].content | trim, messages[1:] %}
{%- else %}{%- set words, turns = '', messages %}{%- endif %}
{{- '<|head|>system<|/head|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' + words + '<|eot|>' }}
{%- for message in turns %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|head|>' + role + '<|/head|>\\n\\n' }}
{%- if loop.first and tools %}{{- 'Functions:\\n' + tools | tojson + '\\n\\n' }}{%- endif %}
{{- (message.content | tojson if message.role == 'tool' else message.content | trim) + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}"""

# No system role, no tools, user and model in turn.
GEMMA_STYLE_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and model take turns') }}{%- endif %}
{{- '<|head|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content | trim + '<|eot|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>model\\n' }}{%- endif %}"""

# The system prompt in the last user message, no generation prompt of its own.
MISTRAL_STYLE_TEMPLATE = """\
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|head|>' + (system + '\\n\\n' if system and loop.last else '') + message.content + '<|/head|>' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + '<|eot|>' }}
{%- elif message.role != 'system' %}{{ raise_exception('only user and assistant') }}
{%- endif %}
{%- endfor %}"""

# The model itself writes a channel before what it says.
CHANNEL_STYLE_TEMPLATE = GEMMA_STYLE_TEMPLATE.replace(
    "message.content | trim", "('<|/head|>final\\n' if message.role == 'assistant' else '') + message.content"
)


def tokenizer_of(template, name="a-model"):
    tokenizer = make_tokenizer(template, ("<|bos|>", "<|/head|>"), marks=("<|head|>", "<|eot|>"))
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    tokenizer.name_or_path = name
    return tokenizer


def written_out(chat, turns=3):
    """The text of a conversation as its tokens hold it: extended turn by turn."""
    tokens = chat.first_prompt(first_messages("put a mug in bed.", "You are in a room.", ["look"]))
    for step in range(1, turns + 1):
        completion = [*chat._encode("I look. " + tool_call_text("look")), chat.stop_token_ids[0]]
        tokens += completion + chat.extension(completion, tool_result(step, 50, "executed", f"You see mug {step}.", ["look"]))
    return chat.tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("template", "place", "user", "reply"),
    [
        (LLAMA_STYLE_TEMPLATE, "system prompt", "<|head|>user<|/head|>\n\n", "<|eot|><|head|>assistant<|/head|>\n\n"),
        (GEMMA_STYLE_TEMPLATE, "first user message", "\n<|head|>user\n", "<|eot|>\n<|head|>model\n"),
        (MISTRAL_STYLE_TEMPLATE, "first user message", "<|head|>", "<|/head|>"),
    ],
)
def test_template_without_usable_tools_is_used_with_the_models_own_turn_tokens(template, place, user, reply):
    chat = ChatTokens(tokenizer_of(template))
    assert chat.chat_template is None and f"the {place} describes the tool" in chat.note and "'a-model'" in chat.note
    text = written_out(chat)
    assert text.startswith("<|bos|>") and text.count("<|bos|>") == 1
    assert text.count('"name": "alfworld_step"') == text.count("<parameter=PARAMETER>") == 1
    for step in (1, 2, 3):
        assert f"{tool_call_text('look')}<|eot|>{user}Step {step} of 50" in text
    assert text.endswith(f"\nAdmissible actions:\nlook{reply}")
    assert text.count("You are an agent") == 1 and "\\n" not in text


def test_a_template_that_leaves_the_beginning_of_a_turn_to_the_model_is_refused():
    with pytest.raises(TemplateMismatch, match=r"has no place for tools.*begins an assistant turn with .*final"):
        ChatTokens(tokenizer_of(CHANNEL_STYLE_TEMPLATE))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (QWEN35_STYLE_TEMPLATE.replace("'\\n<tool_response>\\n'", "'\\n<tool_response ' ~ loop.index ~ '>\\n'"), "depends on the history"),
        (QWEN35_STYLE_TEMPLATE.replace("{%- elif message.role == 'tool' %}", "{%- elif message.role == 'never' %}"), "does not render a conv"),
        (QWEN35_STYLE_TEMPLATE.replace("message.content | trim + '\\n</tool", "message.content | tojson + '\\n</tool"), "does not keep"),
    ],
)  # fmt: skip
def test_a_tool_result_that_cannot_be_extended_becomes_a_user_message_and_the_reason_is_said(template, reason):
    chat = ChatTokens(make_tokenizer(template))
    assert reason in chat.note and "its results are user messages" in chat.note
    assert "<|im_end|>\n<|im_start|>user\nStep 2 of 50" in written_out(chat)


def test_the_day_is_not_in_the_prompt(monkeypatch):
    text = written_out(ChatTokens(tokenizer_of(LLAMA_STYLE_TEMPLATE)))
    assert "Today: 01 Jan 2026" in text


def test_a_token_that_only_tokenizer_json_calls_special_closes_a_turn():
    template = QWEN35_STYLE_TEMPLATE.replace("<|im_end|>", "<|close|>")
    tokenizer = make_tokenizer(template, ("<|close|>",))
    closing = tokenizer.convert_tokens_to_ids("<|close|>")
    assert closing not in tokenizer.all_special_ids
    chat = ChatTokens(tokenizer)
    assert not chat.note and chat.stop_token_ids == [closing, tokenizer.eos_token_id]


def test_what_is_wrong_with_the_built_in_template_is_not_said_of_the_tokenizers_own():
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_str(make_tokenizer(marks=("<|head|>", "<|eot|>"))._tokenizer.to_str())
    inner.add_tokens([AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>", normalized=False)])
    with pytest.raises(TemplateMismatch, match="the built-in ChatML template closes an assistant turn with '<|im_end|>"):
        ChatTokens(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|eot|>"))


# --- published templates: run, not kept here ------------------------------------------------------------------------

PUBLISHED = {
    "gemma3": "system", "glm4moe": "tools", "gptoss": "", "lfm2": "tools", "llama3_1": "system", "llama3_2": "system",
    "nemotron_3_nano": "tools", "qwen2_5": "tools", "qwen3": "tools", "qwen3_5_nothink": "tools",
    "qwen3_5_think": "tools", "qwen3_instruct_2507": "tools",
}  # fmt: skip


@pytest.mark.parametrize(("name", "rendering"), PUBLISHED.items())
def test_published_template(name, rendering):
    path = Path(ROOT).parent / "shared" / "chat_templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip("the published templates are not part of the project")
    template = path.read_text(encoding="utf-8")
    found = re.findall(r"<[|｜][^<>|]*[|｜]>|<start_of_turn>|<end_of_turn>|<bos>", template + "<bos>")
    specials = tuple(sorted({*found} - {"<|endoftext|>"}))
    chatml = ("<|im_start|>", "<|im_end|>")
    marks = chatml if "<|im_start|>" in specials else ("<|other|>", "<|end|>")
    tokenizer = make_tokenizer(template, tuple(mark for mark in specials if mark not in marks), marks=marks)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    if not rendering:
        with pytest.raises(TemplateMismatch, match="begins an assistant turn with"):
            ChatTokens(tokenizer)
        return
    chat = ChatTokens(tokenizer)
    assert (chat.chat_template, chat._rendering, bool(chat.note)) == (None, rendering, rendering != "tools")
    text = written_out(chat)
    assert text.startswith("<bos>") == ("bos_token" in template) and text.count("Step 2 of 50: executed\n") == 1
