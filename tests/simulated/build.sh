#!/usr/bin/env bash
# Builds the simulated accelerator against the torch of a Python, in a minute or two.
# usage: build.sh PYTHON FOLDER    then PYTHONPATH=FOLDER PYTHON -c "import simdev"
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1
target=$2/simdev
mkdir -p "$target"
cp "$here"/package/*.py "$target/"
read -r torch abi headers < <("$python" -c "
import os, sysconfig, torch
abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
print(os.path.dirname(torch.__file__), abi, sysconfig.get_paths()['include'])")
g++ -O1 -g0 -std=c++20 -fPIC -shared -Wno-deprecated-declarations -Wno-interference-size \
    -D_GLIBCXX_USE_CXX11_ABI="$abi" -DTORCH_EXTENSION_NAME=_C -DTORCH_API_INCLUDE_EXTENSION_H \
    -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
    -isystem "$headers" "$here/sim.cpp" -o "$target/_C.so" \
    -L"$torch/lib" -lc10 -ltorch -ltorch_cpu -ltorch_python -Wl,-rpath,"$torch/lib"
