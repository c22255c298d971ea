"""One Chromium for the tests of a process; without one they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.page.browser import Chromium, find_chromium


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    browser = Chromium(program)
    yield browser
    browser.close()
