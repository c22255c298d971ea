"""The built-in model runs on one thread here too."""

import tests.server.conftest  # noqa: F401
