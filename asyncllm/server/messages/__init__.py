"""Anthropic's API: /v1/messages and /v1/messages/count_tokens, by way of a chat request.

serving.py handles them, protocol.py has the request types, chat_request.py translates them,
message.py renders messages, events and errors, openapi.py describes them.
"""
