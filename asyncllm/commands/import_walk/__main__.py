"""The way in: `python -I -S` knows this file alone.

Its bytecode, which running it does not leave, is the sign that everything is compiled.
"""

import os
import sys
from importlib import import_module

sys.path.append(os.path.dirname(os.path.dirname(__file__)))
sys.dont_write_bytecode = True  # of these few files: a full disk would cut it, for all later starts
share_out = import_module("import_walk.share_out")
sys.dont_write_bytecode = False
share_out.main(__file__, sys.argv[1:])
