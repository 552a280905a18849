"""Names of repositories on the Hugging Face Hub."""

from __future__ import annotations

import re

from .errors import UsageError

__all__ = ["check_repo_id"]


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
