"""The Trace tab: where the model recalls a fact, what each layer would say, and which layers an edit would change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rebind.studio.forms import Form
from rebind.studio.jobs import JobControl
from rebind.studio.replies import reply
from rebind.studio.state import Studio

if TYPE_CHECKING:
    from rebind.analysis import Trace
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact

MOST_DRAWS = 32


def routes(studio: Studio) -> list[Route]:
    """Return the routes of the tab, all of them under /api/trace/."""

    async def run(request: Request) -> Response:
        from rebind.edit.facts.fact import Fact

        form = await Form.of(request)
        target = form.text("target", "")
        fact = Fact.parse(form.text("sentence"), target or ".")
        draws = form.integer("draws", 4, low=1, high=MOST_DRAWS)
        noise = form.number("noise", 3.0, low=0.1, high=10)
        job = studio.submit(
            "trace", lambda control: trace(studio.editor, fact, bool(target), draws=draws, noise=noise, control=control)
        )
        return reply(job.to_json(), 202)

    return [Route("/api/trace/run", run, methods=["POST"])]


def trace(
    editor: Editor, fact: Fact, use_target: bool, *, draws: int, noise: float, control: JobControl
) -> dict[str, Any]:
    """Trace a fact through the model as it is now, and read each layer, beside the base model if there are edits.

    Args:
        editor: the model, with its edits.
        fact: the sentence, with its subject.
        use_target: trace the fact's target instead of the model's own answer.
        draws: samples of noise to average over.
        noise: its standard deviation, relative to the embeddings.
        control: gets the stages, and ends the work if it was cancelled.
    """
    from rebind.analysis import Tracer, TraceSettings, logit_lens

    model = editor.language_model
    control.stage("running the sentence with noise")
    settings = TraceSettings(noise=noise, draws=draws)
    tracer = Tracer(model, settings, on_progress=lambda done, total: control.stage("restoring states", done / total))
    result = tracer.trace(fact, use_target=use_target)
    control.stage("reading each layer")
    lens = logit_lens(model, fact.text, answer_id=result.answer_id)
    lenses = {"edited": lens.to_json()}
    if editor.ledger.active:
        with editor.base_model():
            lenses = {"base": logit_lens(model, fact.text, answer_id=result.answer_id).to_json(), **lenses}
    return {
        "trace": {**result.to_json(), "seconds": result.seconds},
        "lens": lenses,
        "layers": chosen_layers(editor),
        "advice": advice(result),
        "edits": len(editor.ledger.active),
    }


def chosen_layers(editor: Editor) -> dict[str, dict[str, Any]]:
    """Return for each method the layers that an edit of one fact would change, and where they come from."""
    from rebind.edit.methods import METHODS

    settings = {name: editor.settings(name) for name in METHODS}
    return {name: {"layers": list(one.layers), "source": one.source} for name, one in settings.items()}


def advice(result: Trace) -> dict[str, Any]:
    """Recommend a layer to edit: where an MLP at a token of the subject has the largest effect.

    The last layer is left out, because at least one block must follow an edited one.
    """
    first, last = result.prompt.subject
    effects = result.effects["mlp"][first : last + 1, :-1]  # [tokens, layers]
    token, layer = divmod(int(effects.argmax()), effects.shape[1])
    return {
        "token": result.prompt.labels[first + token],
        "layer": layer,
        "effect": float(effects[token, layer]),
    }
