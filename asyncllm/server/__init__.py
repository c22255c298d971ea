"""The OpenAI-compatible server. A streaming chat request walks through it in this order:

app.py and routes.py (middlewares, table of routes), chat/serving.py (the handler), http/bodies.py
(a typed request), inputs/ (prompt, grammar, sampling parameters: a `Call`), service.py (`stream`),
outputs/generation.py (engine requests), outputs/chunks.py (deltas to frames), http/sse.py (writes).
"""
