"""From the engine to a response: what streamed and whole answers share.

generation.py runs a call's engine requests and feeds a `Consumer`: chunks.py streams deltas as they
are, consumers.py parses or collects them, parts.py splits an answer into items or blocks.
"""
