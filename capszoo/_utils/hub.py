"""Repositories on the Hugging Face Hub: their names, and uploads to them."""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from capszoo._version import __version__

from ..errors import CapszooError, UsageError

ResultT = TypeVar("ResultT")

#: Longest wait in seconds, as requested by the Hub, before a call is repeated; longer ones are left to the user.
LONGEST_WAIT = 60
#: Number of repetitions of a call after such a wait.
RETRIES = 2


class PublishError(CapszooError):
    """What is to be published is not complete, or the Hub refused it."""


def check_repo_id(repo_id: str) -> None:
    """Check the name of a repository, also before a dry run.

    Raises:
        UsageError: it is not USER/NAME, or the Hub takes no such name.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    remedy = "give USER/NAME, such as me/my-capsules"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise UsageError(f"'{repo_id}' is no name of a repository", remedy)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"the Hub takes no repository of this name ({reason})", remedy) from None


def is_hub_error(error: BaseException) -> bool:
    """True if the error comes from the Hub, the network or the disk, or was raised from such an error."""
    from huggingface_hub.errors import HFValidationError

    network = ("httpx", "httpx2", "httpcore", "requests", "urllib3")  # depends on the client's version
    return any(
        isinstance(cause, (OSError, HFValidationError)) or type(cause).__module__.split(".")[0] in network
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those behind it: the client wraps them."""
    while error is not None:
        yield error
        error = error.__cause__


