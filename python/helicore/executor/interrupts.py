"""State that must not be cut in two: Ctrl-C waits for its end, any other exception is remembered.

Python runs signal handlers between any two bytecodes of the main thread, so a KeyboardInterrupt
could leave a sequence advanced in one table and not in the other. `INTERRUPTS` holds SIGINT back
while such a change is made; `StateChange` notices what still gets through (an exception of another
signal's handler, a bug, no memory), so that a half-made change is an error and never a result.
"""

from __future__ import annotations

# The functions without the enum conversions of `signal`, ten times as fast.
import _signal  # type: ignore[import-not-found]
import os
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGINT = _signal.SIGINT


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class DeferredInterrupts:
    """Context manager: SIGINT is taken after the block. Re-entrant; does nothing off main thread.

    Only a handler that was installed from Python is replaced (the default one, that raises
    KeyboardInterrupt, is such): it is back in place after the outermost block, and called then if
    a signal came. A second signal within the block is taken at once. Installing costs two system
    calls; `hold` pays them once for many blocks.

    The garbage collector may run blocks of its own between any two statements here, and the
    exception of another signal's handler may skip an `__exit__`. So a block that finds the handler
    not in place is an outermost one, whatever the count says.
    """

    def __init__(self) -> None:
        self._handler = self._note
        self._saved: Any = None
        self._depth = 0
        self._is_owner = False
        self._is_due = False

    def __enter__(self) -> None:
        if not _is_main_thread():
            return
        # A signal before the handler is in place is raised here: nothing has changed yet.
        if self._install():
            self._depth, self._is_owner = 0, True
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not _is_main_thread():
            return
        if self._depth == 1 and self._is_owner:
            self._is_owner = False
            self._leave(uninstall=True)
        else:
            self._leave(uninstall=False)

    def hold(self) -> bool:
        """Keeps the handler in place between blocks, where it acts as the one it replaced.

        The result is what `release` needs.
        """
        return _is_main_thread() and not self._depth and self._install()

    def release(self, held: bool) -> None:
        if held:
            self._depth += 1
            self._leave(uninstall=True)

    def _leave(self, uninstall: bool) -> None:
        try:
            if uninstall and _signal.getsignal(_SIGINT) is self._handler:
                _signal.signal(_SIGINT, self._saved)
        finally:
            if self._depth:
                self._depth -= 1
        if self._is_due and not self._depth:
            self._is_due = False
            self._saved(_SIGINT, None)

    def _install(self) -> bool:
        current = _signal.getsignal(_SIGINT)
        if current is self._handler or not callable(current):
            return False
        self._saved = current
        try:
            _signal.signal(_SIGINT, self._handler)
        except BaseException:
            _signal.signal(_SIGINT, current)
            raise
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._depth and not self._is_due:
            self._is_due = True
        else:
            if self._is_owner:
                self._is_owner = False
                _signal.signal(_SIGINT, self._saved)
            self._depth, self._is_due = 0, False
            self._saved(number, frame)


INTERRUPTS = DeferredInterrupts()
"""The only one: signal handlers belong to the process."""


class StateChange:
    """Context manager round a change of `what` that must be made whole.

    An exception that leaves the block, or one that hits this object itself, makes every later
    `check` raise RuntimeError: the state may be inconsistent.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._failure: str | None = None
        self._is_open = False

    def check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"the {self._what} stopped after an internal error: {self._failure}; make a new one"
            )
        if self._is_open:
            raise RuntimeError(
                f"the {self._what} stopped after an internal error: a change was cut short, or it "
                "was called from within itself; make a new one"
            )

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def is_open(self) -> bool:
        return self._is_open

    def __enter__(self) -> None:
        self.check()
        self._is_open = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._failure = f"{kind.__name__}: {value}" if str(value) else kind.__name__
        self._is_open = False


class ProcessCheck:
    """Threads, and so kernels, do not survive fork(): an object works in its process only."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_child(self) -> bool:
        return os.getpid() != self._pid

    def check(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this LLM was loaded in another process, and its threads do not survive fork(); "
                'load it after the fork, or start processes by the method "spawn"'
            )
