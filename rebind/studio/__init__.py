"""`rebind studio`: a local web page on which a person edits a model by hand and watches memory work.

    from rebind.studio import Studio, create_app

- `state`: `Studio`, the model behind the page: its editor, the queue of its work, the folder for exports
- `jobs`: one worker thread that runs all work on the model, one job after another, with stages and cancel
- `replies`: what the server answers, and how an error becomes a sentence beside a field
- `forms`: the fields of a request, checked
- `asking`: what a model says about a fact, and beside the switches
- `security`: which requests are refused, and the headers of every answer
- `app`: the Starlette application; `server` runs it
- `tabs`: one module per tab, with its routes
- `static`: the page: plain HTML, one style sheet and one ES module per tab, nothing from another host
"""

from __future__ import annotations

from rebind.studio.app import create_app
from rebind.studio.jobs import Job, JobControl
from rebind.studio.replies import problem, reply
from rebind.studio.security import Access
from rebind.studio.state import Studio

__all__ = ["Access", "Job", "JobControl", "Studio", "create_app", "problem", "reply"]
