"""The messages of a chat, checked: what a client has sent becomes roles and texts, or is refused."""

from __future__ import annotations


class ChatError(ValueError):
    """A chat that is malformed, or that the model's chat template refuses; the message says what is wrong where.

    Attributes:
        code: stable and in snake case, for clients; ``invalid_request`` unless it is more special.
    """

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


def check_messages(messages: object) -> list[dict[str, str]]:
    """Check a chat as the orchestrator passes it on.

    Args:
        messages: should be a non-empty list of ``{"role": str, "content": str}``, each with a ``"name"`` or without;
            other keys must be empty. The orchestrator has joined contents that came in parts.

    Raises:
        ChatError: they are of another form.
    """
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages must be a non-empty list")
    chat = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ChatError(f"{where} must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ChatError(f"{where}.role must be a non-empty string")
        if not isinstance(content, str):
            raise ChatError(f"{where}.content must be a string")
        # Clients send an answer back with all its fields, most of them empty.
        unknown = [key for key, value in message.items() if key not in ("role", "content", "name") and value]
        if unknown:
            raise ChatError(f"{where} has keys that are not supported: {', '.join(map(str, unknown))}")
        checked = {"role": role, "content": content}
        if message.get("name"):
            checked["name"] = str(message["name"])
        chat.append(checked)
    return chat
