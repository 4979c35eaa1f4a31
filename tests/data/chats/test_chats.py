"""Conversations: every format becomes one shape, every reason has a case on each side, shards hold what is trained."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import ChatCollectionRecipe, ContractRecipe, IngestRecipe
from infra.step import Output, Record, step
from model.text.chat_template import render_to_train
from tasks.data.chats.chat_formats import conversations_of
from tasks.data.chats.chat_tools import MalformedChatError
from tasks.data.chats.collect_chats import collect_chats
from tasks.data.chats.written_thoughts import THOUGHTS
from tasks.data.privacy.masked_chats import mask_chats
from tasks.data.privacy.personal_data import KINDS, find_spans, mask_text
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.prompts.prompt_records import prompt_of
from tasks.data.readers.record_lines import record_lines
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.records.documents import document_id
from tasks.data.shards.shard_chats import shard_chats
from tasks.data.shards.token_shard import open_shard
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tasks.data.tokenizer.train_tokenizer import train_tokenizer
from tasks.data.validate_contract import validate_contract
from tests.support.data_inputs import (
    RECIPE,
    RESOURCES,
    SHARED_DATA,
    SYNTHESIS,
    compute,
    in_partitions,
    prose,
    rows,
    write_jsonl,
)

CALL = {"name": "f", "arguments": {"x": 1}}
OBJECT = {"type": "function", "function": {"name": "f", "parameters": {}}}


def turns(*pairs: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in pairs]


def summary(record) -> list[tuple]:
    """(role, content, reasoning, calls) of each message of each conversation."""
    return [
        [(m["role"], m["content"], m["reasoning"], m["tool_calls"]) for m in messages]
        for messages, _ in conversations_of(record)
    ]


def plain(*pairs: tuple[str, str]) -> list[tuple]:
    return [(role, content, "", []) for role, content in pairs]


ASKED = plain(("user", "q"), ("assistant", "a"))
HARMONY = "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>final<|message|>a"
FRAME = "Below is an instruction.\n\n### Instruction:\n"
FORMATS = {
    "messages": ({"messages": turns(("user", "q"), ("assistant", "a"))}, ASKED),
    "history": ({"history": turns(("user", "q"), ("assistant", "a"))}, ASKED),
    "conversations": ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, ASKED),
    "system beside": (
        {"system": "s", "messages": turns(("user", "q"), ("assistant", "a"))},
        [*plain(("system", "s")), *ASKED],
    ),
    "displayed": (
        {"messages_display": "user: q\nNote: x\nassistant: a"},
        plain(("user", "q\nNote: x"), ("assistant", "a")),
    ),
    "instruction": ({"instruction": "q", "input": "", "output": "a"}, ASKED),
    "instruction with input": (
        {"instruction": "q", "input": "i", "output": "a"},
        plain(("user", "q\n\ni"), ("assistant", "a")),
    ),
    "prompt": ({"prompt": "q", "answer": "a"}, ASKED),
    "framed prompt": ({"prompt": f"{FRAME}q\n\n### Response:", "answer": "a"}, ASKED),
    "framed prompt with input": (
        {"prompt": f"{FRAME}q\n\n### Input:\ni\n\n### Response:", "answer": "a"},
        plain(("user", "q\n\ni"), ("assistant", "a")),
    ),
    "parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "q"}]},
                {"role": "assistant", "content": [{"type": "reasoning", "value": "r"}, {"type": "text", "text": "a"}]},
            ]
        },
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "thinking inside": (
        {"messages": turns(("user", "q"), ("assistant", "<think>\nr</think>\n\na"))},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "thinking beside": (
        {"messages": [*turns(("user", "q")), {"role": "assistant", "content": "a", "reasoning_content": "r"}]},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "thinking beside, as gpt-oss's": (
        {"messages": [*turns(("user", "q")), {"role": "assistant", "content": "a", "thinking": "r"}]},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "thinking in a channel, as gpt-oss's": (
        {
            "messages": [
                *turns(("user", "q")),
                {"role": "assistant", "channel": "analysis", "content": "r"},
                {"role": "assistant", "channel": "final", "content": "a"},
            ]
        },
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "thinking in a turn of its own": (
        {"messages": turns(("user", "q"), ("reasoning", "r"), ("assistant", "a"))},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "thinking in details, as OpenRouter's": (
        {
            "messages": [
                *turns(("user", "q")),
                {
                    "role": "assistant",
                    "content": "a",
                    "reasoning_details": [
                        {"type": "reasoning.text", "text": "r"},
                        {"type": "reasoning.encrypted", "data": "x"},
                    ],
                },
            ]
        },
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "result as a list of objects": (
        {
            "messages": [
                *turns(("user", "q")),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": [{"a": 1}, {"text": "b", "a": 2}]},
                *turns(("assistant", "a")),
            ]
        },
        [
            ("user", "q", "", []),
            ("assistant", "", "", [CALL]),
            ("tool", '[{"a": 1}, {"text": "b", "a": 2}]', "", []),
            ("assistant", "a", "", []),
        ],
    ),
    "thinking beside the answer to messages": (
        {"prompt": turns(("user", "q")), "response": "a", "reasoning_content": "r"},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "thinking switched off": ({"input": "q", "output": "a", "reasoning": "off"}, ASKED),
    "call as text": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "o"},
                {"from": "gpt", "value": "a"},
            ]
        },
        [("user", "q", "", []), ("assistant", "", "", [CALL]), ("tool", "o", "", []), ("assistant", "a", "", [])],
    ),
    "call with parameters": (
        {
            "messages": [
                *turns(("user", "q")),
                {"role": "assistant", "tool_calls": [{"name": "f", "parameters": {"x": 1}}]},
                *turns(("tool", "o"), ("assistant", "a")),
            ]
        },
        [("user", "q", "", []), ("assistant", "", "", [CALL]), ("tool", "o", "", []), ("assistant", "a", "", [])],
    ),
    "call with fields that are null": (
        {
            "messages": [
                *turns(("user", "q")),
                {
                    "role": "assistant",
                    "tool_calls": [{"function": None, "name": "f", "arguments": None, "parameters": {"x": 1}}],
                },
                *turns(("tool", "o"), ("assistant", "a")),
            ]
        },
        [("user", "q", "", []), ("assistant", "", "", [CALL]), ("tool", "o", "", []), ("assistant", "a", "", [])],
    ),
    "settings of a chat template": (
        {
            "messages": turns(("user", "q"), ("assistant", "a")),
            "chat_template_kwargs": {"custom_instructions": "s", "enable_thinking": False},
        },
        [*plain(("system", "s")), *ASKED],
    ),
    "call with arguments as text": (
        {
            "messages": [
                *turns(("user", "q")),
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
                },
                *turns(("tool", "o"), ("tool", "p"), ("assistant", "a")),
            ]
        },
        [
            ("user", "q", "", []),
            ("assistant", "", "", [CALL]),
            ("tool", "o", "", []),
            ("tool", "p", "", []),
            ("assistant", "a", "", []),
        ],
    ),
    "a text and its call in two turns": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
                {"from": "function_call", "value": json.dumps([CALL, CALL])},
            ]
        },
        [("user", "q", "", []), ("assistant", "a", "", [CALL, CALL])],
    ),
    "parts of servers": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "r"},
                        {"type": "output_text", "text": "a"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                    ],
                },
            ]
        },
        [("user", "q", "", []), ("assistant", "a", "r", [CALL])],
    ),
    "function and its result": (
        {
            "messages": [
                *turns(("user", "q")),
                {"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                {"role": "function", "name": "f", "content": {"y": 2}},
                *turns(("assistant", "b")),
            ]
        },
        [("user", "q", "", []), ("assistant", "a", "", [CALL]), *plain(("tool", '{"y": 2}'), ("assistant", "b"))],
    ),
    "parts of servers with results": (
        {
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "input_schema": {}}],
            "messages": [
                *turns(("user", "q")),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                        {"type": "tool_use", "id": "2", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "second"}]},
                        {"type": "tool_result", "tool_use_id": "1", "content": "first"},
                        {"type": "text", "text": "r"},
                    ],
                },
                *turns(("assistant", "a")),
            ],
        },
        [
            *plain(("system", "s"), ("user", "q")),
            ("assistant", "", "", [CALL, CALL]),
            *plain(("tool", "first"), ("tool", "second"), ("user", "r"), ("assistant", "a")),
        ],
    ),
    "calls as answers": (
        {"query": "q", "tools": json.dumps([OBJECT["function"]]), "answers": json.dumps([CALL])},
        [("user", "q", "", []), ("assistant", "", "", [CALL])],
    ),
    "results in another order than their calls": (
        {
            "messages": [
                *turns(("user", "q")),
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", **CALL}, {"id": "2", **CALL}]},
                {"role": "tool", "tool_call_id": "2", "content": "second"},
                {"role": "tool", "tool_call_id": "1", "content": "first"},
                *turns(("assistant", "a")),
            ]
        },
        [
            ("user", "q", "", []),
            ("assistant", "", "", [CALL, CALL]),
            *plain(("tool", "first"), ("tool", "second"), ("assistant", "a")),
        ],
    ),
    "system beside and inside": (
        {"system": "s", "messages": turns(("system", "s"), ("user", "q"), ("assistant", "a"))},
        [*plain(("system", "s")), *ASKED],
    ),
    "developer": (
        {"messages": turns(("developer", "s"), ("User", "q"), ("model", "a"))},
        [*plain(("system", "s")), *ASKED],
    ),
    "empty system": ({"messages": turns(("system", ""), ("user", "q"), ("assistant", "a"))}, ASKED),
    "messages as text": ({"messages": json.dumps(turns(("user", "q"), ("assistant", "a")))}, ASKED),
    "messages as Python writes them": ({"messages": str(turns(("user", "q"), ("assistant", "a")))}, ASKED),
    "prompt as text of turns": ({"prompt": json.dumps(turns(("user", "q"))), "response": "a"}, ASKED),
    "an answer that is text of turns": (
        {"prompt": "q", "response": '[{"role": "user"}]'},
        plain(("user", "q"), ("assistant", '[{"role": "user"}]')),
    ),
    "history before an instruction": (
        {"system": "s", "history": [["q", "a"]], "instruction": "b", "input": "", "output": "c"},
        [*plain(("system", "s")), *ASKED, *plain(("user", "b"), ("assistant", "c"))],
    ),
    "empty history": ({"history": [], "instruction": "q", "output": "a"}, ASKED),
    "context": ({"instruction": "q", "context": "i", "response": "a"}, plain(("user", "q\n\ni"), ("assistant", "a"))),
    "completion": ({"prompt": "q", "completion": "a"}, ASKED),
    "prompt and completion of messages": (
        {"prompt": turns(("user", "q")), "completion": turns(("assistant", "a"))},
        ASKED,
    ),
    "question and response": (
        {"system_prompt": "s", "question": "q", "response": "a"},
        [*plain(("system", "s")), *ASKED],
    ),
    "thinking inside an answer": (
        {"instruction": "q", "output": "<think>\nr\n</think>\n\na"},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "thinking beside an answer": (
        {"input": "q", "reasoning_content": "r", "content": "a", "score": 10},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "s1K": (
        {"question": "q", "solution": "x", "thinking_trajectories": ["r"], "attempt": "a"},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "s1K-1.1": (
        {
            "question": "q",
            "solution": "x",
            "gemini_attempt": "y",
            "deepseek_thinking_trajectory": "r",
            "deepseek_attempt": "a",
        },
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "medical reasoning": (
        {"Question": "q", "Complex_CoT": "r", "Response": "a"},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "marked thoughts": (
        {
            "system": "Put it so: <|begin_of_thought|> {thought} <|end_of_thought|>",
            "conversations": [
                {"from": "user", "value": "q"},
                {
                    "from": "assistant",
                    "value": "<|begin_of_thought|>\n\nr\n\n<|end_of_thought|>\n\n"
                    "<|begin_of_solution|>\n\na\n\n<|end_of_solution|>",
                },
            ],
        },
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    **{
        f"thoughts marked by {begins}": (
            {"messages": turns(("user", "q"), ("assistant", f"{begins}r{ends}\na"))},
            [("user", "q", "", []), ("assistant", "a", "r", [])],
        )
        for begins, ends in THOUGHTS[1:]
    },
    "Harmony in an answer": (
        {"prompt": "q", "completion": f"{HARMONY}<|return|>"},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "Harmony in a turn": (
        {
            "messages": turns(
                ("system", "You are x.\n# Valid channels: analysis, commentary, final. Use them."),
                ("user", "What is <|channel|>?"),
                ("assistant", f"<|start|>assistant{HARMONY}"),
                ("user", "b"),
                ("assistant", "<|channel|> is a mark."),
            )
        },
        [
            ("user", "What is <|channel|>?", "", []),
            ("assistant", "a", "r", []),
            *plain(("user", "b"), ("assistant", "<|channel|> is a mark.")),
        ],
    ),
    "Harmony in a text": (
        {
            "text": "<|start|>developer<|message|>s<|end|><|start|>user<|message|>q<|end|>"
            f"<|start|>assistant{HARMONY}<|end|><|start|>user<|message|>b<|end|><|start|>assistant<|message|>c<|return|>"
        },
        [
            *plain(("system", "s"), ("user", "q")),
            ("assistant", "a", "r", []),
            *plain(("user", "b"), ("assistant", "c")),
        ],
    ),
    "a prompt in Harmony": (
        {"prompt": "<|start|>user<|message|>q<|end|><|start|>assistant", "completion": HARMONY},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "a worked solution and its result": ({"question": "q", "solution": "a", "answer": "7"}, ASKED),
    "messages and an answer": (
        {"input": turns(("user", "q")), "output": "<think>r</think>a", "system_prompt": "s"},
        [*plain(("system", "s"), ("user", "q")), ("assistant", "a", "r", [])],
    ),
    "turns with their answers": (
        {"conversation": [{"input": "q", "output": "a"}, {"input": "b", "output": "c"}]},
        [*ASKED, *plain(("user", "b"), ("assistant", "c"))],
    ),
    "turns of a human and an assistant": ({"conversation": [{"human": "q", "assistant": "a"}]}, ASKED),
    "speakers in an instruction": (
        {"instruction": "Human:q\nAssistant:a\nHuman:b\nAssistant:", "input": "", "output": "c"},
        [*ASKED, *plain(("user", "b"), ("assistant", "c"))],
    ),
    "speakers after one line end and after two": (
        {"instruction": "Human:q\nAssistant:a\n\nHuman:b\n\nAssistant:", "output": "c"},
        [*ASKED, *plain(("user", "b"), ("assistant", "c"))],
    ),
    "speakers that an answer quotes": (
        {"text": "\n\nHuman: q\n\nAssistant: a\nHuman: x"},
        plain(("user", "q"), ("assistant", "a\nHuman: x")),
    ),
    "Phi in a text": ({"text": "<|user|>\nq<|end|>\n<|assistant|>\na<|end|>\n<|endoftext|>"}, ASKED),
    "ChatML in a text": (
        {
            "text": "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
            "<|im_start|>assistant\na<|im_end|>\n"
        },
        [*plain(("system", "s")), *ASKED],
    ),
    "Llama 3 in a text": (
        {
            "text": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>"
        },
        ASKED,
    ),
    "Llama 2 in a text": (
        {"text": "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\nq [/INST] a </s><s>[INST] b [/INST] c </s>"},
        [*plain(("system", "s")), *ASKED, *plain(("user", "b"), ("assistant", "c"))],
    ),
    "Gemma in a text": (
        {"text": "<bos><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n"},
        ASKED,
    ),
    "Zephyr in a text": ({"text": "<|system|>\n</s>\n<|user|>\nq</s>\n<|assistant|>\na</s>"}, ASKED),
    "GLM in a text": (
        {"text": "[gMASK]<sop><|user|>\nq<|assistant|>\n<think>r</think>\na"},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "Guanaco": ({"text": "### Human: q### Assistant: a"}, ASKED),
    "a prompt in ChatML": (
        {"prompt": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "completion": "a"},
        ASKED,
    ),
    "a text beside its parts": ({"text": "### Human: x### Assistant: y", "instruction": "q", "output": "a"}, ASKED),
    "names in a chat": (
        {
            "system": "SYSTEM: s",
            "chat": "USER: q\n\n\nASSISTANT: a <|endoftext|>\n\n\nUSER: b\n\n\nASSISTANT: c <|endoftext|>",
        },
        [*plain(("system", "s")), *ASKED, *plain(("user", "b"), ("assistant", "c"))],
    ),
    "texts in turn": ({"data": ["q", "a", "b", "c"]}, [*ASKED, *plain(("user", "b"), ("assistant", "c"))]),
    "conversations of texts": ({"conversations": ["q", "a"]}, ASKED),
    "inputs and targets": ({"inputs": "q", "targets": "a"}, ASKED),
    "input and target": ({"kind": "k", "input": "q", "target": "a"}, ASKED),
    "generated solution": ({"problem": "q", "generated_solution": "a", "expected_answer": "1"}, ASKED),
    "query": ({"query": "q", "response": "a", "images": [], "image": None}, ASKED),
    "input and output": ({"input": "q", "output": "a"}, ASKED),
    "Kimi in a text": (
        {
            "text": "<|im_system|>system<|im_middle|>s<|im_end|><|im_user|>user<|im_middle|>q<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>a<|im_end|>"
        },
        [*plain(("system", "s")), *ASKED],
    ),
    "a question and its answer beside what was said before": (
        {"history": turns(("user", "b"), ("assistant", "c")), "query": "q", "response": "a"},
        [*plain(("user", "b"), ("assistant", "c")), *ASKED],
    ),
    "an answer beside the turns before it": (
        {"messages": turns(("user", "q")), "reasoning": "r", "answer": "a"},
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "a trajectory": (
        {
            "trajectory": [
                {"role": "system", "system_prompt": "s", "text": None},
                *({"role": role, "system_prompt": None, "text": text} for role, text in (("user", "q"), ("ai", "a"))),
            ]
        },
        [*plain(("system", "s")), *ASKED],
    ),
    "Olmo's calls": (
        {
            "messages": [
                {"role": "system", "content": "s", "functions": json.dumps([OBJECT["function"]])},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "function_calls": "f(x=1)\nf(x=null)"},
                {"role": "environment", "content": "o"},
                {"role": "assistant", "content": "a"},
            ]
        },
        [
            *plain(("system", "s"), ("user", "q")),
            ("assistant", "", "", [CALL, {"name": "f", "arguments": {"x": None}}]),
            *plain(("tool", "o"), ("assistant", "a")),
        ],
    ),
    "an answer in marks after its reasoning": (
        {
            "system": "Answer as <think> reasoning </think> <answer> answer </answer>.",
            "conversations": ["q", "<think>r</think> <answer> a </answer>"],
        },
        [("user", "q", "", []), ("assistant", "a", "r", [])],
    ),
    "an answer in marks without reasoning": (
        {"conversations": ["q", "<answer>a</answer>"]},
        plain(("user", "q"), ("assistant", "<answer>a</answer>")),
    ),
    "an answer beside a worse solution": ({"question": "q", "r1_generation": "a", "solution": "b"}, ASKED),
    "a wanted answer": ({"prompt": "q", "completion": "a", "label": True}, ASKED),
    "cut behind the last answer": ({"messages": turns(("user", "q"), ("assistant", "a"), ("user", "b"))}, ASKED),
}


HERMES = """You are a careful clerk.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What a system says in files for Qwen; those for Hermes say nearly the same."""
SPECIFIED = json.dumps(OBJECT)
WRITTEN = {
    "JSON": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "Python": "<tool_call>\n{'arguments': {'x': 1}, 'name': 'f'}\n</tool_call>",
    "with a text": '<think>r</think>\n\na\n<tool_call>\n{"name": "f", "arguments": "{\\"x\\": 1}"}\n</tool_call>',
    "one in each line": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n{"name": "f"}\n</tool_call>',
    "a list": '<tool_call>[{"name": "f", "arguments": {"x": 1}}]</tool_call>',
    "several": '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
    "GLM": "a\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "GLM without arguments": "<tool_call>f\n</tool_call>",
    "Qwen3-Coder": "a\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "Qwen3-Coder without a mark": "a\n<function=f>\n<parameter=x>1</parameter>\n</function>",
    "Mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "VvvODy9mT"}, {"name": "f"}]</s>',
    "Mistral's later ones": 'a[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{"x": 1}[TOOL_CALLS]f[ARGS]{}',
    "Llama 3": '<|python_tag|>{"name": "f", "parameters": {"x": 1}}<|eom_id|>',
    "Llama 3 without a mark": '{"name": "f", "parameters": {"x": 1}}',
    "Nemotron": '<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}]</TOOLCALL>',
    "Python without brackets": "f(x=1)",
    "no call": '{"name": "f"}',
    "no call but code": "f(1) gives 2",
    "ToolACE": """[f(x=1), f(y="a) [f(x=2)]", z=[true, {'k': None}])]""",
}
READ = {
    "JSON": ("", "", [CALL]),
    "Python": ("", "", [CALL]),
    "with a text": ("a", "r", [CALL]),
    "one in each line": ("", "", [CALL, {"name": "f", "arguments": {}}]),
    "a list": ("", "", [CALL]),
    "several": ("", "", [CALL, {"name": "f", "arguments": {}}]),
    "GLM": ("a", "", [{"name": "f", "arguments": {"x": "1"}}]),
    "GLM without arguments": ("", "", [{"name": "f", "arguments": {}}]),
    "Qwen3-Coder": ("a", "", [{"name": "f", "arguments": {"x": "1"}}]),
    "Qwen3-Coder without a mark": ("a", "", [{"name": "f", "arguments": {"x": "1"}}]),
    "Mistral": ("", "", [CALL, {"name": "f", "arguments": {}}]),
    "Mistral's later ones": ("a", "", [CALL, {"name": "f", "arguments": {}}]),
    "Llama 3": ("", "", [CALL]),
    "Llama 3 without a mark": ("", "", [CALL]),
    "Nemotron": ("", "", [CALL]),
    "Python without brackets": ("", "", [CALL]),
    "no call": ('{"name": "f"}', "", []),
    "no call but code": ("f(1) gives 2", "", []),
    "ToolACE": ("", "", [CALL, {"name": "f", "arguments": {"y": "a) [f(x=2)]", "z": [True, {"k": None}]}}]),
}


UNTOLD = ("Mistral", "Mistral's later ones", "Llama 3", "Nemotron")
"""Refused where no tools are described."""


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_in_a_text_are_calls_where_tools_are_described(name):
    messages = turns(("system", HERMES.format(tools=SPECIFIED)), ("user", "q"), ("assistant", WRITTEN[name]))
    ((read, tools),) = conversations_of({"messages": messages})
    assert [message["role"] for message in read] == ["system", "user", "assistant"] and tools == [OBJECT]
    assert read[0]["content"] == "You are a careful clerk."
    assert (read[2]["content"], read[2]["reasoning"], read[2]["tool_calls"]) == READ[name]
    assert [tools for _, tools in conversations_of({"messages": messages[1:], "tools": [OBJECT]})] == [[OBJECT]]
    try:
        untold = conversations_of({"messages": messages[1:]})[0][0]
        assert untold[1]["tool_calls"] == [] and untold[1]["content"] in WRITTEN[name], "nobody described a tool"
    except MalformedChatError as error:
        assert error.reason == "unsupported_tool_call" and name in UNTOLD


@pytest.mark.parametrize(
    "described",
    [
        SPECIFIED,
        json.dumps([OBJECT["function"]]),
        f"{SPECIFIED}\n{SPECIFIED}",
        "{'name': 'f', 'parameters': {}}",
        json.dumps({"name": "f", "input_schema": {}}),
    ],
)
def test_a_systems_list_of_tools_is_read_and_its_explanation_is_not_trained_on(described):
    told = turns(("system", HERMES.format(tools=described)), ("user", "q"), ("assistant", "a"))
    ((messages, tools),) = conversations_of({"messages": told})
    assert tools == [OBJECT] * (described.count("name") if "\n" in described else 1)
    text = "".join(segment.text for segment in render_to_train(messages, tools))
    assert "You are a careful clerk." in text and "json object" not in text and text.count("<tools>") == 2
    told[0]["content"] = "You are f's clerk. " + told[0]["content"].partition("XML tags:\n")[2].replace(
        "\n\nFor", " For"
    )
    assert [message["role"] for message in conversations_of({"messages": told})[0][0]] == [
        "system",
        "user",
        "assistant",
    ]


def test_a_record_of_toolace_has_tools_and_calls():
    """Functions whose names hold spaces, described in prose; what no call can be is left a text."""
    named = {"name": "Market Trends API", "description": "d", "parameters": {}}
    told = (
        "You are an expert in composing functions.\nHere is a list of functions in JSON format that you can invoke:\n"
        f"{json.dumps([named])}. \nShould you decide to return the function call(s), \nPut it in the format of "
        "[func1(params_name=params_value)]\n\nNO other text MUST be included."
    )
    said = [("system", told), ("user", "q"), ("assistant", '[Market Trends API(of="us", days=2)]'), ("tool", "o")]
    record = {"conversations": [{"from": role, "value": text} for role, text in [*said, ("assistant", "[Market]")]]}
    ((messages, tools),) = conversations_of(record)
    assert tools == [{"type": "function", "function": named}]
    assert messages[0]["content"] == "You are an expert in composing functions."
    assert messages[2]["tool_calls"] == [{"name": "Market Trends API", "arguments": {"of": "us", "days": 2}}]
    assert (messages[2]["content"], messages[4]["content"]) == ("", "[Market]")


def test_tools_that_kimi_declares_are_tools():
    """As Toucan has them, whose calls are written as Python writes a dictionary."""
    declared = f"<|im_system|>tool_declare<|im_middle|>{json.dumps([OBJECT])}<|im_end|>"
    said = turns(("system", declared), ("user", "q"), ("tool_call", str({**CALL, "arguments": '{"x": 1}'})))
    ((messages, tools),) = conversations_of({"messages": [*said, *turns(("tool_response", "o"), ("assistant", "a"))]})
    assert tools == [OBJECT] and [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [CALL]


def test_hermes_results_in_a_text_are_results():
    given = "<tool_response>\n{}\n</tool_response>"
    for role, is_read in (("tool", True), ("user", True), ("user", False)):
        texts = [given.format("o"), given.format("p")] if is_read else ["b <tool_response>o</tool_response>"]
        messages = [
            *turns(("system", HERMES.format(tools=SPECIFIED)), ("user", "q"), ("assistant", WRITTEN["several"])),
            *turns((role, "\n".join(texts)), ("assistant", "a")),
        ]
        if is_read:
            ((_, _, _, *read),) = summary({"messages": messages})
            assert read == plain(("tool", "o"), ("tool", "p"), ("assistant", "a"))
        else:
            with pytest.raises(MalformedChatError, match="call_without_result"):
                conversations_of({"messages": messages})


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_becomes_the_same_messages(name):
    record, expected = FORMATS[name]
    assert summary(record) == [expected]


MARKS = [
    ("weight", 0, 1),
    ("weight", "0", "1"),
    ("loss", False, True),
    ("train", False, None),
    ("training", False, True),
    ("mask", True, False),
]


@pytest.mark.parametrize(("mark", "no", "yes"), MARKS)
def test_an_answer_that_is_marked_so_is_read_and_not_trained_on(mark, no, yes):
    marked = turns(("user", "q"), ("assistant", "bad"), ("user", "r"), ("assistant", "good"), ("user", "s"))
    marked[1][mark], marked[3][mark] = no, yes
    ((messages, _),) = conversations_of({"messages": [*marked, {"role": "assistant", "content": "cut", mark: no}]})
    assert [message["content"] for message in messages] == ["q", "bad", "r", "good"]
    segments = render_to_train(messages, [])
    assert "".join(segment.text for segment in segments if segment.is_trained) == "\ngood<|user|>"
    unmarked: list[dict] = [{key: part for key, part in message.items() if key != "is_trained"} for message in messages]
    both = render_to_train(unmarked, [])  # pyright: ignore[reportArgumentType]
    assert "".join(segment.text for segment in segments) == "".join(segment.text for segment in both)
    with pytest.raises(MalformedChatError, match="no_answer"):
        conversations_of({"messages": marked[:2]})


def test_a_record_with_several_instances_gives_several_conversations():
    record = {"instruction": "q", "instances": [{"input": "", "output": "a"}, {"input": "i", "output": "b"}]}
    assert summary(record) == [ASKED, plain(("user", "q\n\ni"), ("assistant", "b"))]


def test_calls_of_a_parquet_file_have_the_arguments_of_their_own_function(tmp_path):
    """Parquet gives every object of a column the fields of all of them, null where it has none."""
    called = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "weather", "arguments": {"city": "Oslo"}}]
    tools = [
        {
            "type": "function",
            "function": {
                "name": call["name"],
                "parameters": {"properties": {key: {"type": "string"} for key in call["arguments"]}},
            },
        }
        for call in called
    ]
    records = [
        {
            "messages": [
                {"role": "user", "content": "Please"},
                {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
            ],
            "tools": tools,
            "question": "Please",
            "answer": [call],
        }
        for call in called
    ]
    path = tmp_path / "calls.parquet"
    pq.write_table(pa.Table.from_pylist(records), path)
    with path.open("rb") as file:
        read = [line.record for line in record_lines("parquet", "x", str(path), "", HashingReader(file))]
    assert [conversations_of(record)[0][0][1]["tool_calls"] for record in read] == [[call] for call in called]
    assert [conversations_of(record)[0][1] for record in read] == [tools, tools]
    assert [prompt_of("tools", record) for record in read] == [prompt_of("tools", record) for record in records]


def test_tools_are_described_in_one_way():
    messages = {"messages": turns(("user", "q"), ("assistant", "a"))}
    for given in ([OBJECT], json.dumps([OBJECT]), [OBJECT["function"]], json.dumps([OBJECT["function"]])):
        assert conversations_of({**messages, "tools": given})[0][1] == [OBJECT]
    assert conversations_of({**messages, "tools": ""})[0][1] == []


CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
MALFORMED = {
    "unknown_role": {"messages": turns(("user", "q"), ("oracle", "a"))},
    "tool_result_without_call": {
        "messages": turns(("user", "q"), ("assistant", "a"), ("tool", "o"), ("assistant", "b"))
    },
    "call_without_result": {"messages": [*turns(("user", "q")), CALLS, *turns(("user", "b"), ("assistant", "a"))]},
    "no_answer": {"messages": turns(("user", "q"))},
    "broken_tool_call": {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{f"}]},
    "broken_tool_call in a text": {
        "tools": [OBJECT],
        "messages": turns(("user", "q"), ("assistant", "<tool_call>\n{f: 1}\n</tool_call>")),
    },
    "broken_tool_call that is cut": {
        "tools": [OBJECT],
        "messages": turns(("user", "q"), ("assistant", '<tool_call>\n{"name": "f"}')),
    },
    "broken_tools in a text": {
        "messages": turns(("system", HERMES.format(tools="{f: 1}")), ("user", "q"), ("assistant", "a"))
    },
    "broken_tools": {"tools": "{", "messages": turns(("user", "q"), ("assistant", "a"))},
    "broken_reasoning": {"messages": turns(("user", "q"), ("assistant", "r</think>a"))},
    "broken_reasoning in two blocks": {
        "messages": turns(("user", "q"), ("assistant", "<think>r</think>b<think>s</think>a"))
    },
    "broken_tool_call as Python writes it": {
        "tools": [OBJECT],
        "messages": turns(("user", "q"), ("assistant", "[f(1)]")),
    },
    "broken_tool_call of Olmo": {"messages": [*turns(("user", "q")), {"role": "assistant", "function_calls": "f(x)"}]},
    "broken_tool_call of Qwen3-Coder": {
        "tools": [OBJECT],
        "messages": turns(("user", "q"), ("assistant", "<function=f>1</function>")),
    },
    "unsupported_tool_call": {
        "tools": [OBJECT],
        "messages": turns(("user", "q"), ("assistant", "a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f")),
    },
    "unsupported_tool_call by programs": {
        "messages": turns(("user", "q"), ("assistant", "a")),
        "chat_template_kwargs": {"python_tools": ["def f(): ..."]},
    },
    "unwanted_answer": {"prompt": "q", "completion": "a", "label": False},
    "no_question": {"input": "-", "output": "<think>r</think>a"},
    "broken_reasoning that is cut": {"messages": turns(("user", "q"), ("assistant", "<think>r"))},
    "unsupported_channel": {
        "prompt": "q",
        "completion": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
    },
    "broken_turn": {"messages": ["q", {"role": "assistant", "content": "a"}]},
    "broken_turn in another field": {"messages": [{"role": "user", "says": "q"}, *turns(("assistant", "a"))]},
    "broken_turn without a text": {"messages": [{"role": "user", "content": [{"q": "q"}]}, *turns(("assistant", "a"))]},
    "unsupported_part": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {}}]},
            *turns(("assistant", "a")),
        ]
    },
    "unsupported_part beside the turns": {"images": ["x.png"], "messages": turns(("user", "q"), ("assistant", "a"))},
    "no_conversation": {"text": "q"},
}


@pytest.mark.parametrize(
    "places",
    [
        {"functions": [OBJECT["function"]]},
        {"available_tools": json.dumps([OBJECT])},
        {"chat_template_kwargs": {"xml_tools": [json.dumps(OBJECT)]}},
        {"messages": [{"role": "system", "content": "s", "tools": [OBJECT]}]},
    ],
)
def test_functions_are_described_in_several_places(places):
    told = turns(("user", "q"), ("assistant", "a"))
    ((_, tools),) = conversations_of({**places, "messages": [*places.get("messages", []), *told]})
    assert tools == [OBJECT]


@pytest.mark.parametrize("reason", MALFORMED)
def test_every_malformed_record_has_its_reason(reason):
    with pytest.raises(MalformedChatError) as refused:
        conversations_of(MALFORMED[reason])
    assert refused.value.reason == reason.partition(" ")[0] and refused.value.detail


@pytest.mark.parametrize(
    "record",
    [
        {"messages": turns(("assistant", "a"))},
        {"messages": turns(("user", "q"), ("assistant", ""))},
        {"instruction": "q", "output": None},
        {"messages_display": "user: q\nassistant: None\nuser: r\nassistant: a"},
    ],
)
def test_an_answer_is_something_that_is_said_to_a_user(record):
    with pytest.raises(MalformedChatError, match="no_answer"):
        conversations_of(record)


def test_what_stands_before_the_first_displayed_turn_has_no_known_role():
    with pytest.raises(MalformedChatError, match="unknown_role"):
        conversations_of({"messages_display": "customer: q\nassistant: a"})


def test_a_displayed_dialogue_that_leaves_its_calls_out_is_no_example_of_calling():
    with pytest.raises(MalformedChatError, match="tool_result_without_call"):
        conversations_of({"messages_display": "user: q\nassistant: None\ntool: o\nassistant: a"})


LIMIT = 400
QUESTION = " ".join(prose(3).split()[:20])


def record_of(text: str, answer: str) -> dict:
    return {"instruction": text, "input": "", "output": answer}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Web text, a benchmark, and conversations of which some are long, twice there, in the benchmark or malformed."""
    directory = tmp_path_factory.mktemp("corpus")
    write_jsonl(directory / "web.jsonl", [{"text": prose(seed)} for seed in range(40)])
    write_jsonl(directory / "bench.jsonl", [{"question": QUESTION, "answer": "none"}])
    chats = [record_of(f"Question {number}?", prose(100 + number)[:100]) for number in range(50)]
    chats += [record_of("Long?", "x" * (LIMIT - 6)), record_of("Longer?", "x" * (LIMIT - 7)), chats[0]]
    chats += [record_of(QUESTION, "a"), record_of(" ".join(QUESTION.split()[:12]), "a"), MALFORMED["unknown_role"]]
    write_jsonl(directory / "chats.jsonl.gz", [*chats, MALFORMED["tool_result_without_call"]])
    with open(directory / "other.jsonl", "w") as file:
        file.write(
            '{"instruction": "q", "output": "Other."}\n{"instruction"\n{"instruction": "\\ud800", "output": "a"}\n'
        )
    (directory / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n  - {files: bench.jsonl, role: evaluation}\n  - {files: web.jsonl, role: pretrain, "
        "domain: web}\n"
        "  - {files: '*.jsonl*', role: sft, licence: CC0, kind: made}\n"
    )
    return directory


def collection(max_rejected_share: float = 0.2, **changes) -> ChatCollectionRecipe:
    chats = RECIPE.chats.model_copy(
        update={"max_chat_chars": LIMIT, "max_rejected_share": max_rejected_share, **changes}
    )
    return RECIPE.chat_collection.model_copy(update={"chats": chats})


def collect(sources, root, count: int = 2, recipe=None) -> dict:
    ingest = IngestRecipe(max_record_bytes=10**6, max_source_bytes=10**6, max_rejected_share=0.1)
    ingested = compute(ingest_documents, root, sources=sources, recipe=ingest, resources=RESOURCES)
    synthetic = compute(
        synthesize_problems, root, recipe=SYNTHESIS.model_copy(update={"num_chats": 60, "thinking_share": 0.5})
    )
    given = {
        "synthetic": synthetic,
        "ingested": ingested,
        "recipe": recipe or collection(),
        "resources": in_partitions(count),
    }
    return {
        "synthetic": synthetic,
        "ingested": ingested,
        "chats": compute(collect_chats, root, sources=sources, **given),
    }


@pytest.fixture(scope="module")
def collected(directory, tmp_path_factory):
    return collect(list_sources(directory), tmp_path_factory.mktemp("chats"))


def test_each_reason_drops_its_conversation_and_leaves_its_neighbour(collected):
    chats, record = collected["chats"], collected["chats"].record
    assert record.dropped == {"exact_duplicate": 1, "overlaps_evaluation_text": 1, "too_long": 1}
    assert record.rejected == {"broken_json": 1, "not_utf8": 1, "tool_result_without_call": 1, "unknown_role": 1}
    assert record.chats_by_collection == {"*.jsonl*": 53, "synthetic/arithmetic-chats": 60}
    kept = {json.loads(row["messages"])[0]["content"] for row in rows(chats, "chats/*.parquet")}
    assert {"Long?", " ".join(QUESTION.split()[:12]), "q"} <= kept and not {"Longer?", QUESTION} & kept
    assert record.training_chats + record.validation_chats == record.num_chats == 113


def test_a_large_collection_leaves_the_small_ones_their_share(directory, collected, tmp_path):
    capped = collect(list_sources(directory), tmp_path, recipe=collection(max_per_collection=53))["chats"].record
    assert capped.chats_by_collection["*.jsonl*"] == 53
    num_made = capped.chats_by_collection["synthetic/arithmetic-chats"]
    assert 40 < num_made < 60 and capped.dropped == collected["chats"].record.dropped | {
        "collection_full": 60 - num_made
    }


def test_conversations_that_are_nearly_alike_are_held_out_together(tmp_path):
    """Pairs of answers of which one changes a word; two files, so that no pair comes of one record."""
    texts = [prose(seed) for seed in range(60)]
    changed = [text.replace(text.split()[30], "otherwise", 1) for text in texts]
    for name, answers in (("one.jsonl", texts), ("two.jsonl", changed)):
        write_jsonl(
            tmp_path / "data" / name,
            [{"prompt": f"Tell me {n}.", "answer": answer} for n, answer in enumerate(answers)],
        )
    write_jsonl(tmp_path / "data" / "text.jsonl", [{"text": prose(99)}])
    roles = "  - {files: '{one,two}.jsonl', role: sft}\n  - {files: text.jsonl, role: pretrain}\n"
    (tmp_path / "data" / "glm46-data.yaml").write_text(f"version: 1\nentries:\n{roles}")
    made = collect(
        list_sources(tmp_path / "data"), tmp_path, recipe=collection(max_chat_chars=10**5, validation_share=0.3)
    )["chats"]
    sides: dict[str, list[str]] = {}
    for row in rows(made, "chats/*.parquet"):
        if row["source"] in ("one.jsonl", "two.jsonl"):
            sides.setdefault(json.loads(row["messages"])[0]["content"], []).append(row["split"])
    assert len(sides) == 60 and {len(values) for values in sides.values()} == {2}
    assert all(len(set(values)) == 1 for values in sides.values())
    assert 8 <= sum(values[0] == "validation" for values in sides.values()) <= 30


def test_dropped_conversations_name_what_stays_or_what_they_overlap_with(collected):
    kept = {row["id"]: row for row in rows(collected["chats"], "chats/*.parquet")}
    dropped = {row["reason"]: row for row in rows(collected["chats"], "dropped.parquet")}
    (item,) = rows(collected["ingested"], "evaluation/*.parquet")
    assert dropped["overlaps_evaluation_text"]["kept_id"] == item["id"]
    assert dropped["exact_duplicate"]["id"] > dropped["exact_duplicate"]["kept_id"]
    assert json.loads(kept[dropped["exact_duplicate"]["kept_id"]]["messages"])[0]["content"] == "Question 0?"


def test_ids_offsets_and_origin_lead_back_to_the_record(collected, directory):
    data = gzip.decompress((directory / "chats.jsonl.gz").read_bytes())
    for row in rows(collected["chats"], "chats/*.parquet"):
        assert row["id"] == document_id(row["source"], row["offset"], row["piece"])
        if row["source"] == "chats.jsonl.gz":
            record = json.loads(data[row["offset"] :].splitlines()[0])
            assert json.loads(row["messages"])[0]["content"] == record["instruction"]
            assert (row["licence"], row["kind"], row["collection"]) == ("CC0", "made", "*.jsonl*")


def test_too_many_malformed_records_stop_with_file_offset_reason_and_fix(directory, tmp_path):
    expected = (
        r"4 of 120 conversations are malformed .*chats\.jsonl\.gz at byte \d+: unknown_role \(turn 1 has role "
        r"'oracle'.*role ignore"
    )
    with pytest.raises(ValueError, match=expected):
        collect(list_sources(directory), tmp_path, recipe=collection(max_rejected_share=0.03))


def test_a_source_that_changes_is_named(directory, tmp_path):
    listed = list_sources(directory)
    changed = replace(
        listed, files=tuple(replace(f, sha256="0" * 64) if f.name == "other.jsonl" else f for f in listed.files)
    )
    with pytest.raises(ValueError, match=r"other\.jsonl changed while it was read"):
        collect(changed, tmp_path)


def test_without_conversations_in_the_sources_those_of_the_problems_are_enough(directory, tmp_path):
    listed = list_sources(directory)
    made = collect(replace(listed, files=tuple(file for file in listed.files if file.role != "sft")), tmp_path)
    record = made["chats"].record
    assert (record.num_sources, record.num_chats, record.dropped, record.rejected) == (0, 60, {}, {})
    made_chats = {row["id"]: row["messages"] for row in rows(made["synthetic"], "chats.parquet")}
    kept_chats = {row["id"]: row["messages"] for row in rows(made["chats"], "chats/*.parquet")}
    assert {identity: json.loads(text) for identity, text in made_chats.items()} == {
        identity: json.loads(text) for identity, text in kept_chats.items()
    }


def test_nothing_left_to_train_on_is_refused(directory, tmp_path):
    with pytest.raises(
        ValueError, match=r"none of 120 conversations is left to train on .*raise chats\.max_chat_chars"
    ):
        collect(list_sources(directory), tmp_path, recipe=collection(max_chat_chars=1))


# personal data

MAIL, PHONE = "jane@posteo.de", "415-555-2671"


def masked(*messages: dict, keeps_numbers: bool = False) -> tuple[list, dict[str, int]]:
    ((messages_out, counts),) = mask_chats([list(messages)], [keeps_numbers], KINDS)
    return messages_out, dict(counts)


def test_what_a_message_says_thinks_and_calls_with_is_masked_and_nothing_else():
    call = {
        "name": f"mail_{MAIL}",
        "arguments": {MAIL: [{"to": MAIL}, 4155552671, None, True, 1.5], "text": f"Call {PHONE}"},
    }
    said = {"role": "assistant", "content": f"{MAIL} and {PHONE}.", "reasoning": f"To {MAIL}", "tool_calls": [call]}
    masked_messages, counts = masked({"role": "user", "content": f"I am {MAIL}"}, said, *turns(("tool", "done")))
    kept = {
        "name": call["name"],
        "arguments": {MAIL: [{"to": "<EMAIL>"}, 4155552671, None, True, 1.5], "text": "Call <PHONE>"},
    }
    assert masked_messages == [
        {"role": "user", "content": "I am <EMAIL>"},
        {"role": "assistant", "content": "<EMAIL> and <PHONE>.", "reasoning": "To <EMAIL>", "tool_calls": [kept]},
        {"role": "tool", "content": "done"},
    ]
    assert list(masked_messages[1]) == list(said) and counts == {"email": 4, "phone": 2}


def test_json_in_a_text_stays_json_and_prose_in_brackets_is_prose():
    inner = {"rows": [f"Mail:\n{MAIL}", PHONE, 4155552671, "ä"], "inner": json.dumps({"at": MAIL})}
    (answer,), counts = masked({"role": "tool", "content": json.dumps(inner)})
    expected = {"rows": ["Mail:\n<EMAIL>", "<PHONE>", 4155552671, "ä"], "inner": json.dumps({"at": "<EMAIL>"})}
    assert json.loads(answer["content"]) == expected and counts == {"email": 2, "phone": 1}
    for text in ("{'to': 'jane@posteo.de'}", f"[1] {MAIL}", "[" * 100_000 + MAIL):
        assert masked({"role": "tool", "content": text})[0][0]["content"] == text.replace(MAIL, "<EMAIL>")
    untouched = '{"b":1,  "a": "Nobody"}'
    assert masked({"role": "tool", "content": untouched})[0][0]["content"] is untouched


def test_problems_and_programs_keep_their_numbers():
    talk = turns(("user", f"His number is {PHONE}, {MAIL}."))
    assert masked(*talk)[0][0]["content"] == "His number is <PHONE>, <EMAIL>."
    assert masked(*talk, keeps_numbers=True)[0][0]["content"] == f"His number is {PHONE}, <EMAIL>."


def test_each_text_is_masked_as_if_it_stood_alone():
    texts = [f"{PHONE}", "Phone:", "4515986", MAIL, f"Fax {MAIL}", "x@", "posteo.de"]
    alone = [mask_text(text, find_spans([text])[0]) for text in texts]
    chats = [turns(("user", text), ("assistant", other)) for text, other in pairwise(texts)]
    together = mask_chats(chats, [False] * len(chats), KINDS)
    assert [[message["content"] for message in messages] for messages, _ in together] == [
        list(pair) for pair in pairwise(alone)
    ]


@pytest.fixture(scope="module")
def personal(tmp_path_factory):
    """Three conversations that differ in a number alone, as talk and as mathematics, and one that a benchmark with an
    address asks."""
    directory = tmp_path_factory.mktemp("personal")
    write_jsonl(directory / "web.jsonl", [{"text": prose(seed)} for seed in range(40)])
    asked = f"{' '.join(QUESTION.split()[:11])} {MAIL} {' '.join(QUESTION.split()[11:16])}"
    write_jsonl(directory / "bench.jsonl", [{"question": asked, "answer": "none"}])
    called = [record_of(f"My number is 415-555-267{digit}.", "Noted.") for digit in range(3)]
    write_jsonl(
        directory / "talk.jsonl", [*called, record_of("Who is it?", f"It is {MAIL}, or {MAIL}."), record_of(asked, "a")]
    )
    write_jsonl(directory / "problems.jsonl", called)
    (directory / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n  - {files: bench.jsonl, role: evaluation}\n  - {files: web.jsonl, role: pretrain, "
        "domain: web}\n"
        "  - {files: talk.jsonl, role: sft}\n  - {files: problems.jsonl, role: sft, kind: math}\n"
    )
    return collect(list_sources(directory), tmp_path_factory.mktemp("masked"))


def test_conversations_that_differ_in_personal_data_alone_are_duplicates_unless_they_are_problems(personal):
    record, chats = personal["chats"].record, rows(personal["chats"], "chats/*.parquet")
    # Masked before its overlap was looked up, the benchmark's question would have been two runs too short to match.
    assert record.dropped == {"exact_duplicate": 2, "overlaps_evaluation_text": 1}
    texts = {row["source"]: [] for row in chats}
    for row in sorted(chats, key=lambda row: row["offset"]):
        texts[row["source"]].append([message["content"] for message in json.loads(row["messages"])])
    assert texts["talk.jsonl"] == [["My number is <PHONE>.", "Noted."], ["Who is it?", "It is <EMAIL>, or <EMAIL>."]]
    assert [first for first, _ in texts["problems.jsonl"]] == [
        f"My number is 415-555-267{digit}." for digit in range(3)
    ]


def test_what_was_masked_is_counted_per_conversation_that_stays(personal):
    record = personal["chats"].record
    chats = {row["id"]: row for row in rows(personal["chats"], "chats/*.parquet")}
    counted = {row["id"]: row for row in rows(personal["chats"], "masked.parquet")}
    assert (record.num_masked_chats, record.masked) == (2, {**dict.fromkeys(KINDS, 0), "email": 2, "phone": 1})
    for identity, row in chats.items():
        masks = {kind: row["messages"].count(f"<{kind.upper()}>") for kind in KINDS}
        assert masks == {kind: counted.get(identity, dict.fromkeys(KINDS, 0))[kind] for kind in KINDS}
        assert row["num_bytes"] == len(f"{row['messages']}\n{row['tools']}".encode())


class ToyTexts(Record):
    num_documents: int


@step(content=("documents/*.parquet",))
def write_texts(*, output: Output) -> ToyTexts:
    """What a tokenizer can be trained on."""
    texts = [prose(seed) for seed in range(60)]
    same = {"split": "train", "domain": "web", "language": "en", "lang": ""}
    made = [
        {
            "id": document_id("texts", number, 0),
            "text": text,
            "num_chars": len(text),
            "num_bytes": len(text.encode()),
            **same,
        }
        for number, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(made), output.path("documents/part-00000.parquet"))
    return ToyTexts(num_documents=len(texts))


@pytest.fixture(scope="module")
def sharded(collected, tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    documents = compute(write_texts, root)
    recipe = RECIPE.tokenizer.model_copy(update={"num_ordinary_tokens": 300, "sample_chars": 10**6})
    tokenizer = compute(train_tokenizer, root, documents=documents, recipe=recipe, resources=RESOURCES)
    shards = compute(
        shard_chats, root, chats=collected["chats"], tokenizer=tokenizer, recipe=RECIPE.shards, resources=RESOURCES
    )
    return {**collected, "tokenizer": tokenizer, "chat_shards": shards}


def test_shards_hold_the_rendered_conversations_and_what_is_trained(sharded):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(sharded["tokenizer"].path("tokenizer.json")))
    record, directory = sharded["chat_shards"].record, sharded["chat_shards"].directory("shards")
    assert record.shards == ("chat-00000",) and record.domains == {"chat-00000": "chat"}
    shard = open_shard(directory / "chat-00000.bin")
    mask = np.fromfile(directory / "chat-00000.mask", bool)
    assert len(mask) == len(shard.tokens) == record.num_tokens and int(np.sum(mask)) == record.num_trained_tokens
    chats = {row["id"]: row for row in rows(sharded["chats"], "chats/*.parquet") if row["split"] == "train"}
    sidecar = rows(sharded["chat_shards"], "shards/*.parquet")
    assert [row["id"] for row in sidecar] == sorted(chats) and record.num_documents == len(chats)
    for row in sidecar:
        tokens = slice(shard.starts[row["sequence"]], shard.starts[row["sequence"]] + row["num_tokens"])
        segments = render_to_train(json.loads(chats[row["id"]]["messages"]), json.loads(chats[row["id"]]["tools"]))
        assert tokenizer.decode(shard.tokens[tokens].tolist(), skip_special_tokens=False) == "".join(
            segment.text for segment in segments
        )
        trained = tokenizer.decode(shard.tokens[tokens][mask[tokens]].tolist(), skip_special_tokens=False)
        assert trained == "".join(segment.text for segment in segments if segment.is_trained)


def test_every_digest_is_the_same_for_another_partition_count(sharded, directory, tmp_path):
    other = collect(list_sources(directory), tmp_path, count=5)
    shards = compute(
        shard_chats,
        tmp_path,
        chats=other["chats"],
        tokenizer=sharded["tokenizer"],
        recipe=RECIPE.shards,
        resources=in_partitions(3),
    )
    assert (other["chats"].digest, shards.digest) == (sharded["chats"].digest, sharded["chat_shards"].digest)


HAND_OVERS = [("chats", "chats"), ("chat_shards", "chat_shards"), ("synthetic", "problems"), ("ingested", "ingested")]


@pytest.mark.parametrize(("name", "contract"), HAND_OVERS)
def test_every_hand_over_holds_its_contract(sharded, name, contract, tmp_path):
    files = (f"data_contracts/{contract}.yaml",)
    result = compute(
        validate_contract,
        tmp_path,
        subject=sharded[name],
        recipe=ContractRecipe(name=contract),
        resources=RESOURCES,
        data_files=files,
    )
    assert result.record.num_rows > 0


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the shared data is not on this machine")
def test_the_shared_files_give_the_conversations_that_were_counted_by_hand():
    """tau-bench leaves calls out (`assistant: None` before a tool's line; three dialogues have none before their last
    answer), one Chinese example observes without a call, two texts end their reasoning without having begun it."""
    reasons, kept = Counter(), Counter()
    for file in list_sources(SHARED_DATA).files:
        if file.role == "sft":
            for line in gzip.decompress(Path(file.path).read_bytes()).splitlines():
                try:
                    kept[file.name] += len(conversations_of(json.loads(line)))
                except MalformedChatError as error:
                    reasons[file.name, error.reason] += 1
    assert kept == {
        "sft/alpaca_zh.jsonl.gz": 1000,
        "sft/dolly_sample.jsonl.gz": 151,
        "sft/glaive_toolcall_en.jsonl.gz": 240,
        "sft/glaive_toolcall_zh.jsonl.gz": 239,
        "sft/instruction_pairs.jsonl.gz": 1100,
        "sft/reason_tool_use.jsonl.gz": 48,
        "sft/self_instruct_seed_tasks.jsonl.gz": 175,
        "agent/swe_agent_demonstrations.jsonl.gz": 19,
        "agent/tau_bench_airline_dialogues.jsonl.gz": 2,
        "agent/tau_bench_retail_dialogues.jsonl.gz": 1,
    }
    assert reasons == {
        ("sft/glaive_toolcall_zh.jsonl.gz", "tool_result_without_call"): 1,
        ("sft/reason_tool_use.jsonl.gz", "broken_reasoning"): 2,
        ("agent/tau_bench_airline_dialogues.jsonl.gz", "tool_result_without_call"): 17,
        ("agent/tau_bench_retail_dialogues.jsonl.gz", "tool_result_without_call"): 68,
    }


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "x", "instances": [1]},
        {"instruction": "x", "instances": [None]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "tools": "[" * 100_000},
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{" * 100_000}]},
            ]
        },
        {"prompt": "### Instruction:\n" * 100_000},
    ],
)
def test_a_conversation_of_any_shape_is_refused_by_its_reason_and_at_once(record):
    began = time.process_time()
    with pytest.raises(MalformedChatError, match=r"^(broken_t|no_)"):
        conversations_of(record)
    assert time.process_time() - began < 5


