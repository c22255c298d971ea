"""Questions of the clients, and answers that the built-in model is known to give."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

MODEL = "tiny"
SUM: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
SUM_ANSWER = "12 + 30 = 42"
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
GET_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
WEATHER_ARGUMENTS = {"city": "Paris"}
WEATHER_RESULT = '{"temperature": 21, "condition": "sunny"}'
WEATHER_ANSWER = "It is sunny in Paris, with 21 degrees."
GREETING: list[Any] = [{"role": "user", "content": "Hello"}]
RECORD: list[Any] = [{"role": "user", "content": "Give me a person as JSON with name and age."}]


class Person(BaseModel):
    """Short, so that even a lost model comes to its end."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
