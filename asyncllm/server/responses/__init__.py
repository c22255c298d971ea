"""OpenAI's /v1/responses, by way of a chat request.

serving.py handles it, protocol.py has the request type, items.py reads input items, chat_request.py
translates, view.py and stream.py render, store.py keeps responses within bounds, openapi.py
describes them.
"""
