"""The messages of predict.proto, made when this is imported: generated code would go with one version of protobuf."""

from typing import Any

from google.protobuf import descriptor_pool, message_factory, struct_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

PACKAGE = "pointsman.v1"
SERVICE = f"{PACKAGE}.Predict"

_STRING, _MESSAGE = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_MESSAGE


def _file() -> FileDescriptorProto:
    """What the compiler would make of predict.proto."""
    file = FileDescriptorProto(
        name="pointsman/v1/predict.proto",
        package=PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    request = file.message_type.add(name="PredictRequest")
    request.oneof_decl.add(name="input")
    _field(request, "application", 1)
    _field(request, "json", 2, oneof=0)
    _field(request, "values", 3, _MESSAGE, oneof=0, message=struct_pb2.Value.DESCRIPTOR.full_name)
    response = file.message_type.add(name="PredictResponse")
    _field(response, "json", 1)
    _field(response, "request_id", 2)
    service = file.service.add(name="Predict")
    for name, streams in (("Predict", False), ("PredictStream", True)):
        service.method.add(
            name=name,
            input_type=f".{PACKAGE}.PredictRequest",
            output_type=f".{PACKAGE}.PredictResponse",
            server_streaming=streams,
        )
    return file


def _field(
    of: DescriptorProto,
    name: str,
    number: int,
    kind: FieldDescriptorProto.Type.ValueType = _STRING,
    *,
    oneof: int | None = None,
    message: str = "",
) -> None:
    field = of.field.add(name=name, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if oneof is not None:
        field.oneof_index = oneof
    if message:
        field.type_name = f".{message}"


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(FILE.message_types_by_name[name])


_pool = descriptor_pool.Default()  # where reflection looks
FILE = _pool.AddSerializedFile(_file().SerializeToString())
PredictRequest = _class("PredictRequest")
PredictResponse = _class("PredictResponse")


def plain(value: Any) -> Any:
    """What a `google.protobuf.Value` stands for. Its numbers are doubles; those that are whole numbers are taken for
    such."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {name: plain(one) for name, one in value.struct_value.fields.items()}
    if kind == "list_value":
        return [plain(one) for one in value.list_value.values]
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() and abs(number) < 1 << 53 else number
    return None if kind in (None, "null_value") else getattr(value, kind)
