"""Files that are being written while a disk may be full: the error names the file and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from engine.errors import StoreError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk or its libraries say against a file or folder into a StoreError (SafetensorError is no OSError)."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{path.name} could not be written: {error}.",
            path=str(path),
            remedy="Make room or fix the folder's permissions, then resume; earlier steps are intact.",
        ) from error
