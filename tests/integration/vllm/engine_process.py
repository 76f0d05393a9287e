"""One vLLM engine in processes of its own: answers prompts, and prints what it saw as JSON.

    python engine_process.py MODEL SETTINGS OPTIONS PROMPTS

All but the model are JSON; a prompt is its tokens and an adapter's folder, or null. Each prompt is
asked cold, with a local hit, and after vLLM's own cache was thrown away.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    """Run, and print one line."""
    from vllm import LLM  # noqa: PLC0415 - slow to import

    model, *texts = sys.argv[1:]
    settings, options, prompts = map(json.loads, texts)
    transfer = {
        "kv_connector": "KVStrataConnector",
        "kv_connector_module_path": "kvstrata.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        enable_prefix_caching=True,
        seed=0,
        kv_transfer_config=transfer if settings is not None else None,
        **options,
    )
    first, local = ask(llm, prompts), ask(llm, prompts)
    time.sleep(2)  # stores end by themselves
    was_reset = llm.reset_prefix_cache()
    restored = ask(llm, prompts)
    sys.stdout.write(
        "\n"
        + json.dumps({"first": first, "local": local, "restored": restored, "was_reset": was_reset})
        + "\n"
    )


def ask(llm: Any, prompts: list[tuple[list[int], str | None]]) -> list[dict[str, Any]]:
    """Each prompt's answer, one after the other."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    sampling = SamplingParams(
        temperature=0, max_tokens=6, logprobs=3, ignore_eos=True, detokenize=False
    )
    answers = []
    for tokens, folder in prompts:
        [output] = llm.generate(
            [{"prompt_token_ids": tokens}],
            sampling,
            use_tqdm=False,
            lora_request=LoRARequest("adapter", 1, folder) if folder else None,
        )
        [answer] = output.outputs
        answers.append(
            {
                "tokens": list(answer.token_ids),
                "logprobs": [{str(k): v.logprob for k, v in d.items()} for d in answer.logprobs],
                "cached_tokens": output.num_cached_tokens,
            }
        )
    return answers


if __name__ == "__main__":
    main()
