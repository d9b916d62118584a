#!/usr/bin/env bash
# Tests of the CPU kernels for 64-bit Arm in an emulator, with Debian's Python and torch for Arm:
#
#     dpkg --add-architecture arm64; apt update; apt install qemu-user-static
#     make wheels; tests/aarch64.sh [arguments of pytest]
#
# CPU=a64fx is a processor without dot products of bytes; see qemu-aarch64-static -cpu help.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/build/aarch64
wheel=$(ls dist/*_aarch64.whl)
if [ ! -e "$root/done" ]; then
  mkdir -p "$root/debs" "$root/system"
  (cd "$root/debs" && apt-get download {python3.11-minimal,libpython3.11-minimal,libpython3.11-stdlib}:arm64 \
    {libc6,libstdc++6,libgcc-s1,libgomp1,zlib1g,libexpat1,libffi8,libssl3,liblzma5,libbz2-1.0,libuuid1}:arm64)
  for package in "$root"/debs/*.deb; do dpkg -x "$package" "$root/system"; done
  .venv/bin/pip install --quiet --no-deps --target "$root/packages" --python-version 3.11 --only-binary=:all: \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
    torch==2.10.0 typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock numpy scipy \
    pytest pytest-benchmark py-cpuinfo pluggy iniconfig packaging pygments
  touch "$root/done"
fi
rm -rf "$root/attnfast"
python3 -m zipfile -e "$wheel" "$root/attnfast"
export PYTHONPATH="$root/attnfast:$root/packages" OMP_NUM_THREADS=1
cd tests  # the sources' folder would hide the wheel
exec qemu-aarch64-static ${CPU:+-cpu "$CPU"} -L "$root/system" "$root/system/usr/bin/python3.11" \
  -m pytest -q -p no:cacheprovider -k "cpu and (test_table or test_int8 or test_linear) and not compile and not fuzz and not named" \
  test_{attention,memory,coverage,copying,span,recurrent,search,linear}.py "$@"
