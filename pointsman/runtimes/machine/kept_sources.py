"""Documents as rows, and the code that they had when they took effect.

A document names code by file or module, and people keep editing these files. So the content of the files is kept with
the document: a replica that starts later runs the deployed code, and a rollback brings the code back. The key of the
code consists of the document's text, its folder, and the digest of the code. Documents with the same key share the
code, which is dropped with the last of them. `config/code.py` limits the code that a node may keep. If a node exceeds
this limit, nothing is kept for its document.

This module also makes rows of documents, because sources are found by the document as it was stored.
"""

import sqlite3
from hashlib import sha256
from typing import Any

import msgspec

from pointsman.config.revision import ManifestText
from pointsman.errors import NotStored

DOCUMENT = ", ".join(ManifestText.__struct_fields__)
"""The columns of a document."""


def document_in(row: tuple[Any, ...]) -> ManifestText:
    return msgspec.convert(dict(zip(ManifestText.__struct_fields__, row, strict=True)), ManifestText)


def values_of(document: ManifestText) -> tuple[Any, ...]:
    return msgspec.structs.astuple(document)


class SqliteSources:
    """`SourceStore` of the interface, in the file of the documents. A missing table is created, so that a file of an
    earlier Pointsman can be used."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute("create table if not exists sources (document text primary key, packed text) without rowid")

    def save(self, document: ManifestText, packed: str) -> None:
        """Store sources, within a transaction that has saved the document."""
        self._db.execute("insert or replace into sources values (?, ?)", (_key(document), packed))
        rows = [
            row
            for table in ("manifests", "applications")
            for row in self._db.execute(f"select {DOCUMENT} from {table}").fetchall()
        ]
        keys = [_key(document_in(row)) for row in rows]
        marks = ", ".join("?" * len(keys))
        self._db.execute(f"delete from sources where document not in ({marks})", keys)

    def of(self, document: ManifestText) -> str | None:
        try:
            row = self._db.execute("select packed from sources where document = ?", (_key(document),)).fetchone()
        except sqlite3.Error as error:
            raise NotStored(f"the code of a version cannot be read ({error})") from error
        return None if row is None else str(row[0])


def _key(document: ManifestText) -> str:
    """The key under which the sources of a document are stored."""
    return sha256(msgspec.json.encode([document.text, document.folder, document.code])).hexdigest()
