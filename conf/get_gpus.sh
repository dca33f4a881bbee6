#!/bin/sh
# Prints the GPUs of a machine for Spark: {"name":"gpu","addresses":["0","1"]}
#
# For spark.{worker,executor,driver}.resource.gpu.discoveryScript. Without CUDA_VISIBLE_DEVICES the
# addresses are the indices of the GPUs. With it, they are positions in its list, 0 to n-1, because
# a process that inherits the variable numbers only the GPUs in that list.
# To offer MIG slices, list their UUIDs in CUDA_VISIBLE_DEVICES.
set -eu

fail() {
    echo "get_gpus.sh: $*" >&2
    exit 1
}

print_gpus() {
    addresses=
    for address in "$@"; do
        addresses="$addresses${addresses:+,}\"$address\""
    done
    printf '{"name":"gpu","addresses":[%s]}\n' "$addresses"
}

# One index a line.
installed() {
    command -v nvidia-smi >/dev/null ||
        fail "nvidia-smi is not on PATH ($PATH): no NVIDIA driver here?"
    indices=$(nvidia-smi --query-gpu=index --format=csv,noheader) ||
        fail "nvidia-smi failed: $indices"
    echo "$indices"
}

# Whether CUDA accepts this entry of the list. CUDA ignores the rest of the list after an invalid one.
is_usable() {
    case $1 in
        GPU-* | MIG-*) true ;;
        *) printf '%s\n' "$indices" | grep -qxF -e "$1" ;;
    esac
}

if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
    indices=$(installed)
    # shellcheck disable=SC2086  # one argument per index
    print_gpus $indices
    exit
fi

mask=$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr -d '[:space:]')
case $mask in
    '' | -* | NoDevFiles)  # the ways to say "no GPU"
        print_gpus
        exit
        ;;
esac

indices=$(installed)
set -f
IFS=,
count=0
positions=
for entry in $mask; do
    if ! is_usable "$entry"; then
        echo "get_gpus.sh: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES: there is no GPU '$entry'," \
            "and CUDA ignores the rest of the list" >&2
        break
    fi
    positions="$positions${positions:+,}$count"
    count=$((count + 1))
done
# shellcheck disable=SC2086  # split at the commas
print_gpus $positions
