#!/bin/sh
# Makes stubs from protos/v1 and the client beside this file: ./build.sh [FOLDER FOR WHAT IS BUILT]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
built=${1:-$here}
protoc -I "$root" --cpp_out="$built" --grpc_out="$built" --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" \
    "$root/protos/v1/common.proto" "$root/protos/v1/router.proto"
g++ -std=c++17 -O0 -I "$built" -o "$built/client" "$here/client.cc" \
    "$built"/protos/v1/*.cc $(pkg-config --cflags --libs grpc++ protobuf)
