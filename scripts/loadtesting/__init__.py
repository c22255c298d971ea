"""A load test of any OpenAI-compatible server over HTTP with streaming; no asyncllm in it.

Reading order: `record` (the vocabulary), `settings`, `workload` and `arrival` (what is sent and
when), `client` (sends and stamps), `stream` (bytes become a record), `worker` (the processes that
do both), `measure` (records become figures), `run` (one run); on top of it `experiments`, `knee`
and `ceiling`. `table`, `plots` and `page` show it; `mock_server` is the server to try it on.
"""
