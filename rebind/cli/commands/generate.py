"""`rebind generate`: what a trained model says next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from rebind.cli import options
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.terminal import screen

EXAMPLES = """[bold]Examples[/bold]

rebind generate runs/delta "Once upon a time"

rebind generate runs/delta "Once" "Twice" --greedy --tokens 50 --json"""


def generate(
    run: Annotated[Path, typer.Argument(help="Folder that `rebind train` made, or a checkpoint in it.", metavar="RUN")],
    prompts: Annotated[list[str], typer.Argument(help="What it goes on from; several are taken in turn.")],
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens to say.")] = 100,
    temperature: Annotated[float, typer.Option(metavar="X", min=1e-3, help="Less is safer, more is wilder.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(metavar="X", min=0.01, max=1.0, help="Draw from the likeliest that make up this much.")
    ] = 0.95,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is drawn.")] = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Let a model that `rebind train` made go on from a prompt."""
    with screen(as_json, quiet, debug) as shown:
        import torch

        from rebind.nn.training.load import load

        drawn: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        said = []
        bars = Bars(shown)
        with bars.drawn():
            bars.phase("loading")
            trained = load(run, device=device or "cpu", dtype=options.parse_dtype(dtype))
            for done, prompt in enumerate(prompts):
                bars.count("asking", done, len(prompts))
                torch.manual_seed(seed)  # for each: what one says does not hang on those before it
                how = {"do_sample": False} if greedy else drawn
                said.append(trained.generate(prompt, max_new_tokens=tokens, **how))
        for prompt, text in zip(prompts, said, strict=True):
            shown.show(Text.assemble((prompt, "bold"), (text, "cyan")))
        answers = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, said, strict=True)]
        shown.result({"checkpoint": str(trained.folder), "answers": answers}, "\n".join(said))
