"""Folders on the Hugging Face hub: download one by its name, and upload one."""

import importlib
import os
import re
from pathlib import Path
from typing import Any

from dynorm.errors import StorageError

# Copies of the weights for other programs, which a repository may also have.
_FOR_OTHERS = [
    *("*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ot", "*.tflite", "*.gguf", "*.mlmodel"),
    *("onnx/*", "openvino/*", "coreml/*"),
]
# The name of a repository, with its organization.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_name(text: str | os.PathLike[str]) -> bool:
    """Return whether a text may be a name on the hub: it has one slash, and is not a path here."""
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and not Path(text).exists()


def downloaded(name: str, revision: str | None) -> Path:
    """Return the local folder of a model on the hub, downloaded unless it is in the cache.

    Copies of the weights in formats of other libraries are left out.
    """
    try:
        folder = _library().snapshot_download(name, revision=revision, ignore_patterns=_FOR_OTHERS)
        return Path(folder)
    # The library has many errors, for a missing repository, a missing network and others.
    except Exception as error:
        raise StorageError(
            f"{name} must be a folder, or a model on the hub within reach, but it is not here, and "
            f"the hub says {type(error).__name__}: {error!s:.300}; check the name and the network, "
            "or download it elsewhere with `hf download` and give its folder"
        ) from error


def upload(folder: str | os.PathLike[str], name: str) -> None:
    """Create a repository on the hub if there is none, and upload the files of a folder."""
    try:
        api = _library().HfApi()
        api.create_repo(name, exist_ok=True)
        api.upload_folder(folder_path=os.fspath(folder), repo_id=name)
    # As above.
    except Exception as error:
        raise StorageError(
            f"{folder} was saved, but could not be uploaded to {name!r} on the hub: "
            f"{type(error).__name__}: {error!s:.300}; check the name, the network and `hf auth "
            "login`, or run `hf upload` later"
        ) from error


def require_hub_name(name: str) -> None:
    """Refuse a name that cannot be one of a repository, before the model is written."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise StorageError(f"push_to_hub must be a name such as 'user/model', got {name!r}")
    _library()


def _library() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise StorageError(
            "huggingface_hub must be installed for models on the hub: pip install huggingface_hub"
        ) from error
