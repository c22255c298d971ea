"""How families of models write reasoning and tool calls, and how that is read as it streams."""
