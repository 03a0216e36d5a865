"""`helicore chat`: a conversation in the terminal, or one answer."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helicore.cli import options
from helicore.cli.console import note, print_json
from helicore.cli.generate import speed_line, summary

if TYPE_CHECKING:
    from helicore.llm import LLM
    from helicore.sampling_params import SamplingParams

_HELP = "/reset starts anew, /exit or Ctrl-D ends"


def chat(
    message: Annotated[
        str | None, typer.Option("--message", help="Answer this and end; else read turns.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    model: options.Model = "tiny",
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", help="Jinja text, or a template's name.")
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    num_threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    disk_path: options.DiskPath = None,
    disk_gb: options.DiskGb = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Talks with a model. Without --message: one line of input is one turn."""
    given = dict(locals())
    sampling = options.Sampling.of(given)
    with options.load_llm(model, quiet=json, **options.engine_options(given)) as llm:
        params = sampling.over(llm.get_default_sampling_params())
        talk = _Conversation(llm, params, system, chat_template, json)
        if message is not None:
            talk.turn(message)
        else:
            _read_turns(talk)


class _Conversation:
    """Holds the messages; one turn at a time."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, template: str | None, json: bool
    ) -> None:
        self._llm = llm
        self._params = params
        self._template = template
        self._json = json
        self._start: list[dict[str, Any]] = []
        if system is not None:
            self._start.append({"role": "system", "content": system})
        self.reset()

    def reset(self) -> None:
        self._messages = list(self._start)

    def turn(self, text: str) -> None:
        """Prints the answer; the conversation grows only when it is complete."""
        asked = [*self._messages, {"role": "user", "content": text}]
        start = time.perf_counter()
        with self._llm.stream_chat(asked, self._params, chat_template=self._template) as stream:
            for piece in stream:
                if not self._json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            output = stream.output
        seconds = time.perf_counter() - start
        answer = {"role": "assistant", "content": output.outputs[0].text}
        self._messages = [*asked, answer]
        if self._json:
            print_json({"message": answer, **summary([output], seconds)})
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
            note(speed_line([output], seconds))


def _read_turns(talk: _Conversation) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        note(_HELP)
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            talk.reset()
        elif text:
            try:
                talk.turn(text)
            except KeyboardInterrupt:
                note("(stopped)")
            except ValueError as error:
                if not interactive:
                    raise
                note(f"error: {error}")
