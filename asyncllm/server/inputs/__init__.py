"""From a request to the engine: what the chat, completions and tokens APIs share.

refusals.py refuses fields, prompts.py renders messages and tools, output_format.py chooses parser
and grammar, sampling.py makes `SamplingParams`; all of it is one `Call` (call.py).
"""
