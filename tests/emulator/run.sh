#!/usr/bin/env bash
# Runs a command with an emulated GPU, so that the whole path to the GPU (plans, generated kernels,
# launches, products, CUDA graphs) is tested on a machine without one:
#   tests/emulator/run.sh build/test --gpu gpu_ops
#   tests/emulator/run.sh build/mlua run models/gpt.lua --device cuda layers=2 embed=64 heads=4 seq=64 batch=2
#   tests/emulator/run.sh build/mlua run models/gpt.lua --device cuda -n 2 --mesh dp=2 ...
# There are EMULATOR_GPUS of them (8). Threads of a block are fibers; kernels are compiled by the C++ compiler, products are by definition,
# and cuDNN is absent, so attention runs on mlua's own kernels. It finds wrong indices, missing
# barriers, reads of what nobody wrote and, with EMULATOR_BACKWARDS=1, an order that matters; streams do their work as late as
# they may, the first one as soon as it may, with EMULATOR_EARLY=1 the other way round. It says
# nothing about speed. Needs the CUDA toolkit's headers and a C++ compiler. B is the build folder.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${B:-$root/build}/emulator
include=${CUDA_HOME:-/usr/local/cuda}/include
mkdir -p "$out/cache"
out=$(cd "$out" && pwd)
make_library() { # NAME LINK SOURCE...
    local name=$1 link=$2 s newer=
    shift 2
    for s in "$@" "$here/fibers.h"; do [ "$out/$name" -nt "$s" ] || newer=1; done
    [ -z "$newer" ] || ${CC:-cc} -std=gnu11 -O2 -w -shared -fPIC -Wl,-soname,"$name" -isystem "$include" \
        -o "$out/$name" "$@" $link -ldl -lpthread
}
make_library libcuda.so.1 "" "$here/cuda.c" "$here/streams.c" "$here/fibers.c"
make_library libnvrtc.so.13 "" "$here/nvrtc.c"
make_library libcublasLt.so.13 "$out/libcuda.so.1" "$here/cublaslt.c"
make_library libnccl.so.2 "$out/libcuda.so.1" "$here/nccl.c"
# A change of the emulator makes its compiled kernels stale.
for s in device.hh casts.hh nvrtc.c; do [ "$out/cache" -nt "$here/$s" ] || rm -rf "$out/cache"; done
mkdir -p "$out/cache"
for s in device.hh casts.hh; do # others may be compiling with them
    cmp -s "$here/$s" "$out/$s" || cp "$here/$s" "$out/$s"
done
EMULATOR=$out LD_LIBRARY_PATH=$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} MLUA_CUDNN=0 \
    MLUA_CACHE=${MLUA_CACHE:-$out/cache} exec "$@"
