"""From the engine to a response: what streamed and whole responses share.

generation.py runs a call's engine requests and feeds a `Consumer`: chunks.py streams deltas as they
are, consumers.py parses or collects them, parts.py splits a message into items or blocks.
"""
