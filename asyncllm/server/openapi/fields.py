"""The meaning of every request field: the text, ranges and shapes that its type cannot express.

A field means the same wherever it occurs, so one `FieldDoc` serves every API; one under
"Type.field" wins over the one under "field". `kind` is the promise of the whole server: a field
does what its text says, or cannot change the output and is ignored, or is refused with a 400 naming
it. Tests hold the docs to the request types, the ranges to `SamplingParams`, the promise to the
server.
"""

from __future__ import annotations

from typing import Literal

from asyncllm.sampling_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
)
from asyncllm.sampling_params import RepetitionDetectionParams
from asyncllm.server.chat.batch import MAX_CONVERSATIONS, REFUSED
from asyncllm.server.messages.openapi import MESSAGES_FIELD_DOCS
from asyncllm.server.openapi import field_doc as types
from asyncllm.server.openapi.field_doc import FieldDoc
from asyncllm.server.openapi.field_doc import between as _between
from asyncllm.server.openapi.field_doc import ignored as _ignored
from asyncllm.server.openapi.field_doc import refused as _refused
from asyncllm.server.responses.openapi import RESPONSES_FIELD_DOCS

_IGNORED = (
    "user", "metadata", "session_id", "prediction", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "JsonSchema.description",
    "assistant_tokens_mask", "token_offsets", "CompletionRequest.media_io_kwargs",
)  # fmt: skip
_REFUSED = (
    "watermarking", "logits_processors", "vllm_xargs", "moderation", "web_search_options", "suffix",
    "prompt_embeds",
)  # fmt: skip
_NOT_TEXT = (
    "audio", "modalities", "mm_processor_kwargs", "media_io_kwargs", "features",
)  # fmt: skip

_ALL = "; -1: all, where --max-logprobs has room for them."

