"""asyncllm: an LLM inference engine and server in one asyncio process."""
