"""`rebind generate`: continue prompts with a model from `rebind train`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from rebind.cli import options as opt
from rebind.cli.ui import Phases, Terminal

if TYPE_CHECKING:
    from rebind.models import LanguageModel

EXAMPLES = opt.examples(
    'rebind generate runs/delta "Once upon a time"',
    'rebind generate runs/delta "Once" "Twice" --greedy --tokens 50 --json',
)


def generate(
    run: Annotated[Path, opt.argument("RUN", "Folder of a training run, or one of its checkpoints.")],
    prompts: Annotated[list[str], opt.argument("PROMPTS", "One or more texts to continue.")],
    tokens: Annotated[int, opt.value("N", "Generate at most N tokens per prompt.", min=1)] = 100,
    temperature: Annotated[float, opt.value("X", "Sampling temperature; higher is more varied.", min=1e-3)] = 0.8,
    top_p: Annotated[
        float, opt.value("X", "Total probability of the tokens to sample from.", min=0.01, max=1.0)
    ] = 0.95,
    greedy: Annotated[bool, opt.flag("--greedy", "Always take the most likely token instead of sampling.")] = False,
    seed: Annotated[int, opt.seed_value("Random seed for sampling.")] = 0,
    device: opt.Device = None,
    device_map: opt.DeviceMap = None,
    dtype: opt.Dtype = None,
    *,
    terminal: Terminal,
) -> None:
    """Continue prompts with a model that `rebind train` trained."""
    import torch

    from rebind.models import LanguageModel
    from rebind.models.locate import locate

    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    answers = []
    with Phases(terminal) as phases:
        phases.begin("loading")
        _, checkpoint = locate(run)
        model = LanguageModel.load(checkpoint, device=device, device_map=device_map, dtype=opt.parse_dtype(dtype))
        for index, prompt in enumerate(prompts):
            phases.count("asking", index, len(prompts))
            torch.manual_seed(seed)  # per prompt, so that its text does not depend on earlier prompts
            text = _continuation(model, prompt, tokens, {"do_sample": False} if greedy else sampling)
            answers.append({"prompt": prompt, "text": text})
    for answer in answers:
        terminal.print(Text.assemble((answer["prompt"], "bold"), (answer["text"], "cyan")))
    document = {"checkpoint": str(checkpoint), "answers": answers}
    terminal.result(document, "\n".join(answer["text"] for answer in answers))


def _continuation(language_model: LanguageModel, prompt: str, tokens: int, sampling: dict[str, Any]) -> str:
    """Return the text that follows a prompt; an empty prompt starts after the end-of-text token."""
    import torch

    from rebind.nn import RebindForCausalLM, recorded_decoding

    model, tokenizer = language_model.model, language_model.tokenizer
    end = tokenizer.eos_token_id
    prompt_ids = [*language_model.start, *tokenizer(prompt, add_special_tokens=False)["input_ids"]] or [end]
    ids = torch.tensor([prompt_ids], device=model.device)
    is_recorded = isinstance(model, RebindForCausalLM) and model.device.type == "cuda" and not model.grows
    with recorded_decoding(model) if is_recorded else nullcontext():
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, pad_token_id=end, max_new_tokens=tokens, **sampling)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
