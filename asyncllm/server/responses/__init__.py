"""OpenAI's newer API, /v1/responses, by way of a chat request, with a bounded store."""