FIELD_DOCS: dict[str, FieldDoc] = {
    "model": FieldDoc("A name of /v1/models; without it the first one answers."),
    "messages": FieldDoc(
        "The conversation so far, oldest first, as the chat template takes it.",
        schema={"minItems": 1}, type=list[types.Message],
    ),
    "BatchChatRequest.messages": FieldDoc(
        "One conversation for each choice of the answer, in this order.",
        schema={"minItems": 1, "maxItems": MAX_CONVERSATIONS}, type=list[list[types.Message]],
    ),
    **{
        f"BatchChatRequest.{name}": _refused("Each conversation has one choice, and no stream.")
        for name in REFUSED
    },
    "prompt": FieldDoc("Text, or token ids, or a list of either: one answer for each."),
    # --- how many, how long ---
    "n": _between(1, MAX_N, "Answers for each prompt."),
    "best_of": _between(
        1, MAX_N, "Answers to generate, of which the n likeliest are returned; at least n. Not "
        "with stream. With use_beam_search: the width of the search."
    ),
    "use_beam_search": FieldDoc(
        "Search for the n likeliest answers instead of drawing them; a stream brings them at the "
        "end. What would change the scores is refused beside it."
    ),
    "length_penalty": _between(
        -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY,
        "Of a beam search: log-probability / length ** length_penalty is what counts.",
        default=1,
    ),
    "early_stopping": FieldDoc(
        "Of a beam search, as in transformers: end with the first best_of finished beams (true), "
        "when none is likely to be better (false), when none can be (\"never\").",
        type=bool | Literal["never"],
    ),
    "max_tokens": _between(
        0, None, "Most tokens of an answer; without it as many as the context has room for."
    ),
    "CompletionRequest.max_tokens": _between(
        0, None, "Most tokens of an answer; 0 together with echo scores the prompt alone.",
        default=16,
    ),
    "max_completion_tokens": _between(1, None, "OpenAI's newer name of max_tokens; it wins."),
    "min_tokens": _between(0, None, "No end of the answer before so many tokens."),
    "truncate_prompt_tokens": _between(
        -1, None, "Keep only the last so many tokens of the prompt; -1: as many as fit."
    ),
    # --- sampling ---
    "temperature": _between(0, 100, "0 is greedy: always the likeliest token."),
    "top_p": FieldDoc(
        "Sample among the likeliest tokens that together have this probability.",
        schema={"exclusiveMinimum": 0, "maximum": 1},
    ),
    "top_k": _between(-1, None, "Sample among so many of the likeliest tokens; 0 and -1: all."),
    "min_p": _between(
        0, 1, "Sample among tokens at least this share as likely as the likeliest one."
    ),
    "presence_penalty": _between(-2, 2, "Taken from the logit of each token already answered."),
    "frequency_penalty": _between(
        -2, 2, "Taken from a token's logit once for each time that it was answered."
    ),
    "repetition_penalty": _between(
        MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY,
        "Divides the logits of tokens in prompt and answer; above 1 discourages them.",
    ),
    "seed": _between(
        -MAX_SEED - 1, MAX_SEED, "Same seed, same answer, whatever else is served. -1: none."
    ),
    "logit_bias": FieldDoc(
        "Token id to a number from -100 to 100 that is added to its logit.",
        schema={"maxProperties": MAX_LOGIT_BIAS_ENTRIES},
        type=dict[str, float] | None,
    ),
    "allowed_token_ids": FieldDoc(
        "Answer with these tokens only.", schema={"minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS}
    ),
    "bad_words": FieldDoc(
        "Words that the answer must not hold.", schema={"maxItems": MAX_BAD_WORDS}
    ),
    # --- the end ---
    "stop": FieldDoc(
        f"Up to {MAX_STOP_STRINGS} strings; the answer ends before the first that occurs.",
    ),
    "stop_token_ids": FieldDoc(
        "The answer ends with any of these tokens.", schema={"maxItems": MAX_STOP_TOKEN_IDS}
    ),
    "include_stop_str_in_output": FieldDoc("Keep what ended the answer in its text."),
    "ignore_eos": FieldDoc("Go on after the model's own end of text."),
    "repetition_detection": FieldDoc(
        "The answer ends where its last tokens are one pattern, min_count times in a row, with "
        "finish_reason stop (newer vLLM: repetition).",
        type=RepetitionDetectionParams | None,
    ),
    "thinking_token_budget": _between(
        -1, None, "Most tokens of reasoning; then it is ended. -1: no limit."
    ),
    # --- what the answer holds ---
    "logprobs": FieldDoc("Report the log-probability of each token of the answer."),
    "CompletionRequest.logprobs": _between(
        -1, None, f"Report each token's log-probability and so many of the likeliest others'{_ALL}"
    ),
    "top_logprobs": _between(-1, None, f"So many of the likeliest tokens too, with logprobs{_ALL}"),
    "logprob_token_ids": FieldDoc(
        "Report the log-probabilities of these tokens instead of the likeliest; needs logprobs.",
        schema={"minItems": 1, "maxItems": MAX_LOGPROB_TOKEN_IDS},
    ),
    "prompt_logprobs": _between(
        -1, None, f"Report each prompt token's, and so many others', unless streamed{_ALL}"
    ),
    "echo": FieldDoc("Put the prompt before the answer."),
    "skip_special_tokens": FieldDoc("Leave special tokens out of the text."),
    "spaces_between_special_tokens": FieldDoc("Where a tokenizer puts spaces between tokens."),
    "return_token_ids": FieldDoc("Report the ids of the prompt's and the answer's tokens."),
    "return_tokens_as_token_ids": FieldDoc('Spell tokens in logprobs as "token_id:7".'),
    "stream": FieldDoc("Answer with server-sent events, as the tokens come."),
    "stream_options": FieldDoc("How a stream reports usage; needs stream."),
    "StreamOptions.include_usage": FieldDoc(
        "One more event at the end, with the usage of the call."
    ),
    "StreamOptions.continuous_usage_stats": FieldDoc("Every event has the usage so far."),
    "include_obfuscation": _ignored("No padding is sent."),
    "include_reasoning": FieldDoc(
        "Whether the answer includes the reasoning before it.", schema={"default": True}
    ),
    "return_prompt_text": FieldDoc("Report the prompt as the chat template wrote it."),
    # --- the prompt ---
    "add_special_tokens": FieldDoc(
        "Whether the tokenizer puts its own special tokens around the text. Messages: not unless "
        "asked for, since the chat template writes them."
    ),
    "add_generation_prompt": FieldDoc("End the prompt where the assistant's turn begins."),
    "continue_final_message": FieldDoc("Leave the last message open, to be continued."),
    "chat_template_kwargs": FieldDoc("Variables for the chat template."),
    "documents": FieldDoc("For chat templates that take documents."),
    "reasoning_effort": FieldDoc(
        "For chat templates that take it; those that know only enable_thinking get false for "
        '"none", true for the others.'
    ),
    "chat_template": FieldDoc("Instead of the model's; needs --trust-request-chat-template."),
    "tools": FieldDoc("Functions that the model may call.", type=list[types.Tool] | None),
    "tool_choice": FieldDoc(
        "Whether it may call none, any (auto), must call one (required), or must call this one.",
        type=types.ToolChoice | None,
    ),
    "parallel_tool_calls": FieldDoc("False: at most one call.", schema={"default": True}),
    "functions": FieldDoc("The old form of tools.", type=list[types.Function] | None),
    "function_call": FieldDoc(
        "The old form of tool_choice.", type=types.FunctionChoice | None
    ),
    # --- scheduling ---
    "priority": FieldDoc("Lower is served earlier, with --scheduling-policy priority."),
    "cache_salt": FieldDoc("Share cached prefixes only with requests of the same salt."),
    # --- nothing to do here ---
    "request_id": _ignored("The answer's id is the server's own."),
    "service_tier": _ignored('There is one, "default".'),
    "stream_interval": _ignored("The server's --stream-interval counts."),
    "routed_experts_prompt_start": _ignored("No routed experts are returned."),
    "store": _ignored("Nothing is stored."),
    "prompt_cache_key": _ignored("Prefixes are cached by their tokens."),
    # --- not served ---
    "response_format": FieldDoc(
        "The answer is JSON, JSON of a schema, or free text with constrained parts."
    ),
    "JsonSchema.name": FieldDoc("Yours, for nothing here."),
    "JsonSchema.schema": FieldDoc("A JSON Schema of an object; without it any JSON object."),
    "JsonSchema.strict": _ignored("The answer is always held to the schema."),
    "json_schema": FieldDoc("The schema and its name."),
    "format": FieldDoc("What the answer is made of: xgrammar's structural tags."),
    "structures": FieldDoc("The older form: each with begin, schema and end."),
    "triggers": FieldDoc("The older form: texts that a structure begins with."),
    "structured_outputs": FieldDoc("What the whole answer must be: one of the six."),
    "json": FieldDoc("A JSON Schema, or its text."),
    "regex": FieldDoc("What the whole answer matches."),
    "choice": FieldDoc("One of these."),
    "grammar": FieldDoc("Lark or GBNF."),
    "json_object": FieldDoc("Any JSON object."),
    "structural_tag": FieldDoc("A structural tag, or its text."),
    "disable_any_whitespace": FieldDoc("JSON without optional white space."),
    "disable_additional_properties": FieldDoc("Objects hold what their schema lists."),
    "whitespace_pattern": FieldDoc("What may stand between the tokens of JSON."),
    "truncation_side": FieldDoc(
        'What truncate_prompt_tokens cuts off: the beginning ("left", the default) or the end '
        '("right").',
        schema={"enum": ["left", "right", None]},
    ),
    "verbosity": _refused('Except "medium".'),
    # --- tokens ---
    "token_ids": FieldDoc("The prompt.", schema={"minItems": 1}),
    "sampling_params": FieldDoc("The Python API's SamplingParams, with its names and defaults."),
    "SamplingParams.max_tokens": _between(
        1, None, "Most tokens of an answer; without it as many as the context has room for."
    ),
    "SamplingParams.logprobs": _between(
        -1, None, f"Report each token's log-probability and so many of the likeliest others'{_ALL}"
    ),
    "SamplingParams.structured_outputs": FieldDoc("What the answer's text must be."),
    "detokenize": FieldDoc("Make text too, which nothing reports; stop strings need it."),
    "GenerateRequest.request_id": FieldDoc("The answer carries it."),
    "TokenizeRequest.prompt": FieldDoc("Text to encode; or messages."),
    "TokenizeRequest.messages": FieldDoc(
        "A conversation to render with the chat template and encode.",
        type=list[types.Message] | None,
    ),
    "return_token_strs": FieldDoc("The text of each token too."),
    "lora_name": FieldDoc("The adapter's name, which is a model name in requests."),
    "lora_path": FieldDoc("Its folder on the server, below one of --lora-root."),
    "load_inplace": FieldDoc("In place of an adapter that has this name already."),
    "lora_int_id": _ignored("vLLM's: names tell adapters apart."),
    "tokens": FieldDoc("Ids to decode, special ones included."),
    # --- many of a kind ---
    **dict.fromkeys(_IGNORED, _ignored()),
    **dict.fromkeys(_REFUSED, _refused()),
    **dict.fromkeys(_NOT_TEXT, _refused("Text only.")),
    **dict.fromkeys(("ec_transfer_params", "kv_transfer_params"), _refused("There is one server.")),
    **dict.fromkeys(
        ("return_token_offsets", "return_mm_kwargs"), _ignored("vLLM's, of other routes.")
    ),
    **{
        f"guided_{name}": _refused(f"It is structured_outputs.{name} now.")
        for name in ("json", "regex", "choice", "grammar")
    },
    **MESSAGES_FIELD_DOCS,
    **RESPONSES_FIELD_DOCS,
}  # fmt: skip


def field_doc(kind: type, name: str) -> FieldDoc | None:
    """The doc of the type's own field, of one that it inherits, or of every field of that name."""
    keys = [f"{base.__name__}.{name}" for base in kind.__mro__]
    return next((FIELD_DOCS[key] for key in (*keys, name) if key in FIELD_DOCS), None)
