"""How a command fails: one line on standard error, a JSON document with --json, and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

import typer

from rebind.cli.ui.terminal import Terminal, discard_output
from rebind.errors import InputError, RebindError, system_error

INTERNAL_ERROR, INVALID_INPUT, FAILURE, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141
FAILED_CHECK = 1  # the command ran, and a check of it failed


def run(command: Callable[[], object], terminal: Terminal) -> int:
    """Run a command, report whatever it raises, and return the exit code."""
    try:
        with terminal.warnings_shown():
            command()
            terminal.out.file.flush()
    except typer.Exit as end:
        return end.exit_code
    except (Exception, KeyboardInterrupt, SystemExit) as problem:
        if _is_broken_pipe(problem):
            discard_output(sys.stdout)
            for edit, undo in terminal.written_edits.items():
                terminal.report("warning", _describe_written(edit, undo))
            return BROKEN_PIPE
        if isinstance(problem, SystemExit):
            raise
        return fail(problem, terminal)
    return 0


def fail(problem: BaseException, terminal: Terminal) -> int:
    """Report what ended a command, and return the exit code."""
    error = as_rebind_error(problem)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        from rebind.parallel import should_report

        terminal.writes = should_report()  # only the first process that fails reports
    codes = {"interrupted": INTERRUPTED, "internal_error": INTERNAL_ERROR}
    code = INVALID_INPUT if isinstance(error, InputError) else codes.get(error.code, FAILURE)

    if terminal.debug and terminal.writes:
        terminal.err.print("".join(traceback.format_exception(problem)), soft_wrap=True)
    written = [_describe_written(edit, undo) for edit, undo in terminal.written_edits.items()]
    style = "yellow" if code == INTERRUPTED else "bold red"
    terminal.report("error", " ".join([error.message(terminal.as_option), *written]), style)
    if terminal.as_json:
        advice = error.advice_for(terminal.as_option)
        fields = {"code": error.code, "problem": error.problem, "expected": error.expected, "advice": advice}
        edits = {"edits": list(terminal.written_edits)} if written else {}
        with suppress(OSError):  # standard output itself may be what failed
            terminal.result({"error": fields, "exit_code": code, **edits})
    if isinstance(problem, OSError):
        discard_output(sys.stdout)
    return code


def as_rebind_error(problem: BaseException) -> RebindError:
    """Convert any exception to a RebindError."""
    if isinstance(problem, RebindError):
        return problem
    if _is_interrupt(problem):
        advice = "Nothing is half-written; run the same command again to continue"
        return RebindError("Interrupted", advice=advice, code="interrupted")
    if (
        format_message := getattr(problem, "format_message", None)
    ) is not None:  # an error of click, or of typer's copy of it
        context = getattr(problem, "ctx", None)
        command = context.command_path if context else "rebind"
        return InputError(format_message(), advice=f"See `{command} --help`", code="usage")
    if (error := system_error(problem)) is not None:
        return error
    advice = "Run the command again with --debug and report the traceback"
    return RebindError(f"Unexpected {type(problem).__name__}: {problem}", advice=advice, code="internal_error")


def _is_broken_pipe(problem: BaseException) -> bool:
    """Return whether the reader of a pipe has closed it, as `head` does."""
    if isinstance(problem, SystemExit):
        return isinstance(problem.__context__, BrokenPipeError)  # rich exits this way
    return isinstance(problem, OSError) and problem.errno == errno.EPIPE


def _is_interrupt(problem: BaseException | None) -> bool:
    """Return whether Ctrl-C is the cause. transformers turns Ctrl-C during its import into an ImportError."""
    while problem is not None and not isinstance(problem, KeyboardInterrupt):
        problem = None if isinstance(problem, OSError) else problem.__cause__ or problem.__context__
    return problem is not None


def _describe_written(edit: str, undo: str) -> str:
    return f"Edit {edit} is in the ledger; do not run the command again. To undo it: {undo}"
