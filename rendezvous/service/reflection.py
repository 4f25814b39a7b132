"""grpc.reflection: describes the services and their messages to tools such as grpcurl.

The schema of reflection itself is built here, in a descriptor pool of its own. So it cannot conflict with another
copy in the same process, and needs no further package. `v1` and `v1alpha` are the same on the wire.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.service.limits import LimitReached

if TYPE_CHECKING:
    from rendezvous.service.calls import Calls

NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_AT_ONCE = 16
_PACKAGE = "ddp.reflection"
_INT, _STRING, _BYTES, _MESSAGE = 5, 9, 12, 11  # FieldDescriptorProto.Type
_NOT_FOUND, _UNIMPLEMENTED = 5, 12

# message -> (field, number, type, "*" repeated, "?" one of several, or the name of its message)
_SCHEMA: dict[str, tuple[tuple[str, int, int, str], ...]] = {
    "Request": (
        ("host", 1, _STRING, ""),
        ("file_by_filename", 3, _STRING, "?"),
        ("file_containing_symbol", 4, _STRING, "?"),
        ("list_services", 7, _STRING, "?"),
    ),
    "Response": (
        ("valid_host", 1, _STRING, ""),
        ("original_request", 2, _MESSAGE, "Request"),
        ("file_descriptor_response", 4, _MESSAGE, "Files"),
        ("list_services_response", 6, _MESSAGE, "Services"),
        ("error_response", 7, _MESSAGE, "Error"),
    ),
    "Files": (("file_descriptor_proto", 1, _BYTES, "*"),),
    "Services": (("service", 1, _MESSAGE, "*Service"),),
    "Service": (("name", 1, _STRING, ""),),
    "Error": (("error_code", 1, _INT, ""), ("error_message", 2, _STRING, "")),
}


class Reflection:
    """Needs no token: the schema is public, and the service offers reflection only with `--reflection`."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = (*services, *NAMES)
        self._streams = 0

    def methods(self, calls: Calls) -> dict[str, Any]:
        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(calls.guard(self._serve))}

    async def _serve(self, _: Any, context: Any) -> None:
        if self._streams >= _AT_ONCE:
            raise LimitReached("too many reflection streams are open; try again later")
        self._streams += 1
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                await context.write(self.answer(data))
        finally:
            self._streams -= 1

    def answer(self, data: bytes) -> bytes:
        kinds = _kinds()
        request = kinds["Request"].FromString(data)
        response = kinds["Response"](valid_host=request.host, original_request=request)
        match request.WhichOneof("asked"):
            case "list_services":
                response.list_services_response.service.extend(
                    kinds["Service"](name=name) for name in self._services
                )
            case "file_by_filename" if request.file_by_filename == pb.DESCRIPTOR.name:
                response.file_descriptor_response.file_descriptor_proto.append(pb.DESCRIPTOR.serialized_pb)
            case "file_containing_symbol" if _is_ours(request.file_containing_symbol):
                response.file_descriptor_response.file_descriptor_proto.append(pb.DESCRIPTOR.serialized_pb)
            case None:
                response.error_response.error_code = _UNIMPLEMENTED
                response.error_response.error_message = "extensions are not supported"
            case _:
                response.error_response.error_code = _NOT_FOUND
                response.error_response.error_message = "unknown symbol or file"
        answer: bytes = response.SerializeToString()
        return answer


def _is_ours(symbol: str) -> bool:
    """Whether it is a message, an enum or a service of ours, or a part of one, such as a method."""
    for name in (symbol, symbol.rpartition(".")[0]):
        try:
            return bool(descriptor_pool.Default().FindFileContainingSymbol(name).name == pb.DESCRIPTOR.name)
        except KeyError:
            continue
    return False


@cache
def _kinds() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ddp_reflection.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        if any(how == "?" for *_, how in fields):
            message.oneof_decl.add(name="asked")
        for field_name, number, kind, how in fields:
            field = message.field.add(name=field_name, number=number, type=kind)
            field.label = field.LABEL_REPEATED if how.startswith("*") else field.LABEL_OPTIONAL
            if how == "?":
                field.oneof_index = 0
            if kind == _MESSAGE:
                field.type_name = f".{_PACKAGE}.{how.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _SCHEMA
    }
