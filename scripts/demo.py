"""Write a tiny checkpoint of random weights in the published NVFP4 layout and generate from it: shows that all parts work.

python scripts/demo.py
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from inkling_jax.command_line import cache_directory, run
from inkling_jax.config import ModelConfig
from inkling_jax.convert.write import write_checkpoint
from inkling_jax.inputs.demo_tokenizer import write_demo_tokenizer

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 1000

# The released shape made small: the same kinds of layers in the same order, and a head width, group and block that kernels take.
TEXT: dict[str, Any] = {
    "model_type": "inkling_model",
    "model_max_length": 4096,
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "vocab_size": 1024,
    "unpadded_vocab_size": VOCABULARY,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "sliding_window_size": 64,
    "d_rel": 16,
    "rel_extent": 128,
    "local_layer_ids": [0, 1, 2, 3, 4, 6, 7],
    "dense_mlp_idx": 2,
    "sconv_kernel_size": 4,
    "logits_mup_width_multiplier": 0.5,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "dense_intermediate_size": 256,
    "intermediate_size": 64,
    "route_scale": 8.0,
    "rms_norm_eps": 1e-6,
    "use_embed_norm": True,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
}
DRAFT_HEAD = {"num_nextn_predict_layers": 2, "chain_hidden_post_norm": False, "local_layer_ids": [0]}
PROMPT = "Tell me a story."


def write_demo_model(directory: Path) -> int:
    """Write the checkpoint and its tokenizer into a directory, replacing what an earlier run left there; bytes of weights."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    ids = write_demo_tokenizer(directory, VOCABULARY)
    config = ModelConfig.from_dict(
        {"architectures": ["InklingForCausalLM"], "text_config": TEXT, "mtp_config": DRAFT_HEAD, **ids},
        quant={"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    )
    return write_checkpoint(directory, config, seed=1, nvfp4=True)


def main() -> int:
    """Write, say what this is, and become the command that generates."""
    directory = cache_directory() / "demo"
    size = write_demo_model(directory)
    options = ["--model", str(directory), "--prompt", PROMPT, "--max-tokens", "120", "--ignore-eos", "--seed", "1"]
    command = [sys.executable, "-m", "inkling_jax.generate", *options]
    print(
        f"A tiny Inkling ({size / 1e6:.1f} MB, published NVFP4 layout) is in {directory}.\n"
        "Its weights are RANDOM and it has learned nothing: the text below is noise. Everything that makes it is real.\n"
        f"To run it again, in {ROOT}:\n  {shlex.join(command)}\n",
        flush=True,
    )
    os.chdir(ROOT)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(run(main))
