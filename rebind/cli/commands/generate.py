"""`rebind generate`: continue prompts with a model from `rebind train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from rebind.cli import options
from rebind.cli.options import argument, examples, flag, option
from rebind.cli.ui.progress import Phases
from rebind.cli.ui.terminal import Terminal

EXAMPLES = examples(
    'rebind generate runs/delta "Once upon a time"',
    'rebind generate runs/delta "Once" "Twice" --greedy --tokens 50 --json',
)


def generate(
    run: Annotated[Path, argument("RUN", "Folder of a training run, or one of its checkpoints.")],
    prompts: Annotated[list[str], argument("PROMPTS", "One or more texts to continue.")],
    tokens: Annotated[int, option("N", "Generate at most N tokens per prompt.", min=1)] = 100,
    temperature: Annotated[
        float, option("X", "Sampling temperature; lower is more predictable, higher more varied.", min=1e-3)
    ] = 0.8,
    top_p: Annotated[
        float, option("X", "Sample from the most likely tokens that together have this probability.", min=0.01, max=1.0)
    ] = 0.95,
    greedy: Annotated[bool, flag("Always take the most likely token instead of sampling.", "--greedy")] = False,
    seed: Annotated[int, option("N", "Random seed for sampling.")] = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    *,
    terminal: Terminal,
) -> None:
    """Continue prompts with a model that `rebind train` trained."""
    import torch

    from rebind.nn.training.load import load

    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    texts = []
    phases = Phases(terminal)
    with phases.shown():
        phases.start("loading")
        trained = load(run, device=device or "cpu", dtype=options.parse_dtype(dtype))
        for index, prompt in enumerate(prompts):
            phases.count("asking", index, len(prompts))
            torch.manual_seed(seed)  # for every prompt, so that its text does not depend on the prompts before it
            settings = {"do_sample": False} if greedy else sampling
            texts.append(trained.generate(prompt, max_new_tokens=tokens, **settings))
    for prompt, text in zip(prompts, texts, strict=True):
        terminal.print(Text.assemble((prompt, "bold"), (text, "cyan")))
    answers = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
    terminal.result({"checkpoint": str(trained.folder), "answers": answers}, "\n".join(texts))
