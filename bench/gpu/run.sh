#!/usr/bin/env bash
# Checks the GPUs of a bare machine, which has Python 3.12, CUDA 13 with nvcc, torch and transformers, and reaches no
# network. The kit that bench/gpu/pack.py makes has this file at its top:
#
#     tar -xf gpu_kit.tar && gpu_kit/run.sh [--results DIR] [--only STEP ...] [--again]
#
# PYTHON names another Python. The first run installs into a folder of the kit; a later one goes on where it was.
set -euo pipefail

kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
site=$kit/site
library=transformer_engine/wheel_lib
export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Headers of CUDA come with nvcc, those of cuDNN and NCCL with torch.
headers() {
    "$python" - <<'EOF'
import glob, os, sysconfig
print(os.pathsep.join(sorted(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/include"))))
EOF
}

cuda() {
    local found
    for found in "${CUDA_HOME:-}" /usr/local/cuda "$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")"; do
        if [ -e "$found/include/crt/host_config.h" ]; then
            echo "$found"
            return
        fi
    done
    echo "CUDA's headers are neither beside nvcc nor in /usr/local/cuda: name their folder by CUDA_HOME" >&2
    return 1
}

install() {
    rm -rf "$site" "$kit/extension"
    mkdir "$site"
    tar -xf "$kit/site.tar.xz" -C "$site"
    local home
    home=$(cuda)
    CUDA_HOME=$home CPATH="$(headers):$home/include" MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_CUDA_ARCHS=90 \
        "$python" -m pip install --quiet --no-deps --no-build-isolation --no-cache-dir --no-compile \
        --target "$kit/extension" "$kit"/transformer_engine_torch-*
    # Its library must lie beside the core, which pip would replace by it.
    find "$kit/extension" -name 'transformer_engine_torch*.so' -exec cp {} "$site/$library/" \;
    cp -r "$kit"/extension/*.dist-info "$site/"
    touch "$site/.installed"
}

if [ ! -e "$site/.installed" ]; then
    echo "installing into $site"
    time install
fi
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$kit/bench/gpu/check.py" "$@"
