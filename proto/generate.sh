#!/bin/sh
# Compiles the schemas into rendezvous/pb. Usage: proto/generate.sh [PYTHON] [FOLDER]
# PYTHON has the grpcio-tools of requirements/generator.txt: newer ones write code that refuses an older protobuf.
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv-generator/bin/python}
out=${2:-rendezvous/pb}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
find proto -name '*.proto' | sort | xargs "$python" -m grpc_tools.protoc -Iproto --python_out="$made" --pyi_out="$made"
# The schemas do not import each other, so all that is made fits into one flat package.
mkdir -p "$out"
find "$made" -name '*_pb2.py*' -exec cp {} "$out" ';'
