"""The messages of a chat, checked: what a client has sent becomes roles and texts, or is refused."""

from __future__ import annotations


class ChatError(ValueError):
    """A chat that is malformed, or that the model's chat template refuses; the message says what is wrong where."""


def check_messages(messages: object) -> list[dict[str, str]]:
    """Check a chat as a client has sent it.

    Args:
        messages: should be a non-empty list of ``{"role": str, "content": str | [{"type": "text", "text": str}]}``,
            each with a ``"name"`` or without; other keys must be empty.

    Returns:
        The same messages, every content as one string.

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
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatError(f"{where}.role must be a non-empty string")
        # Clients send an answer back with all its fields, most of them empty.
        unknown = [key for key, value in message.items() if key not in ("role", "content", "name") and value]
        if unknown:
            raise ChatError(f"{where} has keys that are not supported: {', '.join(map(str, unknown))}")
        checked = {"role": role, "content": _check_content(where, message.get("content"))}
        if message.get("name"):
            checked["name"] = str(message["name"])
        chat.append(checked)
    return chat


def _check_content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{where}.content must be a string or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatError(
                f'{where}.content: this model reads text only, parts like {{"type": "text", "text": "..."}}'
            )
        texts.append(part["text"])
    return "".join(texts)
