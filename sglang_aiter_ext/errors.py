"""Every exception class of this package.

    ExtensionError
    ├── SettingError (ValueError)    A variable holds a value that is not accepted.
    ├── Unsupported                  A probe finds that something it relies on is missing or different.
    ├── UnusableAiter                AITER lacks a kernel, or its parameters are not those known here.
    ├── NotRun                       A kernel does not cover this GPU or these shapes, so the self-test skips it.
    └── Refusal (RuntimeError)       A wrapper raises it on purpose, so that the user reads it.
        ├── CouldNotApply            Strict mode makes an error of what would have been a log line.
        └── DecodeError              SGLANG_USE_AITER_PA=1 cannot be served; the message says what helps.
            └── InternalError        A fault of ours, where going on would decode differently.

A user meets `SettingError` and each `Refusal`, and the self-test prints the text of the two about kernels. The
others become the reason of a verdict or a log line. Where a wrapper raises anything else, SGLang serves the call.
"""

#: How the message of a DecodeError ends where the user has another way.
DECODE_ELSEWHERE = "start with SGLANG_USE_AITER_PA=0 to decode on the backend of --attention-backend"


class ExtensionError(Exception): ...


class SettingError(ExtensionError, ValueError): ...


class Unsupported(ExtensionError): ...


class UnusableAiter(ExtensionError): ...


class NotRun(ExtensionError): ...


class Refusal(ExtensionError, RuntimeError): ...


class CouldNotApply(Refusal): ...


class DecodeError(Refusal): ...


class InternalError(DecodeError):
    def __init__(self, message: str):
        super().__init__(f"SGLANG_USE_AITER_PA=1 is not served: {message}; {DECODE_ELSEWHERE}")

    def __reduce__(self) -> tuple[type[DecodeError], tuple[object, ...]]:
        # Another process gets the whole message, and does not make it again.
        return DecodeError, self.args
