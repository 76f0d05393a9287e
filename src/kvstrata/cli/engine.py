"""`kvstrata engine`: make tiny models, and run one on prompts of token ids."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstrata.cli.engine_output import LiveAnswers, NoAnswers, Run, print_summary, run_json
from kvstrata.cli.extras import torch_wanted
from kvstrata.cli.output import print_json, results
from kvstrata.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata.engine import Engine, SamplingParams

app = typer.Typer(help="A small inference engine for hybrid models.", no_args_is_help=True)

_DEFAULT_CAPACITY: Final = "64MiB"

ModelFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder with config.json and safetensors.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("make-tiny")
def make_tiny(
    arch: Annotated[str, typer.Argument(metavar="ARCH", help="As in llama or qwen3_next.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal weights.")] = 0,
) -> None:
    """Write a tiny random model of an architecture, to try things with."""
    with torch_wanted():
        from kvstrata.engine import tiny  # noqa: PLC0415 - needs torch

    tiny.make_tiny(arch, folder, seed=seed)
    said = f"{folder}: a tiny {arch} with random weights (seed {seed})"
    results().print(said, markup=False, soft_wrap=True)


@app.command()
def run(  # noqa: PLR0913 - one parameter per option
    folder: ModelFolder,
    *,
    prompt_tokens: Annotated[
        list[str],
        typer.Option(
            metavar="1,2,3", help="Token ids; repeat it, or give @FILE with one prompt a line."
        ),
    ],
    max_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equal answers.")] = 0,
    num_ranks: Annotated[int, typer.Option(help="Processes that share the model.")] = 1,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks, instead of bytes.")] = None,
    cache_capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help=f"Of each rank's cache [{_DEFAULT_CAPACITY}]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    max_step_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Answer prompts side by side, token by token."""
    if num_blocks is not None and cache_capacity is not None:
        raise ConfigError("--num-blocks", "--cache-capacity is given too", "one of the two")
    prompts = parse_prompts(prompt_tokens)
    with torch_wanted():
        from kvstrata.engine import Engine, EngineOptions, SamplingParams  # noqa: PLC0415

    options = EngineOptions(
        dtype=dtype,
        device=device,
        num_ranks=num_ranks,
        num_blocks=num_blocks,
        cache_capacity=cache_capacity or _DEFAULT_CAPACITY,
        max_step_tokens=max_step_tokens,
    )
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    start = time.perf_counter()
    with Engine(folder, options) as engine:
        start_s = time.perf_counter() - start
        done = _answer(engine, prompts, sampling, is_shown=not as_json)
    if as_json:
        print_json(run_json(done, start_s))
    else:
        print_summary(results(), done, start_s)


def parse_prompts(given: Sequence[str]) -> list[list[int]]:
    """Read `1,2,3` and `@FILE`.

    Raises:
        RequestError: says which prompt is not understood.
    """
    texts = [text for one in given for text in _texts(one)]
    if not texts:
        raise RequestError("there are no prompts; give --prompt-tokens 1,2,3 or @FILE")
    return [_prompt(text) for text in texts]


def _texts(given: str) -> list[str]:
    """One prompt, or a file of them."""
    if not given.startswith("@"):
        return [given]
    try:
        lines = Path(given[1:]).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RequestError(f"--prompt-tokens {given}: cannot be read: {error}") from error
    return [line for line in lines if line.strip()]


def _prompt(text: str) -> list[int]:
    try:
        return [int(token) for token in text.replace(",", " ").split()]
    except ValueError as error:
        raise RequestError(
            f"--prompt-tokens {text!r} is not understood; accepted: token ids as in 1,2,3, or "
            "@FILE with one prompt a line"
        ) from error


def _answer(
    engine: Engine, prompts: list[list[int]], sampling: SamplingParams, *, is_shown: bool
) -> Run:
    """Step until every prompt is answered; those who watch see tokens as they are drawn."""
    done = Run(prompts, [engine.add_request(prompt, sampling) for prompt in prompts])
    console = results()
    is_watched = is_shown and console.is_terminal
    with LiveAnswers(console, done) if is_watched else NoAnswers() as shown:
        while not done.is_complete:
            done.note(engine.step())
            shown.update()
    done.answers = [engine.answer(request) for request in done.requests]
    return done
