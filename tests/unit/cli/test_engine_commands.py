"""The engine commands: what is printed and the exit codes; a real process, a real terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kvstrata.cli.engine import parse_prompts
from kvstrata.cli.main import main
from kvstrata.engine import Engine, EngineOptions, SamplingParams
from kvstrata.engine.tiny import make_tiny
from kvstrata.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAIN = "from kvstrata.cli.main import main; main()"
PROMPTS = ("--prompt-tokens", "1,2,3", "--prompt-tokens", "200, 7")


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_process(*arguments: str | Path, program: str = MAIN) -> Result:
    done = subprocess.run(
        [sys.executable, "-c", program, "engine", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """The command in this process: importing torch anew for each takes seconds."""

    def run_here(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["kvstrata", "engine", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return run_here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "lfm2 [bold]"
    make_tiny("lfm2", folder)
    return folder


def test_a_tiny_model_is_made_once(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("make-tiny", "llama", tmp_path / "new" / "llama", "--seed", "3")
    assert (result.returncode, result.stderr) == (0, "")
    assert "a tiny llama with random weights (seed 3)" in result.stdout

    again = run("make-tiny", "llama", tmp_path / "new" / "llama")
    assert again.returncode == 2
    assert again.stderr.endswith("holds a model already; expected a new or empty folder\n")


def test_an_unknown_architecture_lists_those_that_are_known(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    result = run("make-tiny", "gpt2", tmp_path / "new")

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: architecture 'gpt2' is not known; known: llama, mistr")
    assert result.stderr.count("\n") == 1


def test_programs_get_one_object(model: Path) -> None:
    result = run_process("run", model, *PROMPTS, "--max-tokens", "5", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)

    with Engine(model, EngineOptions(cache_capacity="4MiB")) as engine:
        expected = engine.generate([[1, 2, 3], [200, 7]], SamplingParams(max_tokens=5))
    assert [answer["tokens"] for answer in found["answers"]] == [a.tokens for a in expected]
    assert [answer["num_prompt_tokens"] for answer in found["answers"]] == [3, 2]
    assert {answer["finish_reason"] for answer in found["answers"]} == {"length"}
    assert {answer["local_hit_tokens"] for answer in found["answers"]} == {0}
    assert found["num_new_tokens"] == 10
    for answer in found["answers"]:
        assert 0 < answer["first_token_s"] <= answer["last_token_s"] <= found["total_s"]


def test_people_get_answers_and_figures(run: Callable[..., Result], model: Path) -> None:
    result = run("run", model, *PROMPTS, "--max-tokens", "5", "--max-step-tokens", "2")

    assert (result.returncode, result.stderr) == (0, "")
    [first, second, _, *figures] = result.stdout.splitlines()
    assert re.fullmatch(r"0 1 2 3 > \d+ \d+ \d+ \d+ \d+  length", first)
    assert re.fullmatch(r"1 200 7 > \d+ \d+ \d+ \d+ \d+  length", second)
    assert figures[0].split()[:4] == ["0", "3", "0", "5"]
    assert "5 + 10 tokens in" in result.stdout


def test_in_a_terminal_answers_grow(model: Path) -> None:
    ours, theirs = pty.openpty()
    program = "from kvstrata.cli import engine_output; engine_output._FRAMES_PER_S = 1e9;" + MAIN
    command = [sys.executable, "-c", program, "engine", "run", str(model), *PROMPTS]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    shown = b""
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)

    assert process.returncode == 0
    assert shown.count(b"...") >= 5
    assert b"length" in shown


def test_prompts_come_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("1,2,3\n\n200 7\n")

    assert parse_prompts([f"@{tmp_path}/prompts", "9"]) == [[1, 2, 3], [200, 7], [9]]


@pytest.mark.slow
def test_ranks_and_seeds(run: Callable[..., Result], model: Path) -> None:
    options = ("--temperature", "1.5", "--seed", "4", "--num-blocks", "50", "--dtype", "float32")
    one, two = (
        json.loads(run("run", model, *PROMPTS, *options, "--num-ranks", count, "--json").stdout)
        for count in "12"
    )
    assert [a["tokens"] for a in one["answers"]] == [a["tokens"] for a in two["answers"]]


WRONG = {
    "no model": (("nowhere",), "nowhere has no config.json; expected a model directory"),
    "no prompt": ((), "--prompt-tokens"),
    "both sizes": (("--num-blocks", "9", "--cache-capacity", "1MiB"), "accepted: one of the two"),
    "no size": (("--cache-capacity", "lots"), "cache_capacity: 'lots' is not understood"),
    "too small": (("--cache-capacity", "1KiB"), "raise it to"),
    "dtype": (("--dtype", "int4"), "dtype is 'int4'; accepted: auto, float32, bfloat16"),
    "device": (("--device", "tpu"), "device is 'tpu'; there are here: cpu"),
    "vocabulary": (("--prompt-tokens", "999"), "token 999 is not in the vocabulary"),
    "length": (("--max-tokens", "0"), "max_tokens is 0, but must be at least 1"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_and_code_two(
    run: Callable[..., Result], model: Path, arguments: tuple[str, ...], message: str
) -> None:
    place = () if arguments and arguments[0] == "nowhere" else (model,)
    prompt = ("--prompt-tokens", "1") if arguments else ()

    result = run("run", *place, *prompt, *arguments)

    assert result.returncode == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_what_is_not_installed_is_named(model: Path) -> None:
    for missing in ("torch", "safetensors"):
        program = f"import sys; sys.modules[{missing!r}] = None;" + MAIN
        result = run_process("run", model, *PROMPTS, program=program)

        assert result.returncode == 2
        assert f"the engine needs {missing}, which is not installed" in result.stderr
        assert "pip install 'kvstrata[torch]'" in result.stderr


BAD_PROMPTS = {
    "1,a": "'1,a' is not understood; accepted: token ids as in 1,2,3, or @FILE",
    "@nowhere": "@nowhere: cannot be read",
    "@empty": "there are no prompts",
}


@pytest.mark.parametrize("given", BAD_PROMPTS)
def test_prompts_that_are_not_understood(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=BAD_PROMPTS[given]):
        parse_prompts([given])
