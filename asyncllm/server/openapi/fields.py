"""What the fields of requests mean: the words, ranges and shapes that their types cannot say.

A field means the same wherever it occurs, so one note serves every API; a note under "Type.field"
wins over the one under "field". `kind` is the promise of the whole server: a field does what its
note says, or cannot change the answer and is ignored, or is refused with a 400 naming it. Tests
hold the notes to the request types, the ranges to `SamplingParams`, the promise to the server.
"""

from __future__ import annotations

from typing import Literal

from asyncllm.param_checks import MAX_SEED
from asyncllm.repetition_params import RepetitionDetectionParams
from asyncllm.sampling_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
)
from asyncllm.server.chat.batch import MAX_CONVERSATIONS, REFUSED
from asyncllm.server.messages.openapi import MESSAGES_NOTES
from asyncllm.server.openapi import field_doc as types
from asyncllm.server.openapi.field_doc import Note
from asyncllm.server.openapi.field_doc import between as _between
from asyncllm.server.openapi.field_doc import ignored as _ignored
from asyncllm.server.openapi.field_doc import refused as _refused
from asyncllm.server.responses.openapi import RESPONSES_NOTES

NOTES: dict[str, Note] = {
    "model": Note("A name of /v1/models; without it the first one answers."),
    "messages": Note(
        "The conversation so far, oldest first, as the chat template takes it.",
        schema={"minItems": 1}, type=list[types.Message],
    ),
    "BatchChatRequest.messages": Note(
        "One conversation for each choice of the answer, in this order.",
        schema={"minItems": 1, "maxItems": MAX_CONVERSATIONS}, type=list[list[types.Message]],
    ),
    **{
        f"BatchChatRequest.{name}": _refused("One choice for each conversation, told whole.")
        for name in REFUSED
    },
    "prompt": Note("Text, or token ids, or a list of either: one answer for each."),
    # --- how many, how long ---
    "n": _between(1, MAX_N, "Answers for each prompt."),
    "best_of": _between(
        1, MAX_N, "Answers to generate, of which the n likeliest are returned; at least n. Not "
        "with stream. With use_beam_search: the width of the search."
    ),
    "use_beam_search": Note(
        "Search for the n likeliest answers instead of drawing them; a stream brings them at the "
        "end. What would change the scores is refused beside it."
    ),
    "length_penalty": _between(
        -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY,
        "Of a beam search: log-probability / length ** length_penalty is what counts.",
        default=1,
    ),
    "early_stopping": Note(
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
    "top_p": Note(
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
    "logit_bias": Note(
        "Token id to a number from -100 to 100 that is added to its logit.",
        schema={"maxProperties": MAX_LOGIT_BIAS_ENTRIES},
        type=dict[str, float] | None,
    ),
    "allowed_token_ids": Note(
        "Answer with these tokens only.", schema={"minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS}
    ),
    "bad_words": Note("Words that the answer must not hold.", schema={"maxItems": MAX_BAD_WORDS}),
    # --- the end ---
    "stop": Note(
        f"Up to {MAX_STOP_STRINGS} strings; the answer ends before the first that occurs.",
    ),
    "stop_token_ids": Note(
        "The answer ends with any of these tokens.", schema={"maxItems": MAX_STOP_TOKEN_IDS}
    ),
    "include_stop_str_in_output": Note("Keep what ended the answer in its text."),
    "ignore_eos": Note("Go on after the model's own end of text."),
    "repetition_detection": Note(
        "The answer ends where its last tokens are one pattern, min_count times in a row.",
        type=RepetitionDetectionParams | None,
    ),
    "thinking_token_budget": _between(
        -1, None, "Most tokens of reasoning; then it is ended. -1: no limit."
    ),
    # --- what the answer holds ---
    "logprobs": Note("Report the log-probability of each token of the answer."),
    "CompletionRequest.logprobs": _between(
        0, None, "Report each token's log-probability and so many of the likeliest others'."
    ),
    "top_logprobs": _between(0, None, "So many of the likeliest tokens too; needs logprobs."),
    "logprob_token_ids": Note(
        "Report the log-probabilities of these tokens instead of the likeliest; needs logprobs.",
        schema={"minItems": 1, "maxItems": MAX_LOGPROB_TOKEN_IDS},
    ),
    "prompt_logprobs": _between(
        0, None, "Report each prompt token's, and so many of the likeliest others'; no stream."
    ),
    "echo": Note("Put the prompt before the answer."),
    "skip_special_tokens": Note("Leave special tokens out of the text."),
    "spaces_between_special_tokens": Note("Where a tokenizer puts spaces between tokens."),
    "return_token_ids": Note("Report the ids of the prompt's and the answer's tokens."),
    "return_tokens_as_token_ids": Note('Spell tokens in logprobs as "token_id:7".'),
    "stream": Note("Answer with server-sent events, as the tokens come."),
    "stream_options": Note("How a stream reports usage; needs stream."),
    "StreamOptions.include_usage": Note("One more event at the end, with the usage of the call."),
    "StreamOptions.continuous_usage_stats": Note("Every event has the usage so far."),
    "include_obfuscation": _ignored("No padding is sent."),
    "include_reasoning": Note(
        "Whether the answer tells the reasoning before it.", schema={"default": True}
    ),
    "return_prompt_text": Note("Tell the prompt as the chat template wrote it."),
    # --- the prompt ---
    "add_special_tokens": Note(
        "Whether the tokenizer puts its own special tokens around the text. Messages: not unless "
        "asked for, since the chat template writes them."
    ),
    "add_generation_prompt": Note("End the prompt where the assistant's turn begins."),
    "continue_final_message": Note("Leave the last message open, to be continued."),
    "chat_template_kwargs": Note("Variables for the chat template."),
    "documents": Note("For chat templates that take documents."),
    "reasoning_effort": Note(
        "For chat templates that take it; those that know only enable_thinking get false for "
        '"none", true for the others.'
    ),
    "chat_template": Note("Instead of the model's; needs --trust-request-chat-template."),
    "tools": Note("Functions that the model may call.", type=list[types.Tool] | None),
    "tool_choice": Note(
        "Whether it may call none, any (auto), must call one (required), or must call this one.",
        type=types.ToolChoice | None,
    ),
    "parallel_tool_calls": Note("False: at most one call.", schema={"default": True}),
    "functions": Note("The old form of tools.", type=list[types.Function] | None),
    "function_call": Note(
        "The old form of tool_choice.", type=types.FunctionChoice | None
    ),
    # --- scheduling ---
    "priority": Note("Lower is served earlier, with --scheduling-policy priority."),
    "cache_salt": Note("Share cached prefixes only with requests of the same salt."),
    # --- nothing to do here ---
    "user": _ignored(),
    "metadata": _ignored(),
    "request_id": _ignored("The answer's id is the server's own."),
    "service_tier": _ignored('There is one, "default".'),
    "session_id": _ignored(),
    "stream_interval": _ignored("Every step has its event."),
    "return_token_offsets": _ignored("vLLM's, of other routes."),
    "return_mm_kwargs": _ignored("vLLM's, of other routes."),
    "routed_experts_prompt_start": _ignored("No routed experts are returned."),
    "store": _ignored("Nothing is stored."),
    "prediction": _ignored(),
    "prompt_cache_key": _ignored("Prefixes are cached by their tokens."),
    "prompt_cache_options": _ignored(),
    "prompt_cache_retention": _ignored(),
    "safety_identifier": _ignored(),
    # --- not served ---
    "response_format": Note(
        "The answer is JSON, JSON of a schema, or free text with constrained parts."
    ),
    "JsonSchema.name": Note("Yours, for nothing here."),
    "JsonSchema.description": _ignored(),
    "JsonSchema.schema": Note("A JSON Schema of an object; without it any JSON object."),
    "JsonSchema.strict": _ignored("The answer is always held to the schema."),
    "json_schema": Note("The schema and its name."),
    "format": Note("What the answer is made of: xgrammar's structural tags."),
    "structures": Note("The older form: each with begin, schema and end."),
    "triggers": Note("The older form: texts that a structure begins with."),
    "structured_outputs": Note("What the whole answer must be: one of the six."),
    "json": Note("A JSON Schema, or its text."),
    "regex": Note("What the whole answer matches."),
    "choice": Note("One of these."),
    "grammar": Note("Lark or GBNF."),
    "json_object": Note("Any JSON object."),
    "structural_tag": Note("A structural tag, or its text."),
    "disable_any_whitespace": Note("JSON without optional white space."),
    "disable_additional_properties": Note("Objects hold what their schema lists."),
    "whitespace_pattern": Note("What may stand between the tokens of JSON."),
    "guided_json": _refused("It is structured_outputs.json now."),
    "guided_regex": _refused("It is structured_outputs.regex now."),
    "guided_choice": _refused("It is structured_outputs.choice now."),
    "guided_grammar": _refused("It is structured_outputs.grammar now."),
    "truncation_side": _refused('Except "left".'),
    "watermarking": _refused(),
    "ec_transfer_params": _refused("There is one server."),
    "logits_processors": _refused(),
    "kv_transfer_params": _refused("There is one server."),
    "vllm_xargs": _refused(),
    "audio": _refused("Text only."),
    "modalities": _refused("Text only."),
    "moderation": _refused(),
    "verbosity": _refused('Except "medium".'),
    "web_search_options": _refused(),
    "mm_processor_kwargs": _refused("Text only."),
    "media_io_kwargs": _refused("Text only."),
    "CompletionRequest.media_io_kwargs": _ignored(),
    "suffix": _refused(),
    "prompt_embeds": _refused(),
    # --- tokens ---
    "token_ids": Note("The prompt.", schema={"minItems": 1}),
    "sampling_params": Note("The Python API's SamplingParams, with its names and defaults."),
    "SamplingParams.max_tokens": _between(
        1, None, "Most tokens of an answer; without it as many as the context has room for."
    ),
    "SamplingParams.logprobs": _between(
        0, None, "Report each token's log-probability and so many of the likeliest others'."
    ),
    "SamplingParams.structured_outputs": Note("What the answer's text must be."),
    "detokenize": Note("Make text too, which nothing reports; stop strings need it."),
    "GenerateRequest.request_id": Note("The answer carries it."),
    "assistant_tokens_mask": _ignored(),
    "token_offsets": _ignored(),
    "features": _refused("Text only."),
    "TokenizeRequest.prompt": Note("Text to encode; or messages."),
    "TokenizeRequest.messages": Note(
        "A conversation to render with the chat template and encode.",
        type=list[types.Message] | None,
    ),
    "return_token_strs": Note("The text of each token too."),
    "tokens": Note("Ids to decode, special ones included."),
    **MESSAGES_NOTES,
    **RESPONSES_NOTES,
}  # fmt: skip


def note_of(kind: type, name: str) -> Note | None:
    return NOTES.get(f"{kind.__name__}.{name}") or NOTES.get(name)
