"""What is written for a line: its answer or what is wrong with it, in the form that it was asked in."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from inkling_jax.batch.request import Head, Job, Refused
from inkling_jax.completion import Completion
from inkling_jax.conversation import ChatCompletion, answer_fields


def error_record(refused: Refused) -> dict[str, Any]:
    """The record of a line that has no answer."""
    if refused.head.openai:
        return _openai(refused.head, None, {"code": "invalid_request", "message": refused.message})
    return {"id": refused.head.id, "error": refused.message, "digest": refused.head.digest}


def record(job: Job, made: Sequence[Completion | ChatCompletion], model: str) -> dict[str, Any]:
    """The record of a line, of its n answers. One that the model failed in makes it an error."""
    failed = next((completion.error for completion in made if completion.error), None)
    if failed is not None:
        if job.head.openai:
            return _openai(job.head, None, {"code": "server_error", "message": failed})
        return error_record(Refused(job.head, failed))
    if job.head.openai:
        body = _body(job, made, model)
        return _openai(job.head, {"status_code": 200, "request_id": f"req_{job.head.digest}", "body": body}, None)
    (answer,) = made
    found = {
        "id": job.head.id,
        "text": answer.content if isinstance(answer, ChatCompletion) else answer.text,
        **(answer_fields(answer) if isinstance(answer, ChatCompletion) else {}),
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": {"prompt_tokens": answer.prompt_tokens, "completion_tokens": len(answer.token_ids)},
    }
    if answer.logprobs is not None:
        found["logprobs"] = [dataclasses.asdict(token) for token in answer.logprobs]
    return found | {"digest": job.head.digest}


def _openai(head: Head, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{head.digest}", "custom_id": head.id, "response": response, "error": error}


def _body(job: Job, made: Sequence[Completion | ChatCompletion], model: str) -> dict[str, Any]:
    prompt_tokens, completion_tokens = made[0].prompt_tokens, sum(len(answer.token_ids) for answer in made)
    chat = job.messages is not None
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{job.head.digest}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": n, **_choice(answer)} for n, answer in enumerate(made)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _choice(answer: Completion | ChatCompletion) -> dict[str, Any]:
    if isinstance(answer, Completion):
        return {"text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in answer.tool_calls
        ]
    if answer.malformed_calls:  # not OpenAI's, but what the model wrote is not to be lost
        message["malformed_calls"] = [dataclasses.asdict(call) for call in answer.malformed_calls]
    calls = answer.tool_calls and answer.finish_reason == "stop"
    return {"message": message, "logprobs": None, "finish_reason": "tool_calls" if calls else answer.finish_reason}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One answer of a record, whatever its form, as far as a summary is interested."""

    finish_reason: str
    text: str
    reasoning: str
    called: bool


def outcomes(record: dict[str, Any]) -> tuple[str | None, int, list[Outcome]]:
    """The error of a record that is one, the tokens made for it, and its answers."""
    if record.get("error") is not None:
        error = record["error"]
        return error["message"] if isinstance(error, dict) else str(error), 0, []
    if "custom_id" not in record:
        called = bool(record.get("tool_calls") or record.get("malformed_calls"))
        answer = Outcome(record["finish_reason"], record["text"], record.get("reasoning", ""), called)
        return None, record["usage"]["completion_tokens"], [answer]
    body, found = record["response"]["body"], []
    for choice in body["choices"]:
        message = choice.get("message", {})
        text = choice.get("text") or message.get("content") or ""
        called = bool(message.get("tool_calls") or message.get("malformed_calls"))
        found.append(Outcome(choice["finish_reason"], text, message.get("reasoning_content", ""), called))
    return None, body["usage"]["completion_tokens"], found
