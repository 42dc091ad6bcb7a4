"""Response templates as they are published, and answers that they take apart.

`golden.json` has what transformers makes of them. Made anew, with transformers >= 5.24 and without Motley:
``python tests/daemon/text/responses/cases.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("golden.json")

_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WITHIN = {"type": "function", "function": "{content}"}
_INKLING = {"name": "{content.name}", "arguments": "{content.args}"}
_THINK = {"open": "<think>", "close": "</think>"}
_ASSISTANT = "<|im_start|>assistant\n"

TEMPLATES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "defaults": {"role": "assistant"},
        "start_anchor": _ASSISTANT,
        "fields": {
            "reasoning_content": _THINK | {"content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _WITHIN,
            },
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>)", "content": "text"},
        },
    },
    "qwen3.5": {
        "version": 1,
        "start_anchor": _ASSISTANT,
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
                "transform": _NAMED,
            },
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
        },
    },
    "qwen3-coder": {
        "start_anchor": _ASSISTANT,
        "fields": {
            "thinking": _THINK,
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                    "merge_duplicates": True,
                },
                "transform": _NAMED,
            },
        },
    },
    "smollm": {
        "defaults": {"role": "assistant"},
        "start_anchor": _ASSISTANT,
        "fields": {
            "thinking": _THINK,
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _WITHIN,
            },
            "content": {"close": "<|im_end|>"},
        },
    },
    "gpt-oss": {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
            "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
            "tool_calls": {
                "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
        },
    },
    "gemma4": {
        "defaults": {"role": "assistant"},
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": _NAMED,
            },
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
        },
    },
    "cohere": {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "fields": {
            "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
            "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
            "tool_calls": {
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            },
        },
    },
    "ernie": {
        "start_anchor": "Assistant:",
        "fields": {
            "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            "content": {"open": "<response>\n", "close_pattern": r"\n?</response>"},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _WITHIN,
            },
        },
    },
    "inkling": {
        "start_anchor": "<|message_model|>",
        "fields": {
            "thinking": {
                "open_pattern": r"(?:<\|message_model\|>)?[^<]*<\|content_thinking\|>",
                "close": "<|end_message|>",
                "repeats": True,
                "join": "",
                "content_args": {"strip": False},
            },
            "content": {
                "open_pattern": r"(?:<\|message_model\|>)?[^<]*<\|content_text\|>",
                "close": "<|end_message|>",
                "repeats": True,
                "join": " / ",
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|message_model\|>)?[^<]*<\|content_invoke_tool_json\|>",
                "close": "<|end_message|>",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.args}"},
                },
            },
        },
    },
    "lfm": {
        "start_anchor": _ASSISTANT,
        "fields": {
            "tool_calls": {
                "open": "<|tool_call_start|>",
                "close": "<|tool_call_end|>",
                "content": "python-call-list",
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            },
            "content": {"close_pattern": r"\Z"},
        },
    },
    "lines": {
        "start_anchor_pattern": r"<bot(?: \w+)?>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"#call (?P<id>c\d+) (?P<name>\w+)\n",
                "close": ["#end", "#ended"],
                "repeats": True,
                "content": "kv-lines",
                "transform": {"type": "function", "id": "{id}"} | _NAMED,
            },
            "score": {"open": "<score>", "close": "</score>", "content": "int"},
            "content": {},
        },
    },
}

CASES: dict[str, tuple[str, str, str]] = {  # a template, the end of a prompt, an answer
    "hello": ("qwen3", "", "Hello! <3\n"),
    "thought": ("qwen3", "", "<think>\nHm, a <b> tag.\n</think>\n\nYes.<|im_end|>\n<|endoftext|>"),
    "thought begun by the prompt": (
        "qwen3",
        "<|im_start|>assistant\n<think>old</think>no<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "Hm.</think>\n\nYes.",
    ),
    "thought skipped by the prompt": ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes."),
    "endless thought": ("qwen3", "", "<think>Hm </thin"),
    "two calls": (
        "qwen3",
        "",
        'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call", "n": [1, {}]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>',
    ),
    "unusual call": ("qwen3", "", '<tool_call>{"arguments": {"a": "x"}, "name": "f"}</tool_call>'),
    "tags": (
        "qwen3.5",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "Two:\n\n<tool_call>\n<function=f>\n<parameter=a>\nx\ny\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>",
    ),
    "typed tags": (
        "qwen3-coder",
        "",
        '<think>Hm</think>\n<tool_call>\n<function=go>\n<parameter=at>\n[{"x": 1}]\n</parameter>\n'
        "<parameter=to>\nRome, it is\n</parameter>\n"
        "<parameter=to>\n2\n</parameter>\n<parameter=b>true</parameter>\n</function>\n</tool_call>",
    ),
    "smol": ("smollm", "", '<think>Hm.</think>\n<tool_call>{"name": "f", "arguments": {"a": "1"}}</tool_call>'),
    "smol text": ("smollm", "", "<think>\nHm.\n</think>\n It is so. <|im_end|>"),
    "channels": (
        "gpt-oss",
        "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>Hm,\n<x>.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    ),
    "call on a channel": (
        "gpt-oss",
        "",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>\n{"a": "<|call|", "n": 1}\n<|call|>',
    ),
    "notation": (
        "gemma4",
        "<|turn>model\n",
        '<|channel>thought\nHm.<channel|><|tool_call>call:f{a:<|"|>x, "y": {z}<|"|>,n:0,l:[<|"|>p<|"|>,true,null],'
        'o:{k:<|"|>v<|"|>}}<tool_call|><|tool_call>call:g{}<tool_call|><|tool_response>',
    ),
    "notation's text": ("gemma4", "<|turn>user\nHi<turn|>\n<|turn>model\n", " Well < said. <turn|>"),
    "listed calls": (
        "cohere",
        "",
        "<|START_THINKING|>Two.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "x"}},\n'
        '    {"tool_name": "g", "parameters": {}}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
    ),
    "response": ("cohere", "", "lost<|START_RESPONSE|> Well. <|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "thought from the start": ("ernie", "", "Hm\nhm.\n</think>\n\n<response>\nYes.\n</response>\n</s>"),
    "call after a thought": (
        "ernie",
        "",
        'Hm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>\n</s>',
    ),
    "blocks": (
        "inkling",
        "<|message_system|><|content_text|>Hi<|end_message|><|message_model|>",
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_thinking|> Hm!<|end_message|>"
        "<|message_model|><|content_text|> Look.<|end_message|><|message_model|><|content_text|>There.<|end_message|>"
        "<|message_model|>f"
        '<|content_invoke_tool_json|>{"name":"f","args":{"a":"x","n":{"m":1}}}<|end_message|><|end_sampling|>',
    ),
    "python": (
        "lfm",
        "",
        'Two. <|tool_call_start|>[f(a="it\'s", n=-1.5), g(l=[1, "b", None], o={"k": True})]<|tool_call_end|>',
    ),
    "lines": ("lines", "<bot 1>", "Well. #call c1 f\n a: x: y\nnone\nn: 7\n#ended<score> 3 </score>#call c2 g\n#end"),
}


def main() -> None:
    from transformers.utils.chat_parsing import parse_response

    golden = {
        name: parse_response(answer, TEMPLATES[template], prefix=prompt)
        for name, (template, prompt, answer) in CASES.items()
    }
    GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
