"""What the model reads and writes: the one tool, the prompts, the parser, the token-prefix extension; and its files.

Owns the conversation format of an ALFWorld trajectory: system prompt and task, then turns of one assistant message
and one tool result. Below that, what is read from the files of a model or a LoRA adapter, and what is refused.

Invariant (the *token invariant*): the prompt of turn n+1 is the prompt of turn n, then the tokens the model really
sampled, then the template's closing tokens (less what the completion already ended with), then the tool result's
tokens. History is never rendered or tokenised again: chat templates strip, re-order and re-wrap what they render, and
one changed token breaks both the alignment of rollout log-probabilities and the prefix cache. `check_prefix_extension`
is the one statement of it; rollout, train and the tests call that function.

Shown by: `uv run --extra cpu pytest tests/test_protocol.py`
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jinja2 import TemplateError

from data import SettingsError, check_same_base, first_line, json_object, read_file, stored_base, usable_path, visible

if TYPE_CHECKING:  # at run time where they are used: most that is here works without them
    import torch
    from peft import LoraConfig, PeftModel
    from peft.tuners.lora import LoraLayer

TOOL_NAME = "alfworld_step"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Carry out one action in the household and read what happens.",
        "parameters": {
            "type": "object",
            "properties": {
                "action": {"type": "string", "description": "One action, such as: go to countertop 1"},
            },
            "required": ["action"],
        },
    },
}

SYSTEM_PROMPT = """\
You are an agent in a household that is described in text. Carry out the task you are given, one action a turn.
Every turn: think briefly about what to do next, then call the tool alfworld_step exactly once, as the very last thing \
you write.
Choose one of the admissible actions. Copy names exactly as they are written, with their number, as in "apple 1".
You can hold one object at a time, and you must go to a place before you can see or use what is there.
Never announce success yourself: the household decides, and the episode ends by itself when the task is done."""

Status = Literal["executed", "not admissible", "malformed", "won", "over"]

TOOLS_BEGIN = "Tools, one JSON object a line:"
CALL_FORM = (
    "Call a tool in this form:\n<tool_call><function=NAME><parameter=PARAMETER>VALUE</parameter></function></tool_call>"
)

# For a tokenizer that has no template, or none with a place for tools. One block a message, so that a tool result can
# follow an assistant turn without touching it.
CHATML_TEMPLATE = (
    """\
{%- if tools and messages[0].role != 'system' %}{{ raise_exception('the first message must be the system prompt') }}\
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if loop.first and tools %}
{{- '\\n\\n"""
    + TOOLS_BEGIN
    + """\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '"""
    + CALL_FORM.replace("\n", "\\n")
    + """' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)


class TemplateMismatch(ValueError):
    """The tokenizer's chat template cannot be used for token-prefix extension."""


class NoTokenizer(ValueError):
    """The model has no tokenizer that can be used; the message names the model and why."""


class PrefixViolation(ValueError):
    """A prompt that is not a strict prefix extension of the one before."""


# --- messages -------------------------------------------------------------------------------------------------------


def first_messages(task: str, observation: str, admissible: Sequence[str] | None) -> list[dict]:
    """System prompt and first user message; `admissible` None leaves the list out."""
    room = "\n\n".join(
        part for part in observation.split("\n\n") if not part.startswith(("-=", "Your task is to:"))
    ).strip()
    user = f"Task: {task}\nObservation: {room}{_admissible_lines(admissible)}"
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": user}]


def tool_result(
    step: int, max_steps: int, status: Status, observation: str, admissible: Sequence[str] | None
) -> str:
    """The text of one tool result; `step` counts the assistant turns so far, from 1."""
    return f"Step {step} of {max_steps}: {status}\nObservation: {observation.strip()}{_admissible_lines(admissible)}"


def _admissible_lines(admissible: Sequence[str] | None) -> str:
    if admissible is None:
        return ""
    # `help` prints the command syntax, which the tool's description and this list already give.
    return "\nAdmissible actions:\n" + "\n".join(action for action in admissible if action != "help")


# --- the model's tool call ------------------------------------------------------------------------------------------

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_OPEN, _FUNCTION_CLOSE = f"<function={TOOL_NAME}>", "</function>"
_PARAMETER_OPEN, _PARAMETER_CLOSE = "<parameter=action>", "</parameter>"
_XML_MARKS = ("<function=", _FUNCTION_CLOSE, "<parameter=", _PARAMETER_CLOSE)


@dataclass(frozen=True)
class ToolCall:
    """A parsed assistant turn: `action` is None when the turn is malformed, and `error` then says why."""

    action: str | None
    error: str | None = None


def tool_call_text(action: str) -> str:
    """The XML form of a call, as the templates describe it (used to write demonstrations)."""
    return f"{CALL_OPEN}{_FUNCTION_OPEN}{_PARAMETER_OPEN}{action}{_PARAMETER_CLOSE}{_FUNCTION_CLOSE}{CALL_CLOSE}"


def parse_tool_call(text: str) -> ToolCall:
    """Read an assistant turn (`text` without its end-of-turn token): exactly one call, at the very end.

    Takes the XML form `<function=alfworld_step><parameter=action>...` and the JSON form `{"name":, "arguments":}`. The
    action is lower-cased and its white space collapsed. Never raises: whatever else the model wrote is a malformed turn.
    """
    opened, closed = text.count(CALL_OPEN), text.count(CALL_CLOSE)
    if opened == 0 and closed == 0:
        return ToolCall(None, "no tool call")
    if opened > 1 or closed > 1:
        return ToolCall(None, "more than one tool call")
    _, found, rest = text.partition(CALL_OPEN)
    body, closed_after, tail = rest.partition(CALL_CLOSE)
    if not found or not closed_after:
        return ToolCall(None, "the tool call is cut off")
    if tail.strip():
        return ToolCall(None, "text after the tool call")
    body = body.strip()
    action = _json_action(body) if body.startswith("{") else _xml_action(body)
    if isinstance(action, ToolCall):
        return action
    action = " ".join(action.lower().split())
    return ToolCall(action) if action else ToolCall(None, "the action is empty")


def _xml_action(body: str) -> str | ToolCall:
    if not (body.startswith("<function=") and body.endswith(_FUNCTION_CLOSE)):
        return ToolCall(None, "the tool call is neither XML nor JSON")
    if not body.startswith(_FUNCTION_OPEN):
        return ToolCall(None, f"unknown function; the only tool is {TOOL_NAME}")
    parameters = body[len(_FUNCTION_OPEN) : -len(_FUNCTION_CLOSE)].strip()
    if not (parameters.startswith(_PARAMETER_OPEN) and parameters.endswith(_PARAMETER_CLOSE)):
        return ToolCall(None, "the only parameter is action")
    action = parameters[len(_PARAMETER_OPEN) : -len(_PARAMETER_CLOSE)]
    if any(mark in action for mark in _XML_MARKS):
        return ToolCall(None, "more than one function or parameter")
    return action


def _json_action(body: str) -> str | ToolCall:
    def without_doubles(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    try:
        call = json.loads(body, object_pairs_hook=without_doubles)
    except (ValueError, RecursionError):
        return ToolCall(None, "the tool call is not valid JSON")
    if set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return ToolCall(None, "the call needs exactly a name and an object of arguments")
    if call["name"] != TOOL_NAME:
        return ToolCall(None, f"unknown function; the only tool is {TOOL_NAME}")
    if set(call["arguments"]) != {"action"}:
        return ToolCall(None, "the only parameter is action")
    action = call["arguments"]["action"]
    return action if isinstance(action, str) else ToolCall(None, "the action is not a string")


# --- tokens ---------------------------------------------------------------------------------------------------------


def check_prefix_extension(
    n_tokens: int, prompt_lengths: Sequence[int], spans: Sequence[tuple[int, int]]
) -> None:
    """Raise PrefixViolation unless a trajectory's turns extend one another.

    A trajectory's tokens are held once, as one append-only list of `n_tokens`; the prompt of turn i is its first
    `prompt_lengths[i]` tokens and completion i is tokens[start:end] of `spans[i]`. Prompt i+1 is then a strict prefix
    extension of prompt i and completion i exactly if every completion is non-empty, starts where its prompt ends, and
    ends before the next prompt does. The cost is a few comparisons a turn, whatever the history's length.
    """
    if len(prompt_lengths) != len(spans):
        raise PrefixViolation(f"{len(prompt_lengths)} prompts but {len(spans)} completions")
    previous_end = 0
    for turn, (prompt_length, (start, end)) in enumerate(zip(prompt_lengths, spans, strict=True)):
        if not previous_end < prompt_length:
            raise PrefixViolation(
                f"turn {turn}: its prompt has {prompt_length} tokens, but {previous_end} were there before it"
            )
        if start != prompt_length or not start < end <= n_tokens:
            raise PrefixViolation(
                f"turn {turn}: completion at tokens {start}..{end} of {n_tokens}, but its prompt has {prompt_length}"
            )
        previous_end = end


class ChatTokens:
    """A tokenizer's chat template as token lists: the first prompt, and what follows a completion.

    The template is rendered in full only for the first prompt. What it puts around a tool result is read off once, from
    a made-up conversation, and proven not to depend on what stands before it; a turn then costs the tokenisation of its
    own tool result. Thinking is off.

    The first of these that can be proven is used:

    1. the tokenizer's own template, if it has a place for tools;
    2. the built-in ChatML template, if it has none and the tokenizer knows ChatML's marks;
    3. its own template without tools: the system prompt describes the tool, and a tool result is a user message, so
       that the model reads the turn tokens it knows. A template without a system role gets that text in the first
       user message. `note` then says so.

    `configs` are the model's configurations, for the end tokens they name. Raises TemplateMismatch, naming the reasons,
    when nothing can be proven.
    """

    def __init__(self, tokenizer, *configs) -> None:
        self.tokenizer = tokenizer
        self.note = ""
        self._before_result, self._after_result = self._choose_template()
        closing = self._encode(self._before_result)[0]
        # What ends an assistant turn; the template's own token comes first.
        self.stop_token_ids = list(dict.fromkeys([closing, *_end_tokens(tokenizer, *configs)]))

    def first_prompt(self, messages: list[dict]) -> list[int]:
        """Tokens of the first turn's prompt, generation prompt included."""
        return self._encode(self._render(messages, generate=True))

    def extension(self, completion: Sequence[int], result: str) -> list[int]:
        """What to append after `completion` so that it, with the tool result `result`, becomes the next prompt."""
        tokens = self._encode(self._before_result + result + self._after_result)
        # A completion that stopped by itself ends with the first closing token; one stopped by length does not.
        return tokens[1:] if list(completion[-1:]) == tokens[:1] else tokens

    def completion_text(self, completion: Sequence[int]) -> str:
        """The assistant's text, without the token that ended the turn."""
        if completion and completion[-1] in self.stop_token_ids:
            completion = completion[:-1]
        return self.tokenizer.decode(list(completion), skip_special_tokens=False)

    def token_texts(self, completion: Sequence[int]) -> list[str]:
        """The text of each token, end token included; joined they are the completion's.

        A character of several tokens stands at its last one, and the others are empty. Each token is decoded after the
        one before it, as some tokenizers drop the space at the beginning of a text.
        """
        texts, begin = [], 0
        for end in range(1, len(completion) + 1):
            first = max(0, begin - 1)
            before, text = (self.tokenizer.decode(list(completion[first:to]), skip_special_tokens=False) for to in (begin, end))
            # A character has four bytes at most: what is not whole by then is none.
            whole = not text.endswith("\ufffd") or end - begin == 4 or end == len(completion)
            texts.append(text.removeprefix(before) if whole else "")
            begin = end if whole else begin
        return texts

    # The rest runs once, at start-up.

    def _choose_template(self) -> tuple[str, str]:
        """Settle on a way to render; returns what `_prove_extension` says of it."""
        own = f"the chat template of {self.tokenizer.name_or_path!r}"
        self._rendering, self.chat_template, self._title = "tools", None, own
        reasons = []
        if self._knows_tools():
            ways = [("tools", None, own)]
        else:
            reasons.append(f"{own} has no place for tools" if self.tokenizer.chat_template else f"{own} is not there")
            missing = [mark for mark in ("<|im_start|>", "<|im_end|>") if self._single_token(mark) is None]
            if missing:
                reasons.append(f"the tokenizer lacks {' and '.join(missing)} for the built-in ChatML template")
            ways = [] if missing else [("tools", CHATML_TEMPLATE, "the built-in ChatML template")]
        if self.tokenizer.chat_template:
            ways += [("system", None, own), ("user", None, own)]
        for self._rendering, self.chat_template, self._title in ways:
            try:
                around_result = self._prove_extension()
            except TemplateMismatch as error:
                reasons.append(str(error) if self._rendering == "tools" else f"without tools, {error}")
                continue
            if self._rendering != "tools":
                place = {"system": "system prompt", "user": "first user message"}[self._rendering]
                self.note = (
                    f"The built-in wrapping with the model's own turn tokens is used: the {place} describes the tool, and "
                    f"its results are user messages ({reasons[0]})"
                )
            return around_result
        raise TemplateMismatch("; ".join(dict.fromkeys(reasons)) + ": use a chat model with another template")

    def _render(self, messages: list[dict], generate: bool) -> str:
        tools = self._rendering == "tools"
        try:
            return self.tokenizer.apply_chat_template(
                messages if tools else _without_tools(messages, self._rendering),
                tools=[TOOL] if tools else None,
                chat_template=self.chat_template,
                add_generation_prompt=generate,
                tokenize=False,
                enable_thinking=False,
                strftime_now=_A_DAY.strftime,  # a prompt must not depend on the day on which a run is resumed
            )
        except (TemplateError, TypeError, LookupError) as error:  # a template is foreign code
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateMismatch(f"{self._title} does not render a conversation of {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _single_token(self, text: str) -> int | None:
        tokens = self._encode(text)
        return tokens[0] if len(tokens) == 1 and tokens[0] != self.tokenizer.unk_token_id else None

    def _is_special(self, token: int) -> bool:
        """Whether the tokenizer's settings or its tokenizer.json say so."""
        added = self.tokenizer.added_tokens_decoder.get(token)
        return token in self.tokenizer.all_special_ids or added is not None and added.special

    def _knows_tools(self) -> bool:
        if not self.tokenizer.chat_template:
            return False
        try:
            return TOOL_NAME in self._render([_SYSTEM, _USER], generate=True)
        except TemplateMismatch:  # such as "system role not supported": other ways to render have a place for it
            return False

    def _prove_extension(self) -> tuple[str, str]:
        """(text between completion and tool result, text between tool result and next completion)."""
        call = tool_call_text("open drawer 2")
        shapes = [
            [("first words", "first result")],
            [("a", "b b b"), ("second words\n\n" + call, "line one\nline two: 3, 4")],
            [("words " + tool_call_text("go to bed 1"), "r r"), ("x x x", "y y y"), ("other " + call, "You see nothing.")],
        ]
        found = {self._around_last_result(turns) for turns in shapes}
        if len(found) != 1:
            raise TemplateMismatch(f"what {self._title} puts around a tool result depends on the history: {sorted(found)}")
        before, after = found.pop()
        generation_prompt = self._generation_prompt()
        if not generation_prompt or not after.endswith(generation_prompt):
            raise TemplateMismatch(
                f"{self._title} does not end a tool result with its generation prompt {generation_prompt!r}"
            )
        closing = self._encode(before)[:1]
        if not closing or not self._is_special(closing[0]):
            raise TemplateMismatch(
                f"{self._title} closes an assistant turn with {before[:20]!r}, which does not begin with "
                "a special token: the tokens after a completion would depend on the completion"
            )
        return before, after

    def _around_last_result(self, turns: list[tuple[str, str]]) -> tuple[str, str]:
        """What stands before and after the last tool result of a made-up conversation, from its assistant turn to the end."""
        messages = [_SYSTEM, _USER]
        for content, result in turns:
            messages += [{"role": "assistant", "content": content}, {"role": "tool", "content": result}]
        text = self._render(messages, generate=True)
        parts = turns[-1] if self._rendering == "tools" else (_SYSTEM["content"], _USER["content"], *turns[-1])
        return self._between(parts, text)[-2:]

    def _generation_prompt(self) -> str:
        """What the template puts before a completion; without tools that is all that follows the user's message."""
        first, open_end = self._render([_SYSTEM, _USER], generate=True), self._render([_SYSTEM, _USER], generate=False)
        if self._rendering == "tools":
            return first[len(open_end) :] if first.startswith(open_end) else ""
        reply = {"role": "assistant", "content": "first words"}
        [_, heading, _] = self._between(
            (_USER["content"], reply["content"]), self._render([_SYSTEM, _USER, reply], generate=False)
        )
        [_, generation_prompt] = self._between([_USER["content"]], first)
        if not generation_prompt.startswith(heading.rstrip()):
            raise TemplateMismatch(
                f"{self._title} begins an assistant turn with {heading!r}, but its generation prompt is {generation_prompt!r}"
            )
        return generation_prompt

    def _between(self, parts: Sequence[str], text: str) -> tuple[str, ...]:
        """What stands before, between and after `parts`, each of which must stand in `text` once, in this order."""
        around, rest = [], text
        for part in parts:
            before, found, rest = rest.partition(part)
            if not found or text.count(part) != 1:
                raise TemplateMismatch(f"{self._title} does not keep every message as it is written, in its place")
            around.append(before)
        return (*around, rest)


def load_chat_tokens(base_model: str) -> ChatTokens:
    """The tokenizer of a model (hub id or folder) with its proven chat template; NoTokenizer if there is none."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(base_model, trust_remote_code=False)
        configs = [config, config.get_text_config()]
        with contextlib.suppress(OSError):  # a model need not have one
            configs.append(GenerationConfig.from_pretrained(base_model))
        chat = ChatTokens(AutoTokenizer.from_pretrained(base_model, trust_remote_code=False), *configs)
    except (OSError, ValueError) as error:
        raise NoTokenizer(f"--base-model {base_model!r} has no usable tokenizer: {error}") from error
    if chat.note:
        print(chat.note, flush=True)
    return chat


def _end_tokens(*named_by) -> list[int]:
    """The ids that the given tokenizer and configurations name as end of text: each names one, several or none."""
    named = [getattr(settings, "eos_token_id", None) for settings in named_by]
    return [token for tokens in named if tokens is not None for token in ([tokens] if isinstance(tokens, int) else tokens)]


def _without_tools(messages: list[dict], place: Literal["system", "user"]) -> list[dict]:
    """The conversation for a template without tools: described in the system prompt (or the first user message)."""
    system, user, *turns = messages
    described = f"{system['content']}\n\n{TOOLS_BEGIN}\n{json.dumps(TOOL)}\n{CALL_FORM}"
    if place == "system":
        first = [system | {"content": described}, user]
    else:
        first = [user | {"content": f"{described}\n\n{user['content']}"}]
    return first + [turn | {"role": "user"} if turn["role"] == "tool" else turn for turn in turns]


_SYSTEM, _USER = {"role": "system", "content": "You act."}, {"role": "user", "content": "Task: none"}
_A_DAY = datetime.date(2026, 1, 1)


# --- models ---------------------------------------------------------------------------------------------------------


@functools.cache
def reach_hub() -> None:
    """Whether the hub answers is asked once. If not, its client works from this machine's files, and asks no more."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the client's library has changed before, and with it the errors
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for the engine's process
        text = f"the hub cannot be reached ({first_line(error)}): only what this machine has of it is used"
        print(text, file=sys.stderr, flush=True)


def load_model_config(base_model: str):
    """The model's (text) config. Raises SettingsError when `base_model` is no model."""
    from transformers import AutoConfig

    if not os.path.isdir(base_model):
        reach_hub()
    try:
        return AutoConfig.from_pretrained(base_model, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(
            f"--base-model {base_model!r} is no model: {first_line(error)} "
            "(give a folder with config.json, or a Hub id that this machine has or can reach)"
        ) from error


def is_hybrid(base_model: str) -> bool:
    """Whether some layers keep a recurrent state (Gated DeltaNet), as in Qwen3.5."""
    return "linear_attention" in (getattr(load_model_config(base_model), "layer_types", None) or ())


def load_base_config(base_model: str):
    """The config of a checkpoint, without dropout; code from it is never run. SettingsError if it is no model."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(base_model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"base model {base_model!r} is no model folder and no readable hub id: {visible(first_line(error))}"
        ) from error
    text_config = config.get_text_config()
    # Layers recompute in training mode only, so dropout is removed rather than switched off by eval mode: sampler
    # and trainer must compute the same function.
    for name, value in vars(text_config).items():
        if "drop" in name and isinstance(value, float):
            setattr(text_config, name, 0.0)
    return config


def model_shape(config) -> torch.nn.Module:
    """The model of a text config, built without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def load_base(base_model: str, dtype: torch.dtype) -> tuple[torch.nn.Module, bool]:
    """Load the text model of a checkpoint, without dropout; and say whether that is a vision-language checkpoint.

    ValueError where there is no readable model, and where weights are missing from the checkpoint or have another shape
    in it: transformers would fill them with random numbers.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = load_base_config(base_model)
    disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(
        base_model, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
        output_loading_info=True, ignore_mismatched_sizes=True,  # refused below, by name
    )
    absent = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if absent:
        names = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
        raise SettingsError(f"base model {base_model!r}: {len(absent)} weights are missing from the checkpoint or have "
                         f"another shape there, and would be random: {names}; fetch or save the model again")
    return model, config.get_text_config() is not config


def save_model(
    model: torch.nn.Module, base_model: str, folder: Path, tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Write a whole model that plays alone; `tensors` in place of its own, if given. Its tokenizer is the base's.

    So is its generation config, copied as it is: transformers reads more of them than it agrees to write.
    """
    from transformers import AutoTokenizer, GenerationConfig
    from transformers.utils import cached_file

    model.generation_config = GenerationConfig()
    model.save_pretrained(folder, state_dict=tensors)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if found := cached_file(base_model, "generation_config.json", _raise_exceptions_for_missing_entries=False):
        shutil.copyfile(found, folder / "generation_config.json")
    AutoTokenizer.from_pretrained(base_model, trust_remote_code=False).save_pretrained(folder)


# --- adapters -------------------------------------------------------------------------------------------------------
#
# An adapter means what peft computes from its weights and its config. Of peft's options those may be set that both ways
# of weight sync follow, and those that say nothing about saved weights. All others are refused by name.

PEFT_PREFIX = "base_model.model."
_TEXT_LAYERS = f"{PEFT_PREFIX}model.layers."
_ENGINE_LAYERS = f"{PEFT_PREFIX}model.language_model.layers."
_PART_OF_ADAPTED = re.compile(r"\.(base_layer|lora_[AB]\.)")
SCALE_OPTIONS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
MODULE_OPTIONS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
HARMLESS_OPTIONS = (  # notes, what is for training only, and details of an option that must be off
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout",
    "runtime_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size",
)  # fmt: skip
HARMLESS_VALUES = {  # beside peft's default; the other initialisations change the base as well
    "task_type": ("CAUSAL_LM",), "revision": ("main",), "init_lora_weights": (False, "gaussian", "orthogonal", "eva"),
}  # fmt: skip
MERGE_IT = "merge it into its base with peft (merge_and_unload), save that and the tokenizer, give it as --base-model"


def check_options(about: dict, config: LoraConfig, folder: Path) -> None:
    """Refuse an adapter if its config sets what would not be followed; `about` is the config as it was read."""
    from peft import LoraConfig

    known = {f.name: f.default for f in fields(LoraConfig)}
    followed = {*SCALE_OPTIONS, *MODULE_OPTIONS, *HARMLESS_OPTIONS}
    refused = [
        f"{name} = {value!r}"
        for name, default in known.items()
        if name not in followed and ((value := getattr(config, name)) or default)
        and value not in (default, *HARMLESS_VALUES.get(name, ()))
    ]  # fmt: skip
    refused += [f"{name} = {value!r}, which the installed peft does not know" for name, value in about.items()
                if value and name not in known]  # fmt: skip
    if refused:
        reason = visible("; ".join(refused))
        raise SettingsError(f"{folder} is an adapter with {reason}, which is not supported: {MERGE_IT}")


def check_adapter(folder: Path, base_model: str) -> LoraConfig:
    """The config of a saved adapter. SettingsError, before weights are read, if it is none that plays on this base."""
    from peft import PeftConfig

    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise SettingsError(f"no adapter in {folder}: {file} is missing; give a path that train.py printed")
    path = folder / "adapter_config.json"
    try:
        about = json_object(read_file(path))
        saved_base, rank, ranks = about.get("base_model_name_or_path"), about.get("r"), about.get("rank_pattern") or {}
        if type(saved_base) is not str or not saved_base or type(rank) is not int:
            raise ValueError(f"names no base model and rank ({repr(saved_base):.40}, {repr(rank):.40})")
        if not all(type(value) is int and value > 0 for value in (rank, *ranks.values())):
            raise ValueError(f"has a rank that is none ({repr(rank):.40}, {repr(ranks):.80})")
        if about.get("peft_type") != "LORA":
            raise ValueError(f"is of the kind {repr(about.get('peft_type')):.40}, not LORA")
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise SettingsError(f"{path} is no LoRA adapter's config: {visible(first_line(error))}") from error
    check_same_base(saved_base, stored_base(base_model),
                    f"{folder} is an adapter trained on another base, {visible(saved_base)}, not on {base_model}; "
                    f"pass --base-model {visible(usable_path(saved_base))}")  # fmt: skip
    check_options(about, config, folder)
    return config


def check_fit(tensors: dict[str, torch.Tensor], model: PeftModel, folder: Path) -> None:
    """Refuse an adapter's tensors unless they are those that peft has in `model`, by name and shape."""
    import torch
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    for name, module in adapted_modules(model):
        if module is model.get_output_embeddings() or not isinstance(module.get_base_layer(), torch.nn.Linear):
            raise SettingsError(f"{folder} adapts {name}; supported are linears of the decoder's layers: {MERGE_IT}")
    for name in sorted(tensors.keys() & own.keys()):
        if tensors[name].shape != own[name].shape:
            raise SettingsError(f"{folder} is an adapter trained on another base: {name} has shape "
                                f"{tuple(tensors[name].shape)}, not {tuple(own[name].shape)}")
    unmatched = {"have no place in this base": sorted(tensors.keys() - own.keys()),
                 "are missing": sorted(own.keys() - tensors.keys())}  # fmt: skip
    found = [f"{len(names)} weights {what}, as {visible(names[0])}" for what, names in unmatched.items() if names]
    if found:
        raise SettingsError(f"{folder}: by its config {' and '.join(found)}: it is damaged, or of another base")


def save_adapter_tensors(tensors: dict[str, torch.Tensor], folder: Path, engine_layout: bool) -> None:
    from safetensors.torch import save_file

    if engine_layout:
        tensors = {engine_name(name): value for name, value in tensors.items()}
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def engine_name(name: str) -> str:
    """What vLLM calls a weight of a base that is stored as a vision-language model."""
    return name.replace(_TEXT_LAYERS, _ENGINE_LAYERS)


def save_adapter_config(config: LoraConfig, base_model: str, folder: Path) -> None:
    config = copy.copy(config)
    config.base_model_name_or_path = stored_base(base_model)
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # whose order would change from run to run
    config.save_pretrained(str(folder))


def read_adapter_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except SafetensorError as error:
        raise SettingsError(
            f"{folder / 'adapter_model.safetensors'} is damaged: {visible(error)}; take another checkpoint"
        ) from error
    return {name.replace(_ENGINE_LAYERS, _TEXT_LAYERS): tensor for name, tensor in tensors.items()}


def adapted_modules(model: torch.nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Modules with an adapter, by peft's name."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def merged_linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, fp32 tensor) of every linear of the layers, with what peft adds to it summed in fp32.

    Also of those without an adapter, and biases: vLLM makes one of several (q, k, v), and of one that it loads again,
    whatever it is not given is left without a value.
    """
    import torch
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        adapted = isinstance(module, LoraLayer)
        linear = module.get_base_layer() if adapted else module
        of_layers = isinstance(linear, torch.nn.Linear) and module is not model.get_output_embeddings()
        if not of_layers or _PART_OF_ADAPTED.search(name):
            continue
        name = name.removeprefix(PEFT_PREFIX)
        weight = linear.weight.detach().float()
        yield f"{name}.weight", weight + module.get_delta_weight("default").detach() if adapted else weight
        if linear.bias is not None:
            yield f"{name}.bias", linear.bias.detach().float()
