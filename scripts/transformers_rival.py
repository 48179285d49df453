"""What Hugging Face Transformers computes from a checkpoint, and how fast it decodes: the other side of compare_transformers.py.

A process of its own, so that the two libraries never share a GPU's memory. It reads a JSON task on standard input, writes logits
to the .npz file that the task names and the rest as JSON on standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers


def main() -> None:
    """Answer the task."""
    task = json.load(sys.stdin)
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # the short convolutions
    prompts = torch.tensor(np.load(task["prompts"]), device=device)
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    arrays = {}
    for dtype in ("float32", "bfloat16"):
        start = time.perf_counter()
        model = load(task["directory"], getattr(torch, dtype), device)
        found[f"load_s {dtype}"] = time.perf_counter() - start
        arrays[f"logits {dtype}"], margins = logits(model, prompts)
        if dtype == "float32":
            arrays["margins"] = margins
        else:
            found["experts"] = model.config.text_config._experts_implementation
            found["steps"] = [step for batch in task["batches"] for step in decode(model, prompts, batch, task["new_tokens"])]
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    np.savez(task["output"], **arrays)
    print(json.dumps(found))


def load(directory: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model; every tensor must have come from the checkpoint.

    In float32 a loop over experts, plain products; in bfloat16 what Transformers chooses for speed, grouped products.
    """
    options = {"experts_implementation": "eager"} if dtype == torch.float32 else {}
    model, info = transformers.InklingForConditionalGeneration.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True, **options
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        sys.exit(f"{directory}: transformers misses {info['missing_keys']}, finds other shapes for {info['mismatched_keys']}")
    model.generation_config.eos_token_id = None  # a benchmark wants all its tokens
    return model.eval().to(device)


def logits(model: Any, prompts: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """`logits_of` all prompts: [prompts, T, vocabulary], and a margin each."""
    found, smallest = zip(*(logits_of(model, prompt) for prompt in prompts), strict=True)
    return np.stack(found), np.array(smallest)


@torch.inference_mode()
def logits_of(model: Any, prompt: torch.Tensor, **media: torch.Tensor) -> tuple[np.ndarray, float]:
    """float32 logits [T, vocabulary] by whole-sequence forward, and the prompt's smallest router margin.

    That is the least difference, over tokens and layers, between the scores of the last expert chosen and the first one left out.
    """
    margins: list[float] = []

    def watch(router: Any, _: Any, output: Any) -> None:
        scores = output[0].sigmoid() + router.e_score_correction_bias
        best = scores.topk(router.top_k + 1, dim=-1).values
        margins.append(float((best[:, -2] - best[:, -1]).min()))

    hooks = [module.register_forward_hook(watch) for name, module in model.named_modules() if name.endswith("mlp.gate")]
    found = model(input_ids=prompt[None], use_cache=False, **media).logits[0].float().cpu().numpy()
    for hook in hooks:
        hook.remove()
    return found, min(margins)


@torch.inference_mode()
def decode(model: Any, prompts: torch.Tensor, batch: int, new_tokens: int) -> list[dict[str, Any]]:
    """Seconds a decode step takes by `generate` and by a bare loop over `forward` with a cache, which has less to do on the host.

    `generate` of 5.24 attends beyond the window in local layers; the loop does not.
    """
    ids = prompts[torch.arange(batch) % len(prompts)]

    def generate(tokens: int) -> None:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )

    def loop(tokens: int) -> None:
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        for _ in range(tokens - 1):
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, cache=out.cache, use_cache=True)

    return [
        {"batch": batch, "how": how, "seconds": step_seconds(call, new_tokens)}
        for how, call in (("generate", generate), ("forward loop", loop))
    ]


def step_seconds(call: Callable[[int], None], new_tokens: int) -> float:
    """Seconds of a decode step: what `new_tokens` steps add to the prompt and its first token. The better of two runs."""
    timed(call, 8)
    first = min(timed(call, 1) for _ in range(2))
    return (min(timed(call, 1 + new_tokens) for _ in range(2)) - first) / new_tokens


def timed(call: Callable[[int], None], tokens: int) -> float:
    """Seconds until the device has done it."""
    start = time.perf_counter()
    call(tokens)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
