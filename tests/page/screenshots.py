"""Takes the picture in docs/ again: `python -m tests.page.screenshots`. No test.

The built-in model on the CPU, a chat by hand, and sixteen streams beside it so that the dashboard
has something to show.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine, SamplingParams
from tests.page.browser import Chromium, Tab, find_chromium, tab
from tests.server.http_harness import serving

PICTURE = Path(__file__).parents[2] / "docs" / "page-light.png"
ENGINE = {"num_gpu_blocks_override": 800, "swap_space": 0, "device": "cpu"}
QUESTIONS = ("What is the capital of France?", "Tell me a story about a submarine.")
DONE = "document.querySelector('.message.assistant:last-child:not(.waiting)')"
NUM_STREAMS = 16


async def main() -> None:
    program = find_chromium()
    assert program, "needs Chromium"
    chromium = Chromium(program)
    engine: Any = AsyncLLMEngine("tiny", **ENGINE)
    try:
        async with serving(engine) as server, tab(chromium) as opened:
            await opened.resize(1280, 800)
            await opened.open(server.url)
            await chat(opened)
            await opened.evaluate("document.activeElement.blur()")
            load = [asyncio.create_task(stream_for_ever(engine, i)) for i in range(NUM_STREAMS)]
            await asyncio.sleep(20)  # the dashboard fills
            await take(opened)
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    finally:
        chromium.close()


async def stream_for_ever(engine: AsyncLLMEngine, number: int) -> None:
    """One user after the other, with a pause, half of them with a common beginning."""
    shared = "The animals of the forest met at the lake to talk about the winter. " * 6
    for i in itertools.count(number, NUM_STREAMS):
        text = f"{shared if i % 2 else ''}Tell me a story about number {i}."
        params = SamplingParams(max_tokens=60 + 37 * i % 200, ignore_eos=True, seed=i)
        await engine.generate([{"role": "user", "content": text}], params)
        await asyncio.sleep(0.1 * (i % 7))


async def chat(opened: Tab) -> None:
    settings = {"temperature": 0.7, "seed": 4, "logprobs": True}
    await opened.evaluate(f"localStorage['asyncllm.settings'] = {json.dumps(json.dumps(settings))}")
    for question in QUESTIONS:
        await opened.click("#prompt")
        await opened.type(question)
        await opened.press("Enter")
        await opened.until(DONE)


async def take(opened: Tab) -> None:
    await asyncio.sleep(0.6)
    PICTURE.write_bytes(await opened.screenshot())
    print(PICTURE, PICTURE.stat().st_size)


if __name__ == "__main__":
    asyncio.run(main())
