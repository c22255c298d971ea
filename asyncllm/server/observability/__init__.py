"""The operator's view: /metrics (metrics.py), spans (tracing.py), log lines (logs.py).

All three read records that the engine makes once per step; none of them is called per token.
"""
