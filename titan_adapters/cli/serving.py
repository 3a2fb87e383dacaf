"""Commands that start an engine: `generate`, `serve`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[Path, typer.Argument(help="A native or published checkpoint folder.", exists=True, file_okay=False)]


def generate(
    folder: Folder,
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens per request; default: the model's maximum.")] = None,
    eager: Annotated[bool, typer.Option(help="Start faster, without compiling.")] = False,
) -> None:
    """Continue prompts with the vLLM engine."""
    from vllm import SamplingParams

    import titan_adapters.vllm as serving

    llm = serving.LLM(checkpoint=folder, enforce_eager=eager, max_model_len=max_model_len)
    for output in llm.generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature)):
        typer.echo(f"{output.prompt}{output.outputs[0].text}")


def serve(context: typer.Context, folder: Folder) -> None:
    """Serve a checkpoint over the OpenAI API. Further options are vLLM's own (--port, --max-model-len, ...)."""
    from titan_adapters.vllm import engine_args

    checked = engine_args(checkpoint=folder)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in checked.items()]
    # The server module rather than the `vllm` command, which the CPU wheel of vLLM lacks.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *context.args]
    os.execv(sys.executable, command)


def add_to(app: typer.Typer) -> None:
    app.command()(generate)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