def test_calls_of_glaive_are_calls():
    """Tools without a mark in the system, arguments in single quotes, and an apostrophe in them."""
    described = json.dumps(OBJECT, indent=4)
    record = {
        "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
        f"{described}\n\n{described}",
        "chat": 'USER: q\n\n\nASSISTANT: <functioncall> {"name": "f", "arguments": \'{"x": "it\'s"}\'} <|endoftext|>'
        '\n\n\nFUNCTION RESPONSE: {"y": 2}\n\n\nASSISTANT: a <|endoftext|>\n\n\n',
    }
    ((messages, tools),) = conversations_of(record)
    assert tools == [OBJECT, OBJECT]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [{"name": "f", "arguments": {"x": "it's"}}] and not messages[1]["content"]
    assert (messages[2]["content"], messages[3]["content"]) == ('{"y": 2}', "a")


@pytest.mark.parametrize("text", ["q", "See ### Human: q", "### Human: q", "USER:", 7])
def test_a_text_that_does_not_begin_with_a_turn_is_no_conversation(text):
    with pytest.raises(MalformedChatError, match="no_conversation"):
        conversations_of({"text": text})


def test_calls_of_glaive_follow_each_other_and_their_mark_may_be_quoted():
    """The list of tools stands within the system's text."""
    described = json.dumps([OBJECT])
    offer = "Be brief. You have access to the following functions. Use them if required -"
    call = '<functioncall> {"name": "f", "arguments": \'{"x": 1}\'}'
    record = {
        "system": f"{offer} {described}\nAnswer in English.",
        "chat": f"USER: q\n\n\nASSISTANT: {call} {call.replace('1', '2')} <|endoftext|>\n\n\nFUNCTION RESPONSE: 3"
        "\n\n\nFUNCTION RESPONSE: 4\n\n\nASSISTANT: A <functioncall> calls.",
    }
    ((messages, tools),) = conversations_of(record)
    assert tools == [OBJECT] and messages[0]["content"] == "Be brief.\nAnswer in English."
    assert [call["arguments"] for call in messages[2]["tool_calls"]] == [{"x": 1}, {"x": 2}]
    assert messages[-1]["content"] == "A <functioncall> calls." and not messages[-1]["tool_calls"]


def test_an_unreadable_call_of_glaive_is_an_error():
    record = {
        "system": "You have access to the following functions. Use them if required -\n" + json.dumps(OBJECT),
        "chat": 'USER: q\n\n\nASSISTANT: <functioncall> {"name": <|endoftext|>',
    }
    with pytest.raises(MalformedChatError, match="broken_tool_call"):
        conversations_of(record)
