"""What `fetch` asks of the Hugging Face hub: a revision's commit, its files, their bytes; and the hub's refusals, each in one sentence.

Through huggingface_hub's client, so its tokens, proxies and variables (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) hold here too. Files are
read by plain HTTP into the output folder; nothing is written to the hub's cache.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import httpx2
import huggingface_hub
from huggingface_hub import errors as refusals
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from hybrid_megatron.errors import DataError

TIMEOUT_SECONDS = 30.0  # of silence
_OFFLINE = "HF_HUB_OFFLINE forbids asking the hub; unset it to fetch"


@dataclass(frozen=True)
class RemoteFile:
    """One file of a commit. Large files have their SHA-256 on the hub; small ones, kept in git itself, their git blob's SHA-1."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str


class Hub:
    """One data set on the hub at `endpoint` (huggingface.co unless HF_ENDPOINT says otherwise)."""

    def __init__(self, repository: str, endpoint: str | None = None):
        self.repository = repository
        self._api = huggingface_hub.HfApi(endpoint=endpoint)
        self.endpoint = self._api.endpoint
        self.url = f"{self.endpoint}/datasets/{repository}"

    def commit(self, revision: str) -> str:
        """The 40 digits of the commit behind a branch, a tag or a commit's own number. Raises `DataError`."""
        with self.explained(revision):
            commit = self._api.dataset_info(self.repository, revision=revision, timeout=TIMEOUT_SECONDS).sha
        if not commit:
            raise DataError(f"{self.endpoint} names no commit for {self.repository} at {revision}; check --endpoint")
        return commit

    def files(self, commit: str) -> list[RemoteFile]:
        """All files of a commit, from as many pages as it takes. Raises `DataError`, also for a path that would leave its folder."""
        files = []
        with self.explained(commit):
            for entry in self._api.list_repo_tree(self.repository, recursive=True, revision=commit, repo_type="dataset"):
                if isinstance(entry, huggingface_hub.hf_api.RepoFile):
                    sha256 = entry.lfs.sha256 if entry.lfs is not None else None
                    files.append(RemoteFile(entry.path, entry.size, sha256, entry.blob_id))
        for file in files:
            path = PurePosixPath(file.path)
            if path.is_absolute() or ".." in path.parts or "\\" in file.path or "\0" in file.path:
                raise DataError(f"{self.repository} holds a file {file.path!r}, which would leave its folder; nothing was fetched")
        return files

    @contextlib.contextmanager
    def stream(self, commit: str, path: str, offset: int) -> Iterator[httpx2.Response]:
        """The answer to a request for a file's bytes from `offset` on; its body is still to be read, its status still to be judged."""
        if huggingface_hub.constants.is_offline_mode():
            raise DataError(_OFFLINE)
        url = huggingface_hub.hf_hub_url(self.repository, path, repo_type="dataset", revision=commit, endpoint=self.endpoint)
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}  # a compressed answer could not be resumed
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
            yield response

    def refuse(self, response: httpx2.Response) -> None:
        """Raise `DataError` if the answer is a refusal."""
        with self.explained(""):
            hf_raise_for_status(response)

    @contextlib.contextmanager
    def explained(self, revision: str) -> Iterator[None]:
        """Turn what huggingface_hub raises into a `DataError`."""
        try:
            yield
        except (refusals.HFValidationError, httpx2.InvalidURL) as error:
            raise DataError(f"{self.url} is no address of a data set ({_first_line(error)}); check --repository and --endpoint") from None
        except refusals.OfflineModeIsEnabled:
            raise DataError(_OFFLINE) from None
        except httpx2.HTTPError as error:
            raise DataError(self._sentence(error, revision)) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            said = f"{type(error).__name__}: {_first_line(error)}"
            raise DataError(f"{self.endpoint} does not answer as a hub does ({said}); check --endpoint or HF_ENDPOINT") from None

    def _sentence(self, error: httpx2.HTTPError, revision: str) -> str:
        login = "log in with `hf auth login` or set HF_TOKEN"
        if isinstance(error, refusals.GatedRepoError):
            return f"{self.repository} is gated: accept its terms at {self.url}, then {login}"
        if isinstance(error, refusals.RevisionNotFoundError):
            return f"{self.repository} has no revision {revision}; see {self.url}/commits/main, or leave --revision out"
        if isinstance(error, refusals.RepositoryNotFoundError):
            return f"{self.endpoint} has no data set {self.repository} that you may read; check --repository, or {login}"
        if isinstance(error, refusals.HfHubHTTPError):
            status = error.response.status_code
            if status in (401, 403):
                return f"{self.endpoint} refuses access to {self.repository} (status {status}); check your rights there, and {login}"
            return f"{self.endpoint} answered {self.repository} with status {status}; try again later, or check --endpoint"
        return f"{self.endpoint} cannot be reached ({_first_line(error)}); check the network, --endpoint or HF_ENDPOINT and run it again"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
