"""Every error that gymllm raises on purpose, in one tree.

    GymLLMError
    ├── ConfigError           (ValueError)    a setting, key, flag or id that can't be used
    │   ├── UnknownNameError                  ... because nothing is called that; says what is close
    │   └── ConfigTypeError   (TypeError)     ... because it is of a wrong type
    │       └── UnsendableError               ... and can't be sent to an environment's process
    ├── MissingExtraError     (ImportError)   an optional dependency is needed; names its install
    ├── ModelError            (ValueError)    a model folder, tokenizer or template that can't be used
    ├── ContextLengthError    (ValueError)    a prompt that leaves the engine no room to generate
    ├── LedgerError           (ValueError)    an append that would break the token ledger
    ├── EnvError              (RuntimeError)  an environment broke; the episode ends *failed*
    │   ├── EnvTimeoutError   (TimeoutError)  ... did not answer within its limit
    │   ├── EnvTypeError      (TypeError)     ... answered with something of the wrong type
    │   ├── EnvCrashedError                   ... raised, or its worker died
    │   └── EnvBatchError                     ... some of a batch; carries what the others answered
    ├── EngineError           (RuntimeError)  an inference engine broke; the episode ends *failed*
    │   └── EngineTimeoutError (TimeoutError)
    ├── SandboxError          (RuntimeError)  a sandbox broke; the episode ends *failed*
    │   ├── SandboxStartError                 ... could not be started
    │   ├── SandboxDiedError                  ... or its shell is gone
    │   └── SandboxFileError  (OSError)       ... has no such file, or can't read or write it
    ├── ClosedError           (RuntimeError)  used after it was closed (Gymnasium's own error, too)
    └── RunError              (RuntimeError)  a training run can't go on; what was collected is saved

Each also inherits the built-in in brackets, so handlers written for that keep working. Expected
endings (a limit hit, an action that can't be read) are data, never exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from gymnasium.error import ClosedEnvironmentError


class GymLLMError(Exception):
    """Root of every error gymllm raises on purpose."""


class ConfigError(GymLLMError, ValueError):
    """A setting, key, flag or id can't be used; the message says what would be."""


class UnknownNameError(ConfigError):
    """Nothing is called that."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        """Builds the message.

        Args:
            kind: What was looked up, in the user's words ("environment", "config key").
            name: What they wrote.
            known: Every name that would have worked.
            hint: A last sentence: what to do next.
        """
        self.kind, self.name, self.known, self.hint = kind, name, sorted(known), hint
        close = difflib.get_close_matches(name, self.known, n=3, cutoff=0.5)
        if close:
            tail = f" Did you mean {' or '.join(close)}?"
        elif self.known:
            shown = ", ".join(self.known[:12]) + (", ..." if len(self.known) > 12 else "")
            tail = f" Known: {shown}."
        else:
            tail = ""
        super().__init__(f"Unknown {kind} {name!r}.{tail}{' ' + hint if hint else ''}")


class ConfigTypeError(ConfigError, TypeError):
    """A setting is of a wrong type."""


class UnsendableError(ConfigTypeError):
    """An action, option or argument can't be sent to its environment's process. That lives on."""


class MissingExtraError(GymLLMError, ImportError):
    """An optional dependency is needed; the message names the command that installs it."""


class ModelError(GymLLMError, ValueError):
    """A model folder, tokenizer or chat template can't be used."""


class ContextLengthError(GymLLMError, ValueError):
    """A prompt leaves the engine no room to generate."""


class LedgerError(GymLLMError, ValueError):
    """An append would break the token ledger's invariants."""


class EnvError(GymLLMError, RuntimeError):
    """An environment broke. Never a reward: the episode ends *failed*."""


class EnvTimeoutError(EnvError, TimeoutError):
    """An environment did not answer within its limit."""


class EnvTypeError(EnvError, TypeError):
    """An environment answered with something of the wrong type."""


class EnvCrashedError(EnvError):
    """An environment raised, or the worker that ran it died."""


class EnvBatchError(EnvError):
    """Some environments of a batch broke; the others' answers are not lost."""

    def __init__(self, message: str, answers: Sequence[object]) -> None:
        """Keeps the answers.

        Args:
            message: Which environments broke, and how.
            answers: One for each environment: what it answered, or its `EnvError`.
        """
        super().__init__(message)
        self.answers = tuple(answers)
        self.failed = tuple(i for i, a in enumerate(answers) if isinstance(a, EnvError))


class EngineError(GymLLMError, RuntimeError):
    """An inference engine broke. Never a reward: the episode ends *failed*."""


class EngineTimeoutError(EngineError, TimeoutError):
    """An inference engine did not answer within its limit."""


class SandboxError(GymLLMError, RuntimeError):
    """A sandbox broke. Never a reward: the episode ends *failed*."""


class SandboxStartError(SandboxError):
    """A sandbox could not be started; the message says what the system answered."""


class SandboxDiedError(SandboxError):
    """A sandbox, or the shell in it, is gone."""


class SandboxFileError(OSError, SandboxError):  # OSError first: it takes `errno` when it is made
    """A file of a sandbox can't be listed, read or written; `errno` says why."""


class ClosedError(GymLLMError, RuntimeError, ClosedEnvironmentError):
    """Something was used after it was closed."""


class RunError(GymLLMError, RuntimeError):
    """A training run can't go on. What was collected is saved; the message says where."""
