"""Models at a URL, through fsspec: one file, an archive, or a folder with a config.json.

http(s) needs `fsspec[http]`, s3 `s3fs` (`pip install 'deliver[remote]'`); gs, az and the rest their own
packages. A fragment pins a single file: `https://host/model.gguf#sha256=...`. A `SHA256SUMS` in a
folder is checked against its files.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from delivery.artifact import hash_file
from delivery.checkpoint.directory import check_relative
from delivery.checkpoint.fetch.archive import extract, is_archive
from delivery.checkpoint.fetch.place import Ledger, check_space, locked, receive, slot
from delivery.errors import DataError, EnvironmentLacking, UsageError

SUMS = "SHA256SUMS"
_PIN = re.compile(r"sha256=([0-9a-f]{64})")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What a folder that cannot be listed (plain HTTP) is asked for; all but the config may be missing.
_USUAL = (
    "config.json",
    SUMS,
    *_INDEXES,
    "model.safetensors",
    "pytorch_model.bin",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
    "README.md",
)
_VERSION_KEYS = ("ETag", "etag", "VersionId", "LastModified", "Last-Modified", "mtime")
_OPTIONAL_FIRST = {"model.safetensors": _INDEXES[0], "pytorch_model.bin": "model.safetensors"}


class RemoteModel:
    """A model at a URL. Raises UsageError `url-invalid`, EnvironmentLacking `extra-missing`."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, _, fragment = url.partition("#")
        pinned = _PIN.fullmatch(fragment)
        if fragment and pinned is None:
            raise UsageError("url-invalid", f"the fragment #{fragment} is not understood", hint="#sha256=HEX")
        self._sha256 = pinned[1] if pinned else None
        self._slot = slot(folder, self.url)
        self._fs, self._path = _filesystem(self.url)

    def digests(self) -> Mapping[str, str]:
        """Name → pinned SHA-256, or what the server says of each file's version and size.

        Out of reach, what was fetched last. Raises EnvironmentLacking `source-unreachable`.
        """
        try:
            return {name: self._version(name, info) for name, info in self._files().items()}
        except EnvironmentLacking:
            known = Ledger(self._slot).whole()
            if known is None:
                raise
            return known

    def fetch(self, progress: Callable[[str], None]) -> Path:
        """The local file or folder, whole and verified; continues where an earlier attempt stopped.

        Raises EnvironmentLacking `source-unreachable`, `disk-full`, DataError `download-damaged`,
        `source-incomplete`, `path-escapes`, `archive-damaged`.
        """
        digests = dict(self.digests())
        with locked(self._slot):
            ledger = Ledger(self._slot)
            if ledger.whole() != digests:
                self._bring(digests, ledger, progress)
                ledger.finish(digests)
        return _entry(self._slot)

    def _bring(self, digests: Mapping[str, str], ledger: Ledger, progress: Callable[[str], None]) -> None:
        files = {n: i for n, i in self._files().items() if not ledger.arrived(n, digests[n])}
        check_space(self._slot, sum(int(info["size"]) for info in files.values()))
        for name, info in files.items():
            progress(f"{name}, {int(info['size'])} bytes")
            source = str(info["name"])
            receive(
                self._slot / name,
                int(info["size"]),
                lambda start, end, source=source: self._read(source, start, end),  # type: ignore[misc]
                version=digests[name],
                sha256=self._sha256,
            )
            ledger.note(name, digests[name])
        _check_sums(self._slot)
        for path in [p for p in self._slot.iterdir() if is_archive(p.name)]:
            unpacked = self._slot / "unpacked"
            shutil.rmtree(unpacked, ignore_errors=True)
            extract(path, unpacked)
            path.unlink()

    def _files(self) -> dict[str, dict[str, Any]]:
        """Relative name → fsspec's info of every file."""
        single = self.url.rstrip("/").rsplit("/", 1)[-1]
        if single.endswith((".gguf", ".safetensors")) or is_archive(single):
            return {single: self._info(self._path)}
        if self.url.startswith(("http://", "https://")):
            return self._asked()
        return self._listed()

    def _listed(self) -> dict[str, dict[str, Any]]:
        root = str(self._path).rstrip("/")
        try:
            found = self._fs.find(root, detail=True)
        except Exception as error:
            raise self._unreachable(error) from error
        files = {str(name).removeprefix(root).lstrip("/"): info for name, info in found.items()}
        for name in files:
            check_relative(name, self.url)
        if "config.json" not in files and not any(n.endswith(".gguf") for n in files):
            raise self._incomplete("config.json")
        return files

    def _asked(self) -> dict[str, dict[str, Any]]:
        root = self.url.rstrip("/")
        files: dict[str, dict[str, Any]] = {}
        for name in _USUAL:
            if _OPTIONAL_FIRST.get(name) in files:
                continue
            info = self._info(f"{root}/{name}", missing=name != "config.json")
            if info:
                files[name] = info
        for index in _INDEXES:
            if index in files:
                text = self._read(str(files[index]["name"]), 0, int(files[index]["size"]))
                for shard in _shards(text, index):
                    check_relative(str(shard), index)
                    files[str(shard)] = self._info(f"{root}/{shard}")
                break
        return files

    def _info(self, path: str, *, missing: bool = False) -> dict[str, Any]:
        try:
            info = dict(self._fs.info(path))
        except FileNotFoundError as error:
            # fsspec says so of an unreachable server too, and keeps the reason.
            if error.__cause__ is not None and getattr(error.__cause__, "status", None) not in (404, 410):
                raise self._unreachable(error.__cause__) from error
            if missing:
                return {}
            raise self._incomplete(path.rsplit("/", 1)[-1]) from error
        except Exception as error:
            raise self._unreachable(error) from error
        if info.get("size") is None:
            raise self._unreachable(ValueError(f"the server states no size for {path}"))
        return info

    def _read(self, path: str, start: int, end: int) -> bytes:
        try:
            return bytes(self._fs.cat_file(path, start=start, end=end))
        except Exception as error:
            raise self._unreachable(error) from error

    def _version(self, name: str, info: Mapping[str, Any]) -> str:
        if self._sha256:
            return self._sha256
        stated = [info.get(key) for key in _VERSION_KEYS]
        words = [str(v).strip('"') for v in stated if v]
        return " ".join([*words[:1], str(info["size"])])

    def _unreachable(self, error: BaseException) -> EnvironmentLacking:
        text = str(error).split("\n")[0][:200] or type(error).__name__
        return EnvironmentLacking(
            "source-unreachable",
            f"{self.url} cannot be read",
            why=text,
            hint="check the address, credentials and proxy; the same command continues what was begun",
        )

    def _incomplete(self, name: str) -> DataError:
        return DataError(
            "source-incomplete",
            f"{self.url} has no {name}",
            why="a folder needs config.json and its weights; a file ends in .gguf or an archive's suffix",
        )


