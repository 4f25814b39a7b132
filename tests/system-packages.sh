#!/bin/sh
# Installs what is missing of the system packages that are named, and nothing else:
#   tests/system-packages.sh venv ip etcd sshd?
# As root it uses apt-get; otherwise it says what to install, and fails unless all that is missing may be (the ones
# with a question mark: tests that need them are skipped). No service is started.
set -eu

python=${PYTHON:-python3}
missing=
wanting=0

need() {
    missing="$missing $1"
    case $wanted in *\?) ;; *) wanting=1 ;; esac
}

header='import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'

for wanted in "$@"; do
    case ${wanted%\?} in
        venv) "$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv ;;
        ip) command -v ip >/dev/null || need iproute2 ;;
        etcd) command -v etcd >/dev/null || need etcd-server ;;
        promtool) command -v promtool >/dev/null || need prometheus ;;
        podman) command -v podman >/dev/null && command -v mmdebstrap >/dev/null \
            || need "podman runc catatonit netavark aardvark-dns iptables mmdebstrap" ;;
        sshd) [ -x /usr/sbin/sshd ] && command -v ssh >/dev/null || need "openssh-server openssh-client" ;;
        slurm) [ -x /usr/sbin/slurmctld ] || need "slurmctld slurmd slurm-client munge" ;;
        arm64) command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null \
            || need "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user" ;;
        chromium) command -v chromium >/dev/null || need "chromium fonts-dejavu-core" ;;
        cc) command -v cc >/dev/null && "$python" -c "$header" || need "gcc libc6-dev python3-dev" ;;
        c++) command -v c++ >/dev/null && "$python" -c "$header" || need "g++ python3-dev" ;;
        *) echo "tests/system-packages.sh: unknown: $wanted" >&2; exit 2 ;;
    esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing on this machine:$missing" >&2
    echo "on Debian, as root: apt-get install --no-install-recommends$missing" >&2
    exit "$wanting"
fi

# Debian asks this program before it starts a service of a package that was just installed.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

echo "installing the system packages$missing ..."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # several words
apt-get install -qq -y --no-install-recommends $missing >/dev/null
