"""Chats are rendered in a process of its own, which ends if the template does not."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psutil
import pytest

from motley.daemon.node.answering import rendering
from motley.daemon.node.answering.rendering import TemplateApart
from motley.daemon.text.messages import ChatError
from motley.daemon.text.templates import ChatTemplate

ENDLESS = (
    "{% for m in messages %}{% if m.content == 'hang' %}"
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ bos_token }}{{ m.content }}{% endfor %}"
)
"""A template that hangs over one message."""


def ask(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@contextmanager
def apart(source: str) -> Iterator[TemplateApart]:
    with closing(TemplateApart(ChatTemplate(source))) as template:
        yield template


def pid_of(template: TemplateApart) -> int:
    assert template._process is not None
    return template._process.pid


def test_chats_are_rendered_as_here_by_one_process() -> None:
    with apart(ENDLESS) as template:
        pids = set()
        for content in ("a", "two\nlines", 'é🚀"\\', "\ud800", "x" * 3_000_000):
            assert template.render(ask(content), {"bos_token": "<s>"}) == f"<s>{content}"
            pids.add(pid_of(template))
    assert len(pids) == 1
    assert not psutil.pid_exists(pids.pop())


def test_what_the_template_refuses_is_told_and_others_are_rendered() -> None:
    with apart("{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}ok") as template:
        with pytest.raises(ChatError, match="refuses these messages: one at a time"):
            template.render(ask("a") * 2, {})
        assert template.render(ask("a"), {}) == "ok"


def test_a_chat_that_never_ends_is_refused_in_time_and_the_next_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 0.5)
    with apart(ENDLESS) as template:
        began = time.monotonic()
        with pytest.raises(ChatError, match=r"the model's chat template has not ended within 0 s"):
            template.render(ask("hang"), {})
        assert time.monotonic() - began < 20
        monkeypatch.setattr(rendering, "RENDER_S", 60.0)  # of the next process
        assert template.render(ask("a"), {"bos_token": "<s>"}) == "<s>a"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's memory")
@pytest.mark.parametrize("limit", ["MEMORY_BYTES", "TEXT"])
def test_a_chat_that_fills_memory_is_refused_and_the_next_is_rendered(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "MEMORY_BYTES", 300 << 20)
    large = "'a' * 10**9" if limit == "MEMORY_BYTES" else f"'a' * {rendering.TEXT + 1}"
    with apart("{% if messages[0].content == 'large' %}{{ " + large + " }}{% endif %}ok") as template:
        with pytest.raises(ChatError, match=r"too much memory|more than 16777216 characters"):
            template.render(ask("large"), {})
        assert template.render(ask("a"), {}) == "ok"


def test_a_process_that_is_killed_is_told_and_started_anew() -> None:
    with apart("ok") as template:
        assert template.render(ask("a"), {}) == "ok"
        psutil.Process(pid_of(template)).kill()
        with pytest.raises(ChatError, match="broke its process"):
            template.render(ask("a"), {})
        assert template.render(ask("a"), {}) == "ok"


def test_closing_ends_a_chat_that_is_being_rendered_and_refuses_others() -> None:
    template = TemplateApart(ChatTemplate(ENDLESS))
    assert template.render(ask("a"), {"bos_token": ""}) == "a"
    pid = pid_of(template)
    errors: list[str] = []

    def render() -> None:
        try:
            template.render(ask("hang"), {})
        except ChatError as error:
            errors.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    before = psutil.Process(pid).cpu_times().user
    while psutil.Process(pid).cpu_times().user < before + 0.1:  # it is at it
        time.sleep(0.01)
    template.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "broke its process" in errors[0]
    assert not psutil.pid_exists(pid)
    with pytest.raises(ChatError, match="session was closed"):
        template.render(ask("a"), {})
