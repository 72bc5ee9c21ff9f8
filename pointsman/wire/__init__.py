"""The format between gateway, replicas and handles: calls, and values as blobs.

Enters: values from user code. Leaves: bytes, and the same values restored from them, with the same types. The one rule:
only replicas decode blobs that are not plain (`decode_value`), because such blobs may contain code.
"""

from pointsman.wire.blobs import (
    KIND_COMPOSED,
    KIND_PICKLED,
    KIND_PLAIN,
    KIND_WITH_BUFFERS,
    LARGE_BYTES,
    StoredFile,
    check_counts,
    composed,
    decode_plain,
    decode_value,
    encode_plain,
    encode_value,
    files_inside,
    files_of,
    load_arrays,
)
from pointsman.wire.calls import (
    ARGUMENTS,
    BLOB,
    COLLECTED,
    PIECES,
    BlobAt,
    CallHead,
    Form,
    HandleAt,
    HttpHead,
    PieceReader,
    arguments,
    decode_call,
    encode_call,
    failed_after_pieces,
    failed_piece,
    failure_after_pieces,
    placeholder,
    placeholder_of_handle,
    read_template,
    template,
)
from pointsman.wire.failures import CallFailed, RefusedInput, pickled, raised_by
from pointsman.wire.node_memory import Fetcher, FilesOfNodes
from pointsman.wire.shared_memory import (
    BufferSource,
    SharedBuffers,
    UnreadableBlob,
    Unsendable,
)

__all__ = [
    "CallHead", "HttpHead", "Form", "COLLECTED", "ARGUMENTS", "BLOB", "PIECES", "encode_call", "decode_call",
    "arguments",
    "PieceReader", "failed_piece", "failed_after_pieces", "failure_after_pieces",
    "template", "read_template", "placeholder", "placeholder_of_handle", "BlobAt", "HandleAt",
    "encode_value", "decode_value", "encode_plain", "decode_plain", "composed",
    "files_of", "files_inside", "StoredFile", "check_counts", "load_arrays",
    "KIND_PLAIN", "KIND_PICKLED", "KIND_WITH_BUFFERS", "KIND_COMPOSED", "LARGE_BYTES",
    "SharedBuffers", "BufferSource", "Fetcher", "FilesOfNodes",
    "CallFailed", "RefusedInput", "raised_by", "pickled", "UnreadableBlob", "Unsendable",
]  # fmt: skip
