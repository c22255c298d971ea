"""POST /v1/chat/completions and its batch.

serving.py handles them, and makes an engine call of any chat request; response.py renders the body
and the chunks; conversation.py joins items or blocks into messages, for the other APIs.
"""