def refusal(error: BaseException, repo_id: str) -> tuple[str, str]:
    """Why the Hub, or the mirror that ``HF_ENDPOINT`` names, gave no file of a repository, and what to do about it.

    Args:
        error: of ``is_hub_error``.
        repo_id: ``USER/NAME`` or ``USER/NAME@REVISION``.
    """
    from huggingface_hub import get_token
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, _, revision = repo_id.partition("@")
    log_in = "run `hf auth login`, or set HF_TOKEN"
    causes = [*_causes(error)]

    def is_(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if is_(GatedRepoError):
        return "it is gated", f"ask for access at {ENDPOINT}/{name}, then {log_in}"
    if is_(RepositoryNotFoundError):
        who = "your token sees no such repository" if get_token() else "no such repository, or a private one"
        return who, f"check the name at {ENDPOINT}; for a private one {log_in} of an account that may read it"
    if is_(RevisionNotFoundError):
        return (
            f"it has no revision {revision}",
            f"choose one of {ENDPOINT}/{name}/commits/main, or leave @ out",
        )
    if is_(HFValidationError):
        return "it is no name of a repository", "give hf-hub:USER/NAME"
    if is_(OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set", "unset it for the first call"
    disk = next((one for one in causes if isinstance(one, OSError) and one.filename), None)
    if disk is not None:
        return f"{disk.filename}: {disk.strerror}", "check its permissions and its space, or set HF_HOME"
    if is_(LocalEntryNotFoundError) or _status(error) is None:
        return "no connection", f"check the connection to {ENDPOINT}"
    message = " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())[:200]
    return message, f"check the name and the connection to {ENDPOINT}"


#: Seconds that a call to the Hub may wait without receiving data, unless ``CAPSZOO_HUB_TIMEOUT`` sets another limit.
#: The client limits downloads by ``HF_HUB_ETAG_TIMEOUT`` and ``HF_HUB_DOWNLOAD_TIMEOUT``: 10 seconds, a few attempts.
HUB_SECONDS = 60.0


def limit_hub_waits() -> float:
    """Set a time limit for calls of the Hub's client, which by default waits forever; return it, in seconds.

    ``HfApi.repo_info`` overrides it by its own argument ``timeout``, None by default.

    Raises:
        UsageError: ``CAPSZOO_HUB_TIMEOUT`` is not a number of seconds above 0.
    """
    setting = os.environ.get("CAPSZOO_HUB_TIMEOUT", str(HUB_SECONDS))
    try:
        seconds = float(setting)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"CAPSZOO_HUB_TIMEOUT is '{setting[:60]}'", "give a number of seconds, such as 60")
    from huggingface_hub.utils import get_session

    session: Any = get_session()
    if hasattr(session, "timeout"):
        session.timeout = seconds  # httpx, in huggingface_hub 1.0 and newer; one client for the whole process
        return seconds
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:  # before 1.0 it is the client's own session that refuses calls
        return seconds
    from huggingface_hub import configure_http_backend
    from requests import Session  # type: ignore[import-untyped]

    class Limited(Session):
        def request(self, *arguments: Any, **options: Any) -> Any:
            return super().request(*arguments, **{**options, "timeout": options.get("timeout") or seconds})

    configure_http_backend(backend_factory=Limited)
    return seconds


def upload(
    folder: str | Path,
    repo_id: str,
    message: str,
    private: bool = False,
    say: Callable[[str], None] = print,
    *,
    repo_type: str = "model",
    owned: Sequence[str] = (),
    tag: str = "",
    **create: Any,
) -> dict[str, Any]:
    """Upload a folder to a repository, as one commit; the same call resumes after a failure.

    Args:
        folder: all files of ours.
        repo_id: ``USER/NAME``; created if it does not exist.
        message: of the commit.
        private: a new repository is private; one that exists and is public is refused.
        say: called with a line before each pause that the Hub asks for.
        repo_type: ``"model"`` or ``"space"``.
        owned: names and patterns of files of ours, which are deleted there unless the folder has them.
        tag: a tag for the commit; one of this name that exists is kept.
        **create: further arguments for a new repository.

    Returns:
        ``url``, ``commit`` and ``changed``.

    Raises:
        PublishError: the Hub refuses it; one line.
    """
    from huggingface_hub import HfApi

    seconds = limit_hub_waits()
    api = HfApi(library_name="capszoo", library_version=__version__)

    def call(function: Callable[..., ResultT], **arguments: Any) -> ResultT:
        return _with_patience(
            lambda: function(repo_id=repo_id, repo_type=repo_type, **arguments), repo_id, say
        )

    call(api.create_repo, private=private or None, exist_ok=True, **create)
    before: Any = call(api.repo_info, timeout=seconds)
    if private and not before.private:
        raise PublishError(
            f"{repo_id} exists and is public",
            "make it private on the Hub, or choose another name; nothing was sent",
        )
    there = [sibling.rfilename for sibling in before.siblings or ()]
    ours = [name for name in there if any(fnmatch.fnmatch(name, pattern) for pattern in owned)]
    commit: Any = call(
        api.upload_folder,
        folder_path=str(folder),
        commit_message=message,
        delete_patterns=[name for name in ours if not (Path(folder) / name).exists()] or None,
    )
    if tag:
        call(api.create_tag, tag=tag, revision=commit.oid, exist_ok=True)
    prefix = "" if repo_type == "model" else f"{repo_type}s/"
    url = f"{api.endpoint}/{prefix}{repo_id}"
    return {"url": url, "commit": commit.oid, "changed": commit.oid != before.sha}


def _with_patience(call: Callable[[], ResultT], repo_id: str, say: Callable[[str], None]) -> ResultT:
    """Result of a call. It is repeated after a wait requested by the Hub; any other failure is one line."""
    for left in range(RETRIES, -1, -1):
        try:
            return call()
        except Exception as error:
            status, wait = _status(error), _wait(error)
            if status == 429 and left and wait is not None and wait <= LONGEST_WAIT:
                say(f"the Hub asks for a pause of {wait} s")
                time.sleep(wait)
            else:
                raise _explained(error, status, wait, repo_id) from error
    raise AssertionError("the last round returns or raises")


def _response(error: BaseException) -> Any:
    """The Hub's response behind an error; None if there was none."""
    responses = (getattr(cause, "response", None) for cause in _causes(error))
    return next((response for response in responses if response is not None), None)


def _status(error: BaseException) -> int | None:
    return getattr(_response(error), "status_code", None)


def _wait(error: BaseException) -> int | None:
    """Seconds that the Hub asks to wait: in ``Retry-After``, or as ``t=…`` in ``RateLimit``."""
    headers = getattr(_response(error), "headers", {})
    match = re.fullmatch(r"\s*(\d+)\s*", headers.get("Retry-After", "")) or re.search(
        r"\bt\s*=\s*(\d+)", headers.get("RateLimit", "")
    )
    return int(match[1]) if match else None


def _explained(error: Exception, status: int | None, wait: int | None, repo_id: str) -> PublishError:
    """One line about the Hub's response, and the remedy."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import OfflineModeIsEnabled

    again = "then give the same command again"
    namespace = repo_id.partition("/")[0]
    have = "does not accept your token" if get_token() else "needs a token"
    taken = f"{repo_id} was changed by someone else at the same time, or is taken ({status})"
    look = f"look at it on the Hub, {again}, or choose another name"
    when = f"in {wait} s" if wait is not None else "in some minutes"
    said = {
        401: (
            f"the Hub {have} (401)",
            f"run `hf auth login`, or set HF_TOKEN to a token that may write, {again}",
        ),
        403: (
            f"your token may not write to {repo_id} (403)",
            f"use one that may, or a namespace other than {namespace}",
        ),
        404: (
            f"the Hub knows no {repo_id} (404)",
            f"check the name, and that your account or organisation owns {namespace}/",
        ),
        409: (taken, look),
        412: (taken, look),
        429: ("the Hub has had too many calls (429)", f"give the same command again {when}"),
    }
    if status in said:
        return PublishError(*said[status])
    if status is not None and status >= 500:
        return PublishError(
            f"the Hub failed ({status})", "give the same command again later; it resumes there"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return PublishError("HF_HUB_OFFLINE is set", f"unset it, {again}")
    message = getattr(error, "server_message", None) or str(error) or type(error).__name__
    reason = " ".join(str(message).split())[:200]
    if status is not None:
        return PublishError(
            f"the Hub refuses {repo_id} ({status}: {reason})", "fix that, then run the command again"
        )
    if not is_hub_error(error):  # its client failed on the response: a redirect, or a page that is not JSON
        return PublishError(
            f"the Hub's answer is invalid ({type(error).__name__}: {reason})",
            "check HF_ENDPOINT and any proxy, then give the same command again",
        )
    cause = error.__cause__ or error
    reason = " ".join(str(cause).split())[:200] or type(cause).__name__
    return PublishError(
        f"the connection to the Hub broke ({reason})", "give the same command again; it resumes there"
    )
