"""Documents as rows, and the code that they had when they took effect.

A document names code by file or module, and people keep editing those. So the content of the files is kept beside the
document: a replica that starts later runs what was deployed, and a rollback brings the code back. Code is kept by what
identifies a version (its text, its folder, the digest of its code), once for all documents that share it, and dropped
with the last of them. `config/code.py` bounds what a node may keep; a document with a node beyond that keeps nothing.

Rows of documents are made here, too, because sources are found by the document as it was stored.
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
    """`SourceStore` of the interface, beside the tables of documents. Its table is made when it is missing, so that a
    file of an earlier Pointsman can be used."""

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
    """The key under which its sources are stored."""
    return sha256(msgspec.json.encode([document.text, document.folder, document.code])).hexdigest()
