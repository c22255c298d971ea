"""A conversation made of items or blocks, however many there are."""

from __future__ import annotations

from asyncllm.server.chat.conversation import Conversation

PART = {"type": "text", "text": "x"}


def test_what_was_thought_said_and_called_in_one_turn_is_one_message() -> None:
    conversation = Conversation()
    conversation.add_system("Be brief.")
    conversation.add_system([PART])
    conversation.add_user("Hi")
    for word in ("one", "", "two"):
        conversation.add_reasoning(word)
    assert conversation.messages[-1]["reasoning_content"] == "one\ntwo"
    conversation.add_reasoning("three")
    conversation.add_text("Well,")
    conversation.add_text([PART])
    conversation.add_user("And?")
    conversation.add_reasoning("four")
    system, _, turn, _, last = conversation.messages
    assert system["content"] == [{"type": "text", "text": "Be brief."}, PART]
    assert turn["reasoning_content"] == "one\ntwo\nthree"
    assert turn["content"] == [{"type": "text", "text": "Well,"}, PART]
    assert last == {"role": "assistant", "content": "", "reasoning_content": "four"}


def test_a_long_turn_grows_in_place() -> None:
    """60,000 blocks in one turn took 7 s while each was a new list."""
    conversation = Conversation()
    conversation.add_system([dict(PART)])
    conversation.add_system([dict(PART)])
    system = conversation.messages[0]["content"]
    conversation.add_system([dict(PART)])
    conversation.add_text([dict(PART)])
    said = conversation.messages[1]["content"]
    conversation.add_text([dict(PART)])
    assert conversation.messages[0]["content"] is system and len(system) == 3
    assert conversation.messages[1]["content"] is said and len(said) == 2