def _shards(text: bytes, index: str) -> list[str]:
    """The files that an index names. Raises DataError `index-disagrees`."""
    try:
        return sorted({str(name) for name in json.loads(text)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError("index-disagrees", f"{index} has no usable weight_map", why=repr(error)) from error


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        raise EnvironmentLacking(
            "extra-missing",
            f"{url.split('://')[0]}:// cannot be read",
            why=str(error),
            hint="pip install 'deliver[remote]'",
        ) from error
    except ValueError as error:
        raise UsageError("url-invalid", f"{url} cannot be read as a URL", why=str(error)) from error
    return filesystem, str(path)


def _check_sums(folder: Path) -> None:
    sums = folder / SUMS
    for line in sums.read_text("utf-8").splitlines() if sums.is_file() else ():
        stated, _, name = line.partition(" ")
        name = name.strip().lstrip("*")
        check_relative(name, SUMS)
        path = folder / name
        if path.is_file() and hash_file(path).sha256 != stated:
            path.unlink()
            raise DataError(
                "download-damaged",
                f"{name} is not the file that was expected",
                why=f"{SUMS} says {stated}",
                hint="run the same command again",
            )


def _entry(folder: Path) -> Path:
    """The folder that holds the config, or the only file."""
    for path in (folder, folder / "unpacked", *sorted((folder / "unpacked").glob("*"))):
        if (path / "config.json").is_file() or any(path.glob("*.gguf")):
            files = [p for p in path.iterdir() if p.suffix == ".gguf"]
            return files[0] if len(files) == 1 and not (path / "config.json").is_file() else path
    raise DataError(
        "source-incomplete",
        f"{folder} holds no model",
        why="neither config.json nor a .gguf file is in it",
    )
