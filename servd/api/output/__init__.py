"""What the model writes becomes content, reasoning and tool calls."""
