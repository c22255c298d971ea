"""The process that compiles modules before the start beside which it runs comes to import them.

A script for an interpreter without site-packages, so nothing else of ours can be imported here;
compile_ahead.py starts it. It runs none of the modules: Python's own loader reads, compiles and
writes them, so that what lies in the cache is what an import would have left there, and the imports
in their code are followed. What one importing thread needs first is compiled first. It ends when
all is compiled, or when its input does: with the process that started it.
"""
