#!/bin/sh
# Installs what is missing of the system packages that are named, and nothing else:
#   tests/system-packages.sh venv ip etcd
# As root it uses apt-get; otherwise it says what to install. No service is started.
set -eu

python=${PYTHON:-python3}
missing=

need() { missing="$missing $1"; }

for wanted in "$@"; do
    case $wanted in
        venv) "$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv ;;
        ip) command -v ip >/dev/null || need iproute2 ;;
        etcd) command -v etcd >/dev/null || need etcd-server ;;
        *) echo "tests/system-packages.sh: unknown: $wanted" >&2; exit 2 ;;
    esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing on this machine:$missing" >&2
    echo "on Debian, as root: apt-get install --no-install-recommends$missing" >&2
    exit 1
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
